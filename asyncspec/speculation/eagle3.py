"""EAGLE-3 as a drafter: `models.eagle3.Eagle3` over a KV cache, in few operations; see engine/decode.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from asyncspec.engine.decode import RMSNorm, RoPE, rotated
from asyncspec.engine.kv_cache import KVCache
from asyncspec.models.eagle3 import Eagle3
from asyncspec.speculation.base import Slots
from asyncspec.speculation.features import FeatureDrafter


class DecodeEagle3:

    def __init__(self, draft: Eagle3, slots: Slots) -> None:
        shape, layer = draft.shape, draft.midlayer
        self.groups, self.queries = shape.n_kv_heads, shape.n_heads // shape.n_kv_heads
        self.head_dim = shape.head_dim
        self.cache = KVCache(1, *slots.token_SP.shape, self.groups, self.queries, shape.head_dim, slots.device)
        angles = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angles_PH = torch.outer(torch.arange(slots.positions).float(), angles).repeat(1, 2)
        self.rope = RoPE(torch.cat([angles_PH.cos(), angles_PH.sin()], -1).to(slots.device))
        self.embed_norm, self.hidden_norm, self.mlp_norm, self.norm = (
            RMSNorm(n.weight, n.eps) for n in (layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm, draft.norm))
        self.attention = layer.self_attn
        self.fc, self.wo, self.gate, self.up, self.down, self.lm_head = (linear.weight.t() for linear in (
            draft.fc, layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj, draft.lm_head))

    def reload(self) -> None:
        """Take the projection that is joined from three parameters anew."""
        a, G = self.attention, self.groups
        parts = [w.weight.view(G, -1, w.weight.shape[-1]) for w in (a.q_proj, a.k_proj, a.v_proj)]
        self.wqkv = torch.cat(parts, 1).flatten(0, 1).t()

    def fuse(self, features_TE: torch.Tensor) -> torch.Tensor:
        return torch.mm(features_TE, self.fc)

    def logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        return torch.mm(self.norm(hidden_BD), self.lm_head)

    def __call__(self, hidden_TD, embeds_TD, place, cos, sin) -> torch.Tensor:
        B, L = place.shape
        x_TD2 = torch.cat([self.embed_norm(embeds_TD), self.hidden_norm(hidden_TD)], -1)
        qkv_BLGRH = torch.mm(x_TD2, self.wqkv).view(B, L, self.groups, self.queries + 2, self.head_dim)
        qk = qkv_BLGRH[..., : self.queries + 1, :]
        qk.copy_(torch.addcmul(qk * cos, rotated(qk), sin))
        hidden_TD = torch.addmm(hidden_TD, self.cache.attend(0, place, qkv_BLGRH), self.wo)
        x_TD = self.mlp_norm(hidden_TD)
        return torch.addmm(hidden_TD, F.silu(torch.mm(x_TD, self.gate)).mul_(torch.mm(x_TD, self.up)), self.down)


def eagle3_drafter(draft: Eagle3, model, slots: Slots, settings) -> FeatureDrafter:
    return FeatureDrafter(draft.to(slots.device).requires_grad_(False), DecodeEagle3(draft, slots), model.tok_embeddings, slots, settings)
