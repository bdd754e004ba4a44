"""The policy's forward pass as the engine runs it: torchtitan's parameters, few operations, a slot KV cache.

On a CPU, and on a GPU with few sequences, an engine step costs what launching its operations costs. So the engine does not call
the model's modules: it reads their parameters and does in 30 operations a layer what they do in 70. Nothing is kept in sync: the
parameters are the module's own, under their own names. tests/test_engine.py holds both to the same logits.

Shape suffixes: B batch rows, L query positions, P cache positions, D model dimension, G key-value groups, R = queries of a
group, then its key, then its value; H head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from asyncspec.engine.kv_cache import KVCache, Place, Spans
from asyncspec.models.policy import PolicyShape


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight in five operations; torch's own takes a dozen on a CPU."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight, self.size = weight, weight.shape[-1]
        self.eps = torch.tensor(eps, dtype=weight.dtype, device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * torch.addcmul(self.eps, norm, norm, value=1 / self.size).rsqrt_()).mul_(self.weight)


class RoPE:
    """Rotary embedding; cosines and sines of a step are gathered once for all layers."""

    def __init__(self, table_P2H: torch.Tensor) -> None:
        cos_PH, sin_PH = table_P2H.chunk(2, dim=-1)
        half = cos_PH.shape[-1] // 2
        self.cos_PH = cos_PH.contiguous()
        # The sign of rotate-half's first half goes into the sines; what is left is `rotated`.
        self.sin_PH = torch.cat([-sin_PH[:, :half], sin_PH[:, half:]], dim=-1)

    def at(self, position_BL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, [B, L, 1, 1, H]."""
        return self.cos_PH[position_BL][:, :, None, None], self.sin_PH[position_BL][:, :, None, None]


def rotated(x: torch.Tensor) -> torch.Tensor:
    """The two halves of each head, exchanged."""
    return x.roll(x.shape[-1] // 2, -1)


class DecodeModel:
    """A dense Qwen3 policy over its own `KVCache`."""

    def __init__(self, model, shape: PolicyShape, slots: int, positions: int, device) -> None:
        """
        Args:
            model: torchtitan's Qwen3Model; its parameters are used in place. After they change call `reload`.
            slots, positions: rows and length of the cache.
        """
        self.cache = cache = KVCache(
            shape.n_layers, slots, positions, shape.n_kv_heads, shape.n_heads // shape.n_kv_heads, shape.head_dim, device)
        self.rope = RoPE(next(iter(model.layers.values())).attention.rope.cache)
        self.embedding, self.lm_head = model.tok_embeddings, model.lm_head
        self.norm = RMSNorm(model.norm.weight, model.norm.eps)
        self.layers = [DecodeLayer(layer, index, cache) for index, layer in enumerate(model.layers.values())]

    def reload(self) -> None:
        """Take what is derived from the parameters anew."""
        for layer in self.layers:
            layer.reload()

    def hidden_states(self, first_row: int, token_BL, position_BL, spans: Spans, aux_layers=()):
        """Read tokens into the cache at rows from `first_row`.

        Args:
            position_BL: int64, where each token stands in its row.
            spans: host-side bounds of the positions, see `KVCache.at`.

        Returns:
            hidden_BLD after the final norm, and the inputs of `aux_layers` concatenated, [B, L, A*D], or None; as
            `models.policy.hidden_states`.
        """
        B, L = token_BL.shape
        x_TD = self.embedding(token_BL).flatten(0, 1)
        where, rope, kept = self.cache.at(first_row, position_BL, spans), self.rope.at(position_BL), []
        for index, layer in enumerate(self.layers):
            if index in aux_layers:
                kept.append(x_TD)
            x_TD = layer(x_TD, where, *rope)
        x_TD = self.norm(x_TD)
        if len(self.layers) in aux_layers:
            kept.append(x_TD)
        return x_TD.view(B, L, -1), (torch.cat(kept, dim=-1).view(B, L, -1) if kept else None)


class DecodeLayer:
    """One block of the policy."""

    def __init__(self, layer, index: int, cache: KVCache) -> None:
        attention, mlp = layer.attention, layer.feed_forward
        self.index, self.cache = index, cache
        self.attention_norm = RMSNorm(layer.attention_norm.weight, layer.attention_norm.eps)
        self.ffn_norm = RMSNorm(layer.ffn_norm.weight, layer.ffn_norm.eps)
        self.groups, self.queries = attention.n_kv_heads, attention.n_heads // attention.n_kv_heads
        self.q_norm, self.k_norm = attention.q_norm.weight, attention.k_norm.weight
        self.qk_eps = attention.q_norm.eps
        # Transposed views: mm on them is half the price of linear where the matrices are small.
        self.wqkv, self.wo, self.w1, self.w2, self.w3 = (
            linear.weight.t() for linear in (attention.qkv_linear.wqkv, attention.wo, mlp.w1, mlp.w2, mlp.w3))

    def reload(self) -> None:
        """Take what is derived from the parameters anew, after they changed."""
        self.qk_norm = RMSNorm(torch.cat([self.q_norm.expand(self.queries, -1), self.k_norm[None]]), self.qk_eps)

    def __call__(self, x_TD, where: Place, cos, sin):
        B, L = where.shape
        qkv_BLGRH = torch.mm(self.attention_norm(x_TD), self.wqkv).view(B, L, self.groups, self.queries + 2, -1)
        qk = qkv_BLGRH[..., : self.queries + 1, :]
        normed = self.qk_norm(qk)
        torch.addcmul(normed * cos, rotated(normed), sin, out=qk)
        out_TD = self.cache.attend(self.index, where, qkv_BLGRH)
        x_TD = torch.addmm(x_TD, out_TD, self.wo)
        normed_TD = self.ffn_norm(x_TD)
        return torch.addmm(x_TD, F.silu(torch.mm(normed_TD, self.w1)).mul_(torch.mm(normed_TD, self.w3)), self.w2)
