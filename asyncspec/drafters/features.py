"""Drafters over the target's hidden states: EAGLE-3, and the policy's own multi-token-prediction (MTP) module.

At position t such a draft takes the target's features of position t and the token t+1, and predicts token t+2. To draft
further it takes its own hidden state in place of the target's. Features are kept until the drafter is asked for
proposals. Then one pass, right-aligned over the rows, makes the keys and values of all positions it has missed but the
last. Drafting starts at that last position. If the draft's weights are replaced in between, acceptance suffers but
exactness does not: proposals are verified against the very distribution they were drawn from.

`FeatureDrafter` launches its passes one by one, or as a graph. `NumbaDrafter` does the same work in one function.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from asyncspec.drafters import numba_draft
from asyncspec.engine import memory
from asyncspec.engine.backend import Access, Target
from asyncspec.engine.graphs import Graphs
from asyncspec.engine.kv_cache import Spans, runs
from asyncspec.engine.layers import DecodeLayer, RoPE
from asyncspec.engine.matrix import Derived, Matrix
from asyncspec.engine.workspace import LayerShape, Workspace
from asyncspec.loading import use_threads
from asyncspec.models.policy import cast
from asyncspec.speculation.drafter import Drafter, Packed, Proposal
from asyncspec.speculation.verify import sample, sampling_distribution


class DecodeFeatures(ABC):
    """A draft's forward pass over a one-layer KV cache, in a workspace with two inputs: an embedding, and x."""

    layer: DecodeLayer
    fc: Matrix
    lm_head: Matrix

    def __init__(self, draft, shape: LayerShape, rope: RoPE, target: Target) -> None:
        self.draft, self.shape, self.rope, self.derived = draft, shape, rope, Derived()
        self.cache = target.backend.cache(1, *target.slots.token_SP.shape, shape)
        self.spaces = target.backend.workspaces(shape, inputs=2)

    @abstractmethod
    def reload(self) -> None:
        """Derive the layer's matrices again from the parameters."""

    @abstractmethod
    def fuse(self, features_TE: torch.Tensor, space: Workspace) -> None:
        """Compute x from the target's features, [T, E]."""

    @abstractmethod
    def logits(self, space: Workspace) -> torch.Tensor:
        """Return the logits of the next token, [T, V]."""

    def join(self, space: Workspace) -> None:
        """Turn both inputs into the input of the layer."""
        space.normalize_inputs()

    def write(self, space: Workspace, access: Access, rotation: torch.Tensor) -> None:
        """Write the keys and values of these inputs to the cache."""
        self.join(space)
        self.layer.write(space, access, rotation)

    def __call__(self, space: Workspace, access: Access, rotation: torch.Tensor) -> None:
        """Do a whole pass: write keys and values, and turn x into the hidden state that the next pass takes."""
        self.join(space)
        self.layer(space, access, rotation)

    @abstractmethod
    def own_weights(self) -> dict:
        """Return the fields of `numba_draft.Weights` that not every draft has."""

    def to_numba(self, embedding_VD: torch.Tensor) -> numba_draft.Weights:
        """Return the weights of a dense draft in numba's layout."""
        layer = self.layer
        matrices = (layer.wqkv, layer.wo, layer.mlp.inward, layer.mlp.outward, self.lm_head)
        arrays = [embedding_VD.detach().numpy(), *(matrix.to_numpy() for matrix in matrices), self.rope.to_numpy()]
        own = {"token_U": np.arange(len(embedding_VD)), **self.own_weights()}
        own = {name: np.ascontiguousarray(array) for name, array in own.items()}
        return numba_draft.Weights(*(np.ascontiguousarray(array) for array in arrays), **own)


