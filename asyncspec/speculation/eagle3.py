"""EAGLE-3 as a drafter: `models.eagle3.Eagle3` over a KV cache, in few operations; see engine/decode.py."""

from __future__ import annotations

import torch

from asyncspec.engine.decode import MLP, Matrix, RoPE, Unit, interleaved, rotate, scale, scaled
from asyncspec.engine.kv_cache import KVCache
from asyncspec.engine.memory import Arena
from asyncspec.models.eagle3 import Eagle3
from asyncspec.models.policy import cast, dtype_of
from asyncspec.speculation.base import Slots
from asyncspec.speculation.features import FeatureDrafter


class DecodeEagle3:
    def __init__(self, draft: Eagle3, slots: Slots) -> None:
        self.draft, self.shape = draft, draft.shape
        shape, layer = draft.shape, draft.midlayer
        self.groups, self.queries = shape.n_kv_heads, shape.n_heads // shape.n_kv_heads
        self.cache = KVCache(1, *slots.token_SP.shape, self.groups, self.queries, shape.head_dim, slots.device, draft.fc.weight.dtype)
        self.rope = RoPE(shape.angles(slots.positions).to(slots.device), self.groups, self.queries)
        self.unit = Unit(shape.dim, shape.norm_eps, slots.device)
        mlp, self.arena = layer.mlp, Arena()
        self.mlp = MLP(layer.post_attention_layernorm, mlp.gate_proj, mlp.up_proj, mlp.down_proj, self.arena)

    def reload(self) -> None:
        """Derive from the parameters anew what is derived from them."""
        self.arena.clear()
        layer, G, H = self.draft.midlayer, self.groups, self.shape.head_dim
        a = layer.self_attn
        q, k, v = (w.weight.view(G, -1, H, w.weight.shape[-1]) for w in (a.q_proj, a.k_proj, a.v_proj))
        norms = torch.cat([scale(layer.input_layernorm), scale(layer.hidden_norm)])
        self.wqkv = Matrix(scaled(torch.cat([interleaved(q, 2), interleaved(k, 2), v], 1).flatten(0, 2), norms), self.arena)
        self.wo, self.fc = Matrix(a.o_proj.weight, self.arena), Matrix(self.draft.fc.weight, self.arena)
        self.lm_head = Matrix(scaled(self.draft.lm_head.weight, scale(self.draft.norm)), self.arena)
        self.mlp.reload()

    def fuse(self, features_TE: torch.Tensor) -> torch.Tensor:
        return self.fc(features_TE)

    def logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        logits_BU = self.lm_head(self.unit(hidden_BD))
        if self.draft.d2t_U is None:
            return logits_BU
        logits_BV = logits_BU.new_full((len(logits_BU), self.shape.vocab_size), float("-inf"))
        return logits_BV.index_copy_(1, self.draft.d2t_U, logits_BU)

    def __call__(self, hidden_TD, embeds_TD, place, rotation) -> torch.Tensor:
        """Overwrites hidden_TD."""
        qkv_TW = self.wqkv(self.unit(torch.stack([embeds_TD, hidden_TD], 1)).flatten(1))
        qkv_TW = rotate(qkv_TW.float(), rotation).to(qkv_TW.dtype)
        return self.mlp(self.wo.add_to(hidden_TD, self.cache.attend(0, place, qkv_TW)))


def eagle3_drafter(draft: Eagle3, model, slots: Slots, settings) -> FeatureDrafter:
    draft = cast(draft.to(slots.device), dtype_of(model)).requires_grad_(False)
    return FeatureDrafter(draft, DecodeEagle3(draft, slots), model.tok_embeddings, slots, settings)
