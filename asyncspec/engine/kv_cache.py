"""The slot KV cache and the attention modules that read and write it.

A slot is a row; live sequences occupy rows 0..n-1, so that a batch is a view, never a gather. A step writes keys and
values at its own positions and attends to all positions up to each query's own. What lies beyond (rejected proposals,
padding) is overwritten before any query can see it.

Shape suffixes: S slots, P positions, B batch rows, L query positions, N heads, H head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torchtitan.protocols.module import Module


class KVCache:
    def __init__(self, layers: int, slots: int, positions: int, kv_heads: int, head_dim: int, device) -> None:
        self.k = torch.zeros(layers, slots, positions, kv_heads, head_dim, device=device)
        self.v = torch.zeros_like(self.k)
        self._index_P = torch.arange(positions, device=device)

    def at(self, first_row: int, position_BL: torch.Tensor) -> None:
        """Set where the next forward pass reads and writes: rows from `first_row`, `position_BL` within them."""
        B = position_BL.shape[0]
        self._rows = slice(first_row, first_row + B)
        self._row_B1 = torch.arange(first_row, first_row + B, device=position_BL.device).unsqueeze(1)
        self._position_BL = position_BL
        self._span = int(position_BL.max()) + 1
        self._mask_B1LP = (self._index_P[: self._span] <= position_BL.unsqueeze(-1)).unsqueeze(1)

    def attend(self, layer: int, q_BLNH, k_BLNH, v_BLNH, scale: float | None = None) -> torch.Tensor:
        """Write this step's keys and values, then attend over all positions up to each query's own."""
        k_SPNH, v_SPNH = self.k[layer], self.v[layer]
        k_SPNH[self._row_B1, self._position_BL] = k_BLNH
        v_SPNH[self._row_B1, self._position_BL] = v_BLNH
        return F.scaled_dot_product_attention(
            q_BLNH.transpose(1, 2),
            k_SPNH[self._rows, : self._span].transpose(1, 2),
            v_SPNH[self._rows, : self._span].transpose(1, 2),
            attn_mask=self._mask_B1LP, scale=scale, enable_gqa=q_BLNH.shape[2] != k_BLNH.shape[2],
        ).transpose(1, 2)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of row `source` to row `target`."""
        self.k[:, target, :length] = self.k[:, source, :length]
        self.v[:, target, :length] = self.v[:, source, :length]

    def spread(self, first_row: int, source_B: torch.Tensor, length: int) -> None:
        """Fill rows first_row + b with the first `length` positions of rows first_row + source_B[b]."""
        rows = slice(first_row, first_row + len(source_B))
        for tensor in (self.k, self.v):
            tensor[:, rows, :length] = tensor[:, first_row + source_B, :length]


class SlotAttention(Module):
    """torchtitan's inner attention over a `KVCache`; the engine sets `cache` and `layer` after building."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.cache: KVCache | None = None
        self.layer = 0

    def forward(self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks=None, scale=None, enable_gqa=False):
        return self.cache.attend(self.layer, q_BLNH, k_BLNH, v_BLNH, scale)


class StepRoPE(nn.Module):
    """Rotary embedding with the cosines and sines of a step gathered once for all layers."""

    def __init__(self, table_P2H: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("table_P2H", table_P2H, persistent=False)

    def at(self, position_BL: torch.Tensor) -> None:
        self._cos, self._sin = self.table_P2H[position_BL].unsqueeze(2).chunk(2, dim=-1)

    def forward(self, q_BLNH, k_BLNH, positions=None):
        return self._rotate(q_BLNH), self._rotate(k_BLNH)

    def _rotate(self, x):
        first, second = x.chunk(2, dim=-1)
        return x * self._cos + torch.cat((-second, first), dim=-1) * self._sin