class FeatureDrafter(Drafter):
    def __init__(self, draft, decode: DecodeFeatures, target: Target) -> None:
        """
        Args:
            draft: `Eagle3` or `MTP`, in the target's dtype. A new draft version replaces its weights.
            decode: its forward pass.
        """
        self.draft, self.decode, self.slots, self.sampling = draft, decode, target.slots, target.sampling
        self.aux_layers, self._embedding_VD = draft.aux_layers, target.model.tok_embeddings.weight
        S, P = self.slots.token_SP.shape
        size = (S, P, len(self.aux_layers) * draft.shape.dim)
        self.feature_SPE = memory.zeros(*size, dtype=target.backend.dtype, device=self.slots.device)
        self._feature_TE = self.feature_SPE.view(S * P, -1)
        self._start_S1 = torch.arange(S, device=self.slots.device).unsqueeze(1) * P
        self.cached_S = np.zeros(S, dtype=np.int64)  # positions below this are in the KV cache
        self.graphs: Graphs | None = None
        self.reload()

    def reload(self) -> None:
        self.decode.reload()

    def launch_by(self, graphs: Graphs | None) -> None:
        self.graphs = graphs

    def enter(self, first_row: int, count: int) -> None:
        self.cached_S[first_row : first_row + count] = 0

    def observe(self, first_row: int, features_BLD, position_BL, packed: Packed | None = None) -> None:
        index_N = (self._start_S1[first_row : first_row + len(position_BL)] + position_BL).flatten()
        if packed is not None:
            index_N = index_N[torch.from_numpy(packed.at_T)]
        features_BLE = torch.cat(features_BLD, -1)
        self._feature_TE.index_copy_(0, index_N, features_BLE.flatten(0, -2))

    def behind(self, count: int) -> int:
        # The features of the last token arrive with the next verification.
        return max(1, int((self.slots.length[:count] - 1 - self.cached_S[:count]).max()))

    def prefill(self, first_row: int, count: int) -> None:
        rows = slice(first_row, first_row + count)
        width = int((self.slots.length[rows] - 1 - self.cached_S[rows]).max())
        if width > 0:
            self._read(rows, width)
            self.cached_S[rows] = self.slots.length[rows] - 1

    def propose(self, count: int, draft_length: int, uniform_BK) -> Proposal:
        draft_BK, q_BKV = self._draft(count, draft_length, uniform_BK)
        self.cached_S[:count] = self.slots.length[:count] - 1
        return Proposal(draft_BK, q_BKV)

    def _read(self, rows: slice, width: int) -> None:
        """Process the `width` positions before each row's last token."""
        self._read_before(rows.start, self.slots.length_S[rows] - 1, width)

    def _draft(self, count: int, draft_length: int, uniform_BK) -> tuple[torch.Tensor, torch.Tensor]:
        """Return proposed tokens and their distributions, from passes launched one by one or from a graph of them."""
        inputs, width = (self.slots.length_S[:count], uniform_BK), self.behind(count)
        spans = self.slots.spans(0, count, draft_length - 2)
        if self.graphs is None or width > draft_length + 1:  # a wider pass follows steps without proposals
            q_BKV, draft_BK = self._proposal(*inputs, spans, width)
        else:
            # one graph serves any number of accepted proposals
            q_BKV, draft_BK = self.graphs(self._proposal, inputs, spans, draft_length + 1)
        return draft_BK, q_BKV

    def _proposal(self, length_B, uniform_BK, spans: Spans, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Process the `width` positions before each row's last token, then draft; return distributions and tokens."""
        (B, K), slots, decode = uniform_BK.shape, self.slots, self.decode
        if width > 1:
            self._read_before(0, length_B - 2, width - 1)
        space, position_BK = decode.spaces(B, 1), (length_B.unsqueeze(1) + (slots.index_P[:K] - 2)).clamp_(min=0)
        token_B = self._fuse(0, position_BK[:, :1], space).squeeze(1)
        access = decode.cache.at(0, position_BK, spans)
        rotations = decode.rope.at(position_BK).unflatten(0, (B, K)).unbind(1)
        tokens, distributions = [], []
        for uniform_B, step, rotation in zip(uniform_BK.unbind(1), access.each(), rotations):
            torch.index_select(self._embedding_VD, 0, token_B, out=space.embedding_TD)
            decode(space, step, rotation)
            distributions.append(sampling_distribution(decode.logits(space), self.sampling))
            tokens.append(token_B := sample(distributions[-1], uniform_B))
        return torch.stack(distributions, 1), torch.stack(tokens, 1)

    def copy(self, sources: Sequence[int], rows: Sequence[int]) -> None:
        length, cached = int(self.slots.length[sources].max()), int(self.cached_S[sources].max())
        if cached:
            self.decode.cache.copy(sources, rows, cached)
        for source, copies in runs(sources, rows):
            self.feature_SPE[copies, :length] = self.feature_SPE[source, :length]
            self.cached_S[copies] = self.cached_S[source]

    def _read_before(self, first_row: int, end_B, width: int) -> None:
        """Process the `width` positions before each row's end. Repeating a position gives the same keys and values."""
        position_BW = (end_B.unsqueeze(1) + (self.slots.index_P[:width] - width)).clamp_(min=0)
        space = self.decode.spaces(len(end_B), width)
        token_BW = self._fuse(first_row, position_BW, space)
        torch.index_select(self._embedding_VD, 0, token_BW.flatten(), out=space.embedding_TD)
        self.decode.write(space, self.decode.cache.at(first_row, position_BW, []), self.decode.rope.at(position_BW))

    def _fuse(self, first_row: int, position_BW, space: Workspace) -> torch.Tensor:
        """Put the features of these positions into the workspace; return the tokens that follow them."""
        rows = slice(first_row, first_row + len(position_BW))
        self.decode.fuse(self._feature_TE[(self._start_S1[rows] + position_BW).flatten()], space)
        return self.slots.token_SP[rows].gather(1, position_BW + 1)


class NumbaDrafter(FeatureDrafter):
    """A `FeatureDrafter` on one CPU thread, in functions that numba compiles.

    With top-k or top-p it launches passes one by one, as its base class does.
    """

    def __init__(self, draft, decode: DecodeFeatures, target: Target) -> None:
        numba_draft.prepare()
        use_threads(1)  # for numba's BLAS, too
        super().__init__(draft, decode, target)
        self._whole = self.sampling.whole(len(self._embedding_VD))
        self._eps, self._temperature = np.float32(draft.shape.norm_eps), np.float32(self.sampling.temperature)
        self._rows = numba_draft.State(
            self.slots.token_SP.numpy(),
            self.slots.length,
            self.cached_S,
            self.feature_SPE.numpy(),
            decode.cache.keys[0].numpy(),
            decode.cache.values[0].numpy(),
        )

    def reload(self) -> None:
        super().reload()
        self._weights = self.decode.to_numba(self._embedding_VD)

    def observe(self, first_row: int, features_BLD, position_BL, packed: Packed | None = None) -> None:
        parts = tuple(features.numpy().reshape(-1, features.shape[-1]) for features in features_BLD)
        at_T = numba_draft.ALL if packed is None else packed.at_T
        numba_draft.store(self._rows.feature_SPE, parts, first_row, np.ascontiguousarray(position_BL.numpy()), at_T)

    def _read(self, rows: slice, width: int) -> None:
        numba_draft.read(self._weights, self._rows, rows.start, self.slots.length[rows] - 1, self._eps)

    def _draft(self, count: int, draft_length: int, uniform_BK) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._whole:
            return super()._draft(count, draft_length, uniform_BK)
        uniform_BK = np.ascontiguousarray(uniform_BK.numpy())
        token_BK, q_BKV = numba_draft.propose(self._weights, self._rows, uniform_BK, self._temperature, self._eps)
        return torch.from_numpy(token_BK), torch.from_numpy(q_BKV)

    def copy(self, sources: Sequence[int], rows: Sequence[int]) -> None:
        numba_draft.copy(self._rows, np.array(sources), np.array(rows))
        self.cached_S[rows] = self.cached_S[sources]


def feature_drafter(decode: type[DecodeFeatures], draft, target: Target) -> FeatureDrafter:
    """Make the drafter for a draft module. The module then belongs to the engine."""
    backend = target.backend
    draft = cast(draft.to(backend.device), backend.dtype).requires_grad_(False)
    passes = decode(draft, target)
    dense = passes.shape.hidden_dim > 0
    return (NumbaDrafter if backend.numba and dense else FeatureDrafter)(draft, passes, target)
