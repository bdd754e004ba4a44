"""The policy's forward pass as the engine runs it: torchtitan's parameters, the layers of layers.py, a slot KV cache.

tests/test_engine.py checks that it gives the same logits as torchtitan's own forward pass.

Shape suffixes: those of workspace.py, and V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncspec.engine.backend import Backend
from asyncspec.engine.graphs import TOKENS, Graphs
from asyncspec.engine.kv_cache import Spans
from asyncspec.engine.layers import PolicyLayer, RMSNorm, RoPE, layer_shape
from asyncspec.engine.matrix import Derived, Matrix
from asyncspec.engine.routes import Routes
from asyncspec.models.policy import PolicyShape
from asyncspec.speculation.drafter import Packed


class DecodeModel:
    """A policy with its own KV cache."""

    lm_head: Matrix

    def __init__(
        self, model, shape: PolicyShape, slots: int, positions: int, backend: Backend, routing: bool = False
    ) -> None:
        """
        Args:
            model: a torchtitan model from `models.policy.build`, in the back end's dtype. Call `reload` before the
                first pass, and whenever its parameters have changed.
            slots, positions: rows of the cache, and positions in each.
            routing: whether the experts of each token are kept.
        """
        blocks = model.layers.values()
        layers = layer_shape(shape, head_norms=next(iter(blocks)).attention.q_norm is not None)
        self.cache, self.spaces = backend.cache(shape.n_layers, slots, positions, layers), backend.workspaces(layers)
        self.rope, self.derived = RoPE.of(model), Derived()
        self.embedding, self._head = model.tok_embeddings.weight, model.lm_head
        self.norm = RMSNorm(model.norm, self.derived)
        self.layers = [
            PolicyLayer(block, layers, index, self.cache, self.derived) for index, block in enumerate(blocks)
        ]
        mixtures = [layer.mlp for layer in self.layers] if routing else []
        self.routes = Routes(mixtures, slots, positions, self.embedding.device) if routing else None
        self.graphs: Graphs | None = None
        # In float32 torch's grouped products synchronize with the host, so a pass with experts cannot be captured.
        self._captures, self._rows = shape.experts is None or backend.dtype is torch.bfloat16, slots

    def reload(self) -> None:
        """Derive all matrices and norms from the parameters again."""
        self.derived.clear()
        self.norm.reload()
        self.lm_head = self.derived.matrix(self._head.weight)
        for layer in self.layers:
            layer.reload()

    def launch_by(self, graphs: Graphs | None) -> None:
        """From now on launch small passes as these graphs, if they can be captured; None: kernel by kernel."""
        self.graphs = graphs if self._captures else None

    def attends_at_once(self, tokens: int) -> bool:
        """Whether a pass over this many tokens attends over all rows as one group, however they are grouped."""
        return self.graphs is not None and tokens <= TOKENS

    def hidden_states(
        self, first_row: int, token_BL, position_BL, spans: Spans, aux_layers=(), packed: Packed | None = None
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Run the layers over tokens of rows `first_row`, ..., and write their keys and values to the cache.

        Args:
            position_BL: int64, position of each token in its row.
            spans: bounds of the positions, known on the host, see `KVCache.at`.
            packed: compute only these T tokens; None: all. Only for back ends that pack.

        Returns:
            hidden_BLD after the final norm, and the inputs of `aux_layers`, each [B, L, D]; with `packed`, [T, 1, D].
        """
        if self.graphs is None:
            hidden_BLD, *kept_BLD = self._pass(token_BL, position_BL, spans, aux_layers, first_row, packed)
        else:
            spare = self._rows - first_row if first_row else None
            hidden_BLD, *kept_BLD = self.graphs(
                self._pass, (token_BL, position_BL), spans, aux_layers, first_row, most=spare
            )
        return hidden_BLD, kept_BLD

    def copy(self, sources: Sequence[int], rows: Sequence[int], length: int) -> None:
        """Copy what the passes left at the first `length` positions of each source to its row."""
        self.cache.copy(sources, rows, length)
        if self.routes is not None:
            self.routes.copy(sources, rows, length)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits, [..., V], of hidden states from `hidden_states`, [..., D]."""
        return self.lm_head(hidden.flatten(0, -2)).view(*hidden.shape[:-1], -1)

    def _pass(
        self, token_BL, position_BL, spans: Spans, aux_layers, first_row: int, packed: Packed | None = None
    ) -> list[torch.Tensor]:
        access, given_BL = self.cache.at(first_row, position_BL, spans, packed), position_BL
        if packed is not None:
            at_T1 = torch.from_numpy(packed.at_T).unsqueeze(1)
            token_BL, position_BL = token_BL.flatten()[at_T1], position_BL.flatten()[at_T1]
        (B, L), rotation, kept = token_BL.shape, self.rope.at(position_BL), []
        space = self.spaces(B, L)
        torch.index_select(self.embedding, 0, token_BL.flatten(), out=space.x.tensor)
        for index, layer in enumerate(self.layers):
            if index in aux_layers:
                kept.append(space.x.tensor.clone())
            layer(space, access, rotation)
        if self.routes is not None:
            self.routes.write(first_row, given_BL, packed)
        hidden_TD = self.norm(space)
        if len(self.layers) in aux_layers:
            kept.append(hidden_TD)
        return [kept_TD.view(B, L, -1) for kept_TD in (hidden_TD, *kept)]
