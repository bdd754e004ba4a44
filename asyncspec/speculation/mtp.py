"""Multi-token prediction as a drafter: `models.mtp.MTP` over a KV cache, in few operations; see engine/decode.py."""

from __future__ import annotations

import torch

from asyncspec.engine.decode import DecodeLayer, RMSNorm, RoPE
from asyncspec.engine.kv_cache import KVCache
from asyncspec.models.mtp import MTP
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
            1, *slots.token_SP.shape, shape.n_kv_heads, shape.n_heads // shape.n_kv_heads, shape.head_dim, slots.device)
        self.rope = RoPE(next(iter(model.layers.values())).attention.rope.cache)
        self.layer = DecodeLayer(draft.block, 0, self.cache)
        self.hidden_norm, self.embed_norm, self.norm = (
            RMSNorm(n.weight, n.eps) for n in (draft.hidden_norm, draft.embed_norm, draft.norm))
        self.fc, self.lm_head = draft.fc.weight.t(), model.lm_head.weight.t()

    def reload(self) -> None:
        self.layer.reload()

    def fuse(self, features_TE: torch.Tensor) -> torch.Tensor:
        return features_TE

    def logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        return torch.mm(hidden_BD, self.lm_head)

    def __call__(self, hidden_TD, embeds_TD, place, cos, sin) -> torch.Tensor:
        x_TD = torch.mm(torch.cat([self.embed_norm(embeds_TD), self.hidden_norm(hidden_TD)], -1), self.fc)
        return self.norm(self.layer(x_TD, place, cos, sin))


def mtp_drafter(draft: MTP, model, slots: Slots, settings) -> FeatureDrafter:
    return FeatureDrafter(draft.to(slots.device).requires_grad_(False), DecodeMTP(draft, model, slots), model.tok_embeddings, slots, settings)
