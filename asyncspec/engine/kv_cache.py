"""The slot KV cache.

A slot is a row. Live sequences occupy rows 0..n-1, so a batch is a view, never a gather. A step writes keys and values
at its own positions, and each query attends to all positions up to its own. Later positions (rejected proposals,
padding) are overwritten before any query can see them.

Shape suffixes: S slots, P positions, B batch rows, L query positions, G key-value groups, H head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from asyncspec.engine import memory
from asyncspec.engine.workspace import LayerShape, Workspace

# Consecutive groups of rows, each as the row after its last, and a bound that is greater than all its positions.
Spans = list[tuple[int, int]]

# Attention over rows of very different lengths reads mostly padding, so attention may run group by group. One more
# group pays off if it saves about GROUP_GAIN row positions.
GROUP_GAIN = 512
GROUP_ROWS = 8  # fewer rows are not split into groups
SPAN_STEP = 16  # spans are rounded up to multiples of it


class RowGroup(NamedTuple):
    """Rows whose attention is computed together, over the same positions."""

    rows: slice  # among rows times key-value groups
    keys: tuple[torch.Tensor, ...]  # per layer, [rows, H, span]
    values: tuple[torch.Tensor, ...]  # per layer, [rows, span, H]
    mask: torch.Tensor  # [rows, L * queries, span] in the cache's dtype, 0 or -inf


class CacheAccess(NamedTuple):
    """Where in the cache a forward pass reads and writes."""

    shape: tuple[int, int]  # B, L
    index: torch.Tensor  # int64 [B * L * G], index of each key and value in a layer's flattened cache
    groups: tuple[RowGroup, ...]

    def each(self) -> Iterator[CacheAccess]:
        """Yield the access of each of the L positions, for L passes of one position each."""
        B, L = self.shape
        masks = [g.mask.view(g.mask.shape[0], L, -1, g.mask.shape[-1]).unbind(1) for g in self.groups]
        for step, index in enumerate(self.index.view(B, L, -1).unbind(1)):
            groups = tuple(group._replace(mask=mask[step]) for group, mask in zip(self.groups, masks))
            yield CacheAccess((B, 1), index.reshape(-1), groups)


def whole_span(span: int, positions: int) -> int:
    """Round a span up to whole vectors: a softmax over 57 takes longer than one over 64, and views serve more steps."""
    return min(-(-span // SPAN_STEP) * SPAN_STEP, positions)


def split(length_B: np.ndarray) -> tuple[list[int], int]:
    """Split rows into groups that read little padding: in two where that saves most, then each of the two again.

    Returns:
        The row after each group's last, and the number of row positions that the groups read.
    """
    B, whole = len(length_B), len(length_B) * int(length_B.max())
    if B < GROUP_ROWS or whole - int(length_B.sum()) <= GROUP_GAIN:
        return [B], whole
    first_B, second_B = np.maximum.accumulate(length_B), np.maximum.accumulate(length_B[::-1])[::-1]
    row_B = np.arange(1, B)
    read_B = row_B * first_B[:-1] + (B - row_B) * second_B[1:]
    best = int(read_B.argmin())
    if read_B[best] + GROUP_GAIN >= whole:
        return [B], whole
    (front, read_first), (back, read_second) = split(length_B[: best + 1]), split(length_B[best + 1 :])
    return front + [best + 1 + end for end in back], read_first + read_second


class KVCache:
    """Keys and values of all layers in one tensor, [layers, S, G, P, 2H], so that a step writes both at once."""

    def __init__(self, layers: int, slots: int, positions: int, shape: LayerShape, device, dtype: torch.dtype) -> None:
        kv_heads, head_dim = shape.groups, shape.head_dim
        self.kv = memory.zeros(layers, slots, kv_heads, positions, 2 * head_dim, dtype=dtype, device=device)
        self.groups, self.queries, self.head_dim = kv_heads, shape.queries, head_dim
        self.positions = positions
        self.flat = [kv.view(-1, 2 * head_dim) for kv in self.kv]
        self._index_P = torch.arange(positions, device=device)
        self._start_SG = torch.arange(slots * kv_heads, device=device).view(slots, 1, kv_heads) * positions
        self._views = lru_cache(maxsize=256)(self._make_views)
        self._mask = torch.tensor([float("-inf"), 0.0], dtype=dtype, device=device)

    def at(self, first_row: int, position_BL: torch.Tensor, spans: Spans, packed: None = None) -> CacheAccess:
        """Return the access to `position_BL` of rows `first_row`, ...

        Args:
            spans: groups of these rows, counted from `first_row`, each with a bound that is known on the host and
                greater than every position in the group; empty if the pass only writes.
            packed: always None; only `NumpyKVCache` can leave out tokens.
        """
        (B, L), G = position_BL.shape, self.groups
        index = (self._start_SG[first_row : first_row + B] + position_BL.unsqueeze(-1)).flatten()
        groups, start = [], 0
        for end, span in spans:
            count, span = end - start, whole_span(span, self.positions)
            seen = (self._index_P[:span] <= position_BL[start:end].unsqueeze(-1)).view(count, 1, L, 1, span)
            mask = torch.where(seen.expand(-1, G, -1, self.queries, -1), self._mask[1], self._mask[0])
            keys, values = self._views(first_row + start, first_row + end, span)
            groups.append(
                RowGroup(slice(start * G, end * G), keys, values, mask.view(count * G, L * self.queries, span))
            )
            start = end
        return CacheAccess((B, L), index, tuple(groups))

    def _make_views(self, start: int, end: int, span: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Make views of all layers' keys and values at once: one by one they would cost as much as attention itself."""
        kv = self.kv[:, start:end].flatten(1, 2)[:, :, :span]
        return kv[..., : self.head_dim].transpose(2, 3).unbind(), kv[..., self.head_dim :].unbind()

    def write(self, layer: int, access: CacheAccess, space: Workspace) -> None:
        """Write this pass's keys and values."""
        self.flat[layer].index_copy_(0, access.index, space.kv)

    def attend(self, layer: int, access: CacheAccess, space: Workspace) -> None:
        """Attend over all positions up to each query's own."""
        q = space.q
        for group in access.groups:
            space.put_attended(group.rows, self._attended(layer, q[group.rows], group))

    def _attended(self, layer: int, q: torch.Tensor, group: RowGroup) -> torch.Tensor:
        keys, values = group.keys[layer], group.values[layer]
        if q.dtype is not torch.float32:
            # One head per entry of the batch, as torch's fast kernels expect; they compute scores in float32.
            q, keys, values, mask = (t.unsqueeze(1) for t in (q, keys.transpose(1, 2), values, group.mask))
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=1.0).squeeze(1)
        weight = torch.baddbmm(group.mask, q, keys).softmax(-1)
        return torch.bmm(weight, values)

    def copy(self, sources: Sequence[int], rows: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of each source to its row."""
        for source, copies in runs(sources, rows):
            self.kv[:, copies, :, :length] = self.kv[:, source, None, :, :length]


def runs(sources: Sequence[int], rows: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yield each source with the rows that become its copies; consecutive rows of one source come as one slice."""
    of_run = groupby(zip(sources, rows, range(len(rows))), key=lambda one: (one[0], one[1] - one[2]))
    for (source, _), run in of_run:
        copies = [row for _, row, _ in run]
        yield source, slice(copies[0], copies[-1] + 1)
