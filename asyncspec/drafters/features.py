"""Drafters that read the target's hidden states: EAGLE-3, and the policy's own multi-token-prediction module.

Position t of such a draft reads the target's features of position t and token t+1, and predicts token t+2; drafting on,
it reads its own hidden state in place of the target's. Features wait in a buffer until the drafter is asked for
proposals; then keys and values of all it has missed but the last position are made in one pass, right-aligned over the
rows, and it drafts on from there, that position first. A draft replaced in between costs acceptance, never exactness:
proposals are verified against the very distribution they were drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from asyncspec.drafters.numba_draft import CompiledDraft
from asyncspec.engine import memory
from asyncspec.engine.graphs import Graphs
from asyncspec.engine.kv_cache import Spans, runs
from asyncspec.engine.numpy_cache import NumpyKVCache, Packed
from asyncspec.engine.workspace import Workspace
from asyncspec.speculation.drafter import Proposal, Slots
from asyncspec.speculation.verify import sample, sampling_distribution

UNSTORED = 32  # steps without speculation whose features are written at once


class FeatureDrafter:
    remembers = looks_up = False

    def __init__(self, draft, decode, embedding_VD, slots: Slots, settings: tuple[float, float, int]) -> None:
        """
        Args:
            draft: the module whose weights a new draft version replaces: `Eagle3` or `MTP`, of the target's dtype.
            decode: its forward pass over a KV cache (`DecodeEagle3`, `DecodeMTP`), in a workspace: `fuse` puts features
                there as x, `read` puts keys and values of x and an embedding in the cache, calling it besides leaves as
                x what is to be fed back, `logits` are those for the token after. `to_numpy` gives what drafting.py
                wants to do the same, or None.
            embedding_VD: the target's.
            settings: temperature, top_p, top_k of the target; the draft follows them to be accepted more.
        """
        self.draft, self.decode, self._embedding_VD, self.slots, self.settings = (
            draft,
            decode,
            embedding_VD,
            slots,
            settings,
        )
        self.aux_layers = draft.aux_layers
        size = (*slots.token_SP.shape, len(self.aux_layers) * draft.shape.dim)
        self.feature_SPE = memory.zeros(*size, dtype=draft.fc.weight.dtype, device=slots.device)
        self._feature_TE = self.feature_SPE.view(-1, size[-1])
        self._start_S1 = torch.arange(size[0], device=slots.device).unsqueeze(1) * slots.positions
        self._unstored: list[torch.Tensor] = []  # features of single positions, from row 0; layer by layer
        self._unstored_at: list[torch.Tensor] = []  # and the positions
        self.read = np.zeros(size[0], dtype=np.int64)  # positions below are in the KV cache
        self.graphs: Graphs | None = None
        self._compiled: CompiledDraft | None = None
        _, top_p, top_k = settings
        self._whole = top_p >= 1.0 and not 0 < top_k < len(embedding_VD)  # whether all tokens may be sampled
        self.reload()

    def reload(self) -> None:
        self.decode.reload()
        if (
            isinstance(self.decode.cache, NumpyKVCache)
            and (weights := self.decode.to_numpy(self._embedding_VD)) is not None
        ):
            if self._compiled is None:
                self._compiled = CompiledDraft(
                    self.slots, self.read, self.feature_SPE, self.decode.cache, self.draft.shape.norm_eps
                )
            self._compiled.reload(weights)

    def launch_by(self, graphs: Graphs | None) -> None:
        self.graphs = graphs

    def enter(self, first_row: int, count: int) -> None:
        self.read[first_row : first_row + count] = 0

    def observe(self, first_row: int, features_BLD, position_BL, packed: Packed | None = None) -> None:
        B, L = position_BL.shape
        if first_row or L > 1:
            self._store()
            if self._compiled is not None:
                self._compiled.store(features_BLD, first_row, position_BL, packed)
            else:
                self._write(first_row, torch.cat(features_BLD, -1), position_BL, packed)
            return
        # While nothing is proposed, one write serves many steps: it costs as much as a hundredth of a step.
        waiting = self._unstored_at
        if waiting and (len(waiting) == UNSTORED or len(waiting[0]) != B):
            self._store()
        self._unstored += features_BLD
        self._unstored_at.append(position_BL)

    def _store(self) -> None:
        """Write what `observe` has put off."""
        if self._unstored_at:
            self._write(0, torch.cat(self._unstored, 1), torch.cat(self._unstored_at, 1))
            self._unstored.clear()
            self._unstored_at.clear()

    def _write(self, first_row: int, features, position_BL, packed: Packed | None = None) -> None:
        """`features` hold those of each position's layers in turn, whatever their shape."""
        index_N = (self._start_S1[first_row : first_row + len(position_BL)] + position_BL).flatten()
        if packed is not None:
            index_N = index_N[torch.from_numpy(packed.at_T)]
        self._feature_TE.index_copy_(0, index_N, features.reshape(-1, self._feature_TE.shape[-1]))

    def catch_up(self) -> None:
        self._store()

    def unread(self, count: int) -> int:
        # The last token's features come with the next verification.
        return max(1, int((self.slots.length[:count] - 1 - self.read[:count]).max()))

    def prefill(self, first_row: int, count: int) -> None:
        rows = slice(first_row, first_row + count)
        width = int((self.slots.length[rows] - 1 - self.read[rows]).max())
        if width > 0:
            self._store()
            if self._compiled is not None:
                self._compiled.read(first_row, self.slots.length[rows] - 1)
            else:
                self._read(first_row, self.slots.length_S[rows] - 1, width)
            self.read[rows] = self.slots.length[rows] - 1

    def propose(self, count: int, draft_length: int, uniform_BK) -> Proposal:
        self._store()
        if self._compiled is not None and self._whole:
            draft_BK, q_BKV = self._compiled.propose(uniform_BK, self.settings[0])
        else:
            draft_BK, q_BKV = self._launched(count, draft_length, uniform_BK)
        self.read[:count] = self.slots.length[:count] - 1
        return Proposal(draft_BK, q_BKV)

    def _launched(self, count: int, draft_length: int, uniform_BK) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and distributions, by passes that are launched one by one, or by a graph of them."""
        inputs, width, spans = (
            (self.slots.length_S[:count], uniform_BK),
            self.unread(count),
            self.slots.spans(0, count, draft_length - 2),
        )
        if self.graphs is None or width > draft_length + 1:  # which a draft has to read after it has rested
            q_BKV, draft_BK = self._proposal(*inputs, spans, width)
        else:
            # one graph, whatever was accepted
            q_BKV, draft_BK = self.graphs(self._proposal, inputs, spans, draft_length + 1)
        return draft_BK, q_BKV

    def _proposal(self, length_B, uniform_BK, spans: Spans, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Distributions and tokens, once the `width` positions before each row's last token are read."""
        (B, K), slots, decode = uniform_BK.shape, self.slots, self.decode
        if width > 1:
            self._read(0, length_B - 2, width - 1)
        space, position_BK = decode.spaces(B, 1), (length_B.unsqueeze(1) + (slots.index_P[:K] - 2)).clamp_(min=0)
        token_B = self._fuse(0, position_BK[:, :1], space).squeeze(1)
        place, rotations = (
            decode.cache.at(0, position_BK, spans),
            decode.rope.at(position_BK).unflatten(0, (B, K)).unbind(1),
        )
        tokens, distributions = [], []
        for uniform_B, step, rotation in zip(uniform_BK.unbind(1), place.each(), rotations):
            torch.index_select(self._embedding_VD, 0, token_B, out=space.embedding_TD)
            decode(space, step, rotation)
            distributions.append(sampling_distribution(decode.logits(space), *self.settings))
            tokens.append(token_B := sample(distributions[-1], uniform_B))
        return torch.stack(distributions, 1), torch.stack(tokens, 1)

    def copy(self, sources: Sequence[int], rows: Sequence[int]) -> None:
        self._store()
        if self._compiled is not None:
            self._compiled.copy(sources, rows)
            self.read[rows] = self.read[sources]
            return
        length, read = int(self.slots.length[sources].max()), int(self.read[sources].max())
        if read:
            self.decode.cache.copy(sources, rows, read)
        for source, copies in runs(sources, rows):
            self.feature_SPE[copies, :length] = self.feature_SPE[source, :length]
            self.read[copies] = self.read[source]

    def leave(self, row: int) -> None:
        pass

    def _read(self, first_row: int, end_B, width: int) -> None:
        """Read the `width` positions before each row's end; what was read before is read again alike."""
        position_BW = (end_B.unsqueeze(1) + (self.slots.index_P[:width] - width)).clamp_(min=0)
        space = self.decode.spaces(len(end_B), width)
        token_BW = self._fuse(first_row, position_BW, space)
        torch.index_select(self._embedding_VD, 0, token_BW.flatten(), out=space.embedding_TD)
        self.decode.read(space, self.decode.cache.at(first_row, position_BW, []), self.decode.rope.at(position_BW))

    def _fuse(self, first_row: int, position_BW, space: Workspace) -> torch.Tensor:
        """Put the features of these positions in the workspace; returns the tokens after them."""
        rows = slice(first_row, first_row + len(position_BW))
        self.decode.fuse(self._feature_TE[(self._start_S1[rows] + position_BW).flatten()], space)
        return self.slots.token_SP[rows].gather(1, position_BW + 1)
