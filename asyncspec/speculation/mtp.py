"""Multi-token prediction as a drafter: `models.mtp.MTP` over a KV cache, in few operations; see engine/decode.py."""

from __future__ import annotations

import torch

from asyncspec.engine.decode import DecodeLayer, Matrix, RMSNorm, RoPE, Unit, scale, scaled
from asyncspec.engine.kv_cache import KVCache
from asyncspec.engine.memory import Arena
from asyncspec.models.mtp import MTP
from asyncspec.models.policy import cast, dtype_of
from asyncspec.speculation.base import Slots
from asyncspec.speculation.features import FeatureDrafter


class DecodeMTP:
    def __init__(self, draft: MTP, model, slots: Slots) -> None:
        """
        Args:
            model: the policy, whose head and table of cosines and sines are used.
        """
        shape = draft.shape
        self.cache = KVCache(
            1, *slots.token_SP.shape, shape.n_kv_heads, shape.n_heads // shape.n_kv_heads, shape.head_dim, slots.device, dtype_of(model))
        self.draft, self.head, self.rope = draft, model.lm_head, RoPE.of(model)
        self.arena = Arena()
        self.layer = DecodeLayer(draft.block, 0, self.cache, self.arena)
        self.unit, self.norm = Unit(shape.dim, shape.norm_eps, slots.device), RMSNorm(draft.norm, self.arena)

    def reload(self) -> None:
        """Derive from the parameters anew what is derived from them."""
        self.arena.clear()
        self.layer.reload()
        self.norm.reload()
        self.fc = Matrix(scaled(self.draft.fc.weight, torch.cat([scale(self.draft.embed_norm), scale(self.draft.hidden_norm)])), self.arena)
        self.lm_head = Matrix(self.head.weight, self.arena)

    def fuse(self, features_TE: torch.Tensor) -> torch.Tensor:
        return features_TE

    def logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden_BD)

    def __call__(self, hidden_TD, embeds_TD, place, rotation) -> torch.Tensor:
        x_TD = self.fc(self.unit(torch.stack([embeds_TD, hidden_TD], 1)).flatten(1))
        return self.norm(self.layer(x_TD, place, rotation))


def mtp_drafter(draft: MTP, model, slots: Slots, settings) -> FeatureDrafter:
    draft = cast(draft.to(slots.device), dtype_of(model)).requires_grad_(False)
    return FeatureDrafter(draft, DecodeMTP(draft, model, slots), model.tok_embeddings, slots, settings)
