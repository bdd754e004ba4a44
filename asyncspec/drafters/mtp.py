"""Multi-token prediction as a drafter: `models.mtp.MTP` over a KV cache, in few operations; see engine/decode.py."""

from __future__ import annotations

import torch

from asyncspec.drafters.features import FeatureDrafter
from asyncspec.drafters.numba_draft import Weights
from asyncspec.engine.decode import MLP, DecodeLayer, RMSNorm, RoPE, layer_shape, scale, scaled
from asyncspec.engine.kv_cache import Place
from asyncspec.engine.matrix import Matrix
from asyncspec.engine.memory import Arena
from asyncspec.engine.numpy_cache import NumpyPlace, make_cache
from asyncspec.engine.workspace import Workspace, Workspaces
from asyncspec.models.mtp import MTP
from asyncspec.models.policy import cast, dtype_of
from asyncspec.speculation.drafter import Slots


class DecodeMTP:
    def __init__(self, draft: MTP, model, slots: Slots) -> None:
        """
        Args:
            model: the policy, whose head and table of cosines and sines are used.
        """
        shape, dtype = layer_shape(draft.shape, draft.block.attention.q_norm is not None), dtype_of(model)
        self.cache = make_cache(1, *slots.token_SP.shape, shape, slots.device, dtype)
        self.spaces = Workspaces(shape, dtype, slots.device, inputs=2)
        self.draft, self.head, self.rope = draft, model.lm_head, RoPE.of(model)
        self.arena = Arena()
        self.layer = DecodeLayer(draft.block, shape, 0, self.cache, self.arena)
        self.norm = RMSNorm(draft.norm, self.arena)

    def reload(self) -> None:
        """Derive from the parameters anew what is derived from them."""
        self.arena.clear()
        self.layer.reload()
        self.norm.reload()
        self.fc = Matrix(
            scaled(self.draft.fc.weight, torch.cat([scale(self.draft.embed_norm), scale(self.draft.hidden_norm)])),
            self.arena,
        )
        self.lm_head = Matrix(self.head.weight, self.arena)

    def to_numpy(self, embedding_VD: torch.Tensor) -> Weights | None:
        """None: of a mixture of experts."""
        layer = self.layer
        if not isinstance(layer.mlp, MLP):
            return None
        norms = {} if layer.head_norm is None else {"inverse_RH": layer.head_norm.inverse_RH.numpy()}
        return Weights(
            embedding_VD.detach().numpy(),
            layer.wqkv.to_numpy(),
            layer.wo.to_numpy(),
            layer.mlp.inward.to_numpy(),
            layer.mlp.outward.to_numpy(),
            self.lm_head.to_numpy(),
            self.rope.to_numpy(),
            join_ID=self.fc.to_numpy(),
            norm_D=self.norm.weight.numpy(),
            **norms,
        )

    def fuse(self, features_TE: torch.Tensor, space: Workspace) -> None:
        space.x.tensor.copy_(features_TE)

    def logits(self, space: Workspace) -> torch.Tensor:
        return self.lm_head(space.x)

    def read(self, space: Workspace, place: Place | NumpyPlace, rotation: torch.Tensor) -> None:
        self._join(space)
        self.layer.read(space, place, rotation)

    def __call__(self, space: Workspace, place: Place | NumpyPlace, rotation: torch.Tensor) -> None:
        self._join(space)
        self.layer(space, place, rotation)
        space.x.tensor.copy_(self.norm(space))

    def _join(self, space: Workspace) -> None:
        """x = both inputs, normalized, in one product."""
        space.normalize_inputs()
        self.fc.write(space.units, space.x)


def mtp_drafter(draft: MTP, model, slots: Slots, settings) -> FeatureDrafter:
    draft = cast(draft.to(slots.device), dtype_of(model)).requires_grad_(False)
    return FeatureDrafter(draft, DecodeMTP(draft, model, slots), model.tok_embeddings.weight, slots, settings)
