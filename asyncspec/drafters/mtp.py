"""Multi-token prediction in the engine: the forward pass of `models.mtp.MTP` over a KV cache, in few operations.

See engine/layers.py.
"""

from __future__ import annotations

import torch

from asyncspec.drafters.features import DecodeFeatures
from asyncspec.engine.backend import Access, Target
from asyncspec.engine.layers import PolicyLayer, RMSNorm, RoPE, layer_shape, scale, scaled
from asyncspec.engine.workspace import Workspace
from asyncspec.models.mtp import MTP


class DecodeMTP(DecodeFeatures):
    """Joins both inputs in one product and feeds it to a block like the policy's. The head is the policy's own."""

    def __init__(self, draft: MTP, target: Target) -> None:
        shape = layer_shape(draft.shape, head_norms=draft.block.attention.q_norm is not None)
        super().__init__(draft, shape, RoPE.of(target.model), target)
        self.head = target.model.lm_head
        self.layer = PolicyLayer(draft.block, shape, 0, self.cache, self.derived)
        self.norm = RMSNorm(draft.norm, self.derived)

    def reload(self) -> None:
        self.derived.clear()
        self.layer.reload()
        self.norm.reload()
        norms_I = torch.cat([scale(self.draft.embed_norm), scale(self.draft.hidden_norm)])
        self.fc = self.derived.matrix(scaled(self.draft.fc.weight, norms_I))
        self.lm_head = self.derived.matrix(self.head.weight)

    def fuse(self, features_TE: torch.Tensor, space: Workspace) -> None:
        space.x.tensor.copy_(features_TE)

    def logits(self, space: Workspace) -> torch.Tensor:
        return self.lm_head(space.x.tensor)

    def join(self, space: Workspace) -> None:
        super().join(space)
        self.fc.write(space.units, space.x)

    def __call__(self, space: Workspace, access: Access, rotation: torch.Tensor) -> None:
        super().__call__(space, access, rotation)
        space.x.tensor.copy_(self.norm(space))

    def own_weights(self) -> dict:
        norm = self.layer.head_norm
        norms = {} if norm is None else {"inverse_RH": norm.inverse_RH.numpy()}
        bias = {} if self.layer.bias is None else {"bias_W": self.layer.bias.numpy()}
        return {"join_ID": self.fc.to_numpy(), "norm_D": self.norm.weight.numpy(), **norms, **bias}
