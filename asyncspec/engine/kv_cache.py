"""The slot KV cache.

A slot is a row; live sequences occupy rows 0..n-1, so that a batch is a view, never a gather. A step writes keys and
values at its own positions and attends to all positions up to each query's own. What lies beyond (rejected proposals,
padding) is overwritten before any query can see it.

Shape suffixes: S slots, P positions, B batch rows, L query positions, G key-value groups, R = queries of a group, then its
key, then its value; H head size.
"""

from __future__ import annotations

from typing import Iterator, NamedTuple

import torch


class Place(NamedTuple):
    """Where a forward pass reads and writes."""

    shape: tuple[int, int]  # B, L
    keys: tuple[torch.Tensor, ...]  # of each layer, [B * G, H, span]
    values: tuple[torch.Tensor, ...]  # of each layer, [B * G, span, H]
    index: torch.Tensor  # int64 [B * L * G], where each key and value lies in the flattened cache of a layer
    mask: torch.Tensor  # float [B * G, L * queries, span], 0 or -inf

    def each(self) -> Iterator["Place"]:
        """The L positions one by one, for L passes of one position each."""
        B, L = self.shape
        masks = self.mask.view(self.mask.shape[0], L, -1, self.mask.shape[-1]).unbind(1)
        for index, mask in zip(self.index.view(B, L, -1).unbind(1), masks):
            yield Place((B, 1), self.keys, self.values, index.reshape(-1), mask)


class KVCache:
    """Keys and values of all layers in one tensor, [layers, S, G, P, 2H]: a step writes both at once."""

    def __init__(self, layers: int, slots: int, positions: int, kv_heads: int, queries: int, head_dim: int, device) -> None:
        """
        Args:
            queries: query heads that share one key-value head.
        """
        self.kv = torch.zeros(layers, slots, kv_heads, positions, 2 * head_dim, device=device)
        self.groups, self.queries, self.head_dim, self.scale = kv_heads, queries, head_dim, head_dim**-0.5
        self.positions = positions
        self._flat = [kv.view(-1, 2 * head_dim) for kv in self.kv]
        self._index_P = torch.arange(positions, device=device)
        self._start_SG = torch.arange(slots * kv_heads, device=device).view(slots, 1, kv_heads) * positions
        self._mask = torch.tensor([float("-inf"), 0.0], device=device)

    def at(self, first_row: int, position_BL: torch.Tensor, span: int) -> Place:
        """Rows from `first_row`, `position_BL` within them.

        Args:
            span: a bound known on the host, greater than every position.
        """
        B, L = position_BL.shape
        rows = slice(first_row, first_row + B)
        index = (self._start_SG[rows] + position_BL.unsqueeze(-1)).flatten()
        seen_B1L1P = (self._index_P[:span] <= position_BL.unsqueeze(-1)).view(B, 1, L, 1, span)
        mask = torch.where(seen_B1L1P.expand(-1, self.groups, -1, self.queries, -1), self._mask[1], self._mask[0])
        # Views for all layers at once: made one by one they would cost as much as the attention itself.
        kv = self.kv[:, rows].flatten(1, 2)[:, :, :span]
        keys, values = kv[..., : self.head_dim].transpose(2, 3).unbind(), kv[..., self.head_dim :].unbind()
        return Place((B, L), keys, values, index, mask.view(B * self.groups, L * self.queries, span))

    def attend(self, layer: int, place: Place, qkv_BLGRH: torch.Tensor) -> torch.Tensor:
        """Write this pass's keys and values, then attend over all positions up to each query's own.

        Returns:
            [B * L, G * queries * H]
        """
        (B, L), G, H = place.shape, self.groups, self.head_dim
        self._flat[layer].index_copy_(0, place.index, qkv_BLGRH[..., self.queries :, :].reshape(-1, 2 * H))
        q = qkv_BLGRH[..., : self.queries, :]
        q = (q if L == 1 else q.transpose(1, 2)).reshape(B * G, L * self.queries, H)
        weight = torch.baddbmm(place.mask, q, place.keys[layer], alpha=self.scale).softmax(-1)
        out = torch.bmm(weight, place.values[layer])
        return out.view(B, -1) if L == 1 else out.view(B, G, L, self.queries, H).transpose(1, 2).reshape(B * L, -1)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of row `source` to row `target`."""
        self.kv[:, target, :, :length] = self.kv[:, source, :, :length]

    def spread(self, first_row: int, source_B: torch.Tensor, length: int) -> None:
        """Fill rows first_row + b with the first `length` positions of rows first_row + source_B[b]."""
        rows = slice(first_row, first_row + len(source_B))
        self.kv[:, rows, :, :length] = self.kv[:, first_row + source_B, :, :length]

    def read(self, row: int, length: int) -> torch.Tensor:
        """A copy of the first `length` positions of a row, for `write`."""
        return self.kv[:, row, :, :length].clone()

    def write(self, first_row: int, count: int, kv: torch.Tensor) -> None:
        """Fill rows with what `read` copied."""
        self.kv[:, first_row : first_row + count, :, : kv.shape[2]] = kv.unsqueeze(1)
