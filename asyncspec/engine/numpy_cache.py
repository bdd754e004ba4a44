"""The slot KV cache for attention by numpy: float32 on one CPU thread.

A numpy call costs a third of a torch call, and numpy's products of small matrices are faster on processors that MKL
slows down. Keys are stored with positions innermost, as a product with queries reads them.

Shape suffixes: those of kv_cache.py; Q query heads of a group, C = Q * L queries that attend to the same keys; T tokens
of a pass, N = B * L.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from asyncspec.engine import LINE, memory
from asyncspec.engine.kv_cache import Spans, runs, whole_span
from asyncspec.engine.workspace import LayerShape, Workspace
from asyncspec.speculation.drafter import Packed

PACKED = 4  # packed passes are padded to multiples of this many tokens, so that few workspaces are needed
LEFT_OUT = 8  # tokens; leaving out fewer does not pay
ALIASING = 512  # floats; rows this far apart compete for the same sets of a processor's cache


class NumpyRowGroup(NamedTuple):
    """Rows whose attention is computed together, over the same positions."""

    rows: slice  # among rows times key-value groups
    keys: tuple[np.ndarray, ...]  # per layer, [rows, H, span]
    values: tuple[np.ndarray, ...]  # per layer, [rows, span, H]
    mask_BLP: np.ndarray  # float32, 0 or -inf
    weight: torch.Tensor  # scores, then attention weights, of the current layer, [rows, C, span]
    array: np.ndarray  # the same memory
    by_query: np.ndarray  # the same memory, as [B, G * Q, L, span]


def packing(count_B: np.ndarray, J: int) -> tuple[int, Packed | None, np.ndarray | None]:
    """Plan a pass over the first count_B of each row's J tokens.

    Args:
        count_B: int64, 1 to J.

    Returns:
        L, the width of a rectangle that holds these tokens.
        Which of the B * L tokens to compute; None: all.
        For each of the B * J tokens its index among the computed ones, int64 [B, J]; a token past its row's count gets
        the index of the row's last token. None: all B * J tokens are computed.
    """
    L, total, index_J = int(count_B.max()), int(count_B.sum()), np.arange(J)
    if len(count_B) * L - total < LEFT_OUT:
        of_BJ = np.arange(len(count_B))[:, None] * L + np.minimum(index_J, L - 1)
        return L, None, None if L == J else of_BJ
    of_BJ = (count_B.cumsum() - count_B)[:, None] + np.minimum(index_J, count_B[:, None] - 1)
    at_T = (index_J[:L] < count_B[:, None]).reshape(-1).nonzero()[0]
    at_T = np.append(at_T, at_T[-1:].repeat(-total % PACKED))  # repeat the last one
    return L, Packed(at_T, of_BJ[:, :L].reshape(-1)), of_BJ


class NumpyCacheAccess(NamedTuple):
    """Where in the cache a forward pass reads and writes."""

    shape: tuple[int, int]  # B, L
    # int64 [T * G], index of each value in a layer's flattened cache; T = B * L, or the number of packed tokens
    index: np.ndarray
    key_index: np.ndarray  # int64 [T * G * H], index of each number of each key
    groups: tuple[NumpyRowGroup, ...]
    layout: _Layout | None = None  # None if L is 1: a row's queries lie together already

    def each(self) -> Iterator[NumpyCacheAccess]:
        """Yield the access of each of the L positions, for L passes of one position each."""
        own = [
            _weights(*g.by_query.shape[:2], 1, len(g.array) // len(g.by_query), g.array.shape[-1]) for g in self.groups
        ]
        steps = (
            np.ascontiguousarray(index.reshape(*self.shape, -1).swapaxes(0, 1)).reshape(self.shape[1], -1)
            for index in (self.index, self.key_index)
        )
        for step, (index, key_index) in enumerate(zip(*steps)):
            groups = tuple(
                NumpyRowGroup(*g[:3], g.mask_BLP[:, step : step + 1], *weights) for g, weights in zip(self.groups, own)
            )
            yield NumpyCacheAccess((self.shape[0], 1), index, key_index, groups)


class NumpyWorkspace(Workspace):
    """A workspace with numpy views of its heads, as `NumpyKVCache` takes them. A head is one item, see `items`."""

    def __init__(self, shape: LayerShape, B: int, L: int, dtype: torch.dtype, device, inputs: int = 1) -> None:
        super().__init__(shape, B, L, dtype, device, inputs)
        _, G, Q, H, *_ = shape
        heads, attended = self.heads.array, self.attended.array
        self.head_items, self.attended_items = items(heads, H), items(attended, H)
        self.keys_TGH, self.values = heads.reshape(B * L, G, Q + 2, H)[:, :, Q], self.head_items[Q + 1 :: Q + 2]
        if L == 1:
            self.queries = heads.reshape(B * G, Q + 2, H)[:, :Q]
            self.attended_matrices = attended.reshape(B * G, Q, H)


class NumpyKVCache:
    """Keys of all layers, and values of all layers. The methods are those of `KVCache`."""

    def __init__(self, layers: int, slots: int, positions: int, shape: LayerShape) -> None:
        self.shape, self.positions, (_, G, _, H, *_) = shape, positions, shape
        stride = -(-positions // LINE) * LINE
        stride += LINE * (stride % ALIASING == 0)
        self.keys = memory.zeros(layers, slots, G, H, stride, dtype=torch.float32, device="cpu")
        self.values = memory.zeros(layers, slots, G, positions, H, dtype=torch.float32, device="cpu")
        self._flat_keys = list(self.keys.numpy().reshape(layers, -1))
        # Items are written in half the time of rows of numbers.
        self._flat_values = [items(values, H) for values in self.values.numpy()]
        self._start_SG = np.arange(slots * G).reshape(slots, 1, G) * positions
        self._start_SGH = np.arange(slots * G * H).reshape(slots, 1, G, H) * stride
        # The mask of a position is a window of this.
        self._seen = np.repeat(np.float32([0.0, -np.inf]), positions)
        self._views = lru_cache(maxsize=256)(self._make_views)

    def at(
        self, first_row: int, position_BL: torch.Tensor, spans: Spans, packed: Packed | None = None
    ) -> NumpyCacheAccess:
        """See `KVCache.at`.

        Args:
            packed: the tokens to compute; None: all.
        """
        (B, L), (_, G, Q, *_) = position_BL.shape, self.shape
        position_BL, rows, groups, start = position_BL.numpy(), slice(first_row, first_row + B), [], 0
        for end, span in spans:
            span = whole_span(span, self.positions)
            keys, values, window = self._views(first_row + start, first_row + end, span)
            mask_BLP = window[self.positions - 1 - position_BL[start:end]]
            groups.append(
                NumpyRowGroup(
                    slice(start * G, end * G), keys, values, mask_BLP, *_weights(end - start, G * Q, L, G, span)
                )
            )
            start = end
        index_BLG, index_BLGH = (
            self._start_SG[rows] + position_BL[..., None],
            self._start_SGH[rows] + position_BL[..., None, None],
        )
        layout = None if L == 1 else _Layout(B, L, self.shape, packed)
        if packed is not None:
            index_BLG, index_BLGH = (index.reshape(B * L, -1)[packed.at_T] for index in (index_BLG, index_BLGH))
        return NumpyCacheAccess((B, L), index_BLG.reshape(-1), index_BLGH.reshape(-1), tuple(groups), layout)

    def _make_views(
        self, start: int, end: int, span: int
    ) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...], np.ndarray]:
        """Return views of the keys and values of all layers, and of the masks of all positions."""
        keys, values = (tensor[:, start:end].flatten(1, 2).numpy() for tensor in (self.keys, self.values))
        return (
            tuple(keys[..., :span]),
            tuple(values[:, :, :span]),
            np.lib.stride_tricks.sliding_window_view(self._seen, span),
        )

    def write(self, layer: int, access: NumpyCacheAccess, space: NumpyWorkspace) -> None:
        """See `KVCache.write`."""
        self._flat_keys[layer][access.key_index] = space.keys_TGH.reshape(-1)
        self._flat_values[layer][access.index] = space.values

    def attend(self, layer: int, access: NumpyCacheAccess, space: NumpyWorkspace) -> None:
        """See `KVCache.attend`."""
        layout = access.layout
        if layout is None:
            queries, attended = space.queries, space.attended_matrices
        else:
            queries = attended = layout.gather(space.head_items)
        for rows, keys, values, mask_BLP, weight, array, by_query in access.groups:
            np.matmul(queries[rows], keys[layer], out=array)
            np.add(by_query, mask_BLP[:, None], out=by_query)
            torch.softmax(weight, -1, out=weight)
            np.matmul(array, values[layer], out=attended[rows])
        if layout is not None:
            layout.scatter(space.attended_items)

    def copy(self, sources: Sequence[int], rows: Sequence[int], length: int) -> None:
        """See `KVCache.copy`."""
        for source, copies in runs(sources, rows):
            self.keys[:, copies, ..., :length] = self.keys[:, source, None, ..., :length]
            self.values[:, copies, :, :length] = self.values[:, source, None, :, :length]


class _Layout:
    """Memory for a pass's queries, row by row, in the order B, G, Q, L: queries that attend to the same keys form one
    matrix. Attention may write its output in their place. A head is one item: copying items takes a third of the time
    of copying their numbers.
    """

    def __init__(self, B: int, L: int, shape: LayerShape, packed: Packed | None) -> None:
        _, G, Q, H, *_ = shape
        of_N, at_T = (np.arange(B * L),) * 2 if packed is None else (packed.of_N, packed.at_T)
        head_GQ = np.arange(G)[:, None] * (Q + 2) + np.arange(Q)
        self._of_BGQL = (of_N.reshape(B, 1, 1, L) * (G * (Q + 2)) + head_GQ[..., None]).reshape(-1)
        row_T1, position_T1 = np.divmod(at_T[:, None], L)
        self._at_TGQ = ((row_T1 * (G * Q) + np.arange(G * Q)) * L + position_T1).reshape(-1)
        self._matrices = np.empty((B * G, Q * L, H), np.float32)
        self._items = items(self._matrices, H)

    def gather(self, heads: np.ndarray) -> np.ndarray:
        """Return the queries among the heads of T tokens, [B * G, Q * L, H]; attention may overwrite them."""
        heads.take(self._of_BGQL, 0, self._items, "clip")
        return self._matrices

    def scatter(self, attended: np.ndarray) -> None:
        """Copy attention's output from this memory to the T tokens."""
        self._items.take(self._at_TGQ, 0, attended, "clip")


def _weights(B: int, heads: int, L: int, groups: int, span: int) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    weight = torch.empty(B * groups, heads // groups * L, span)
    array = weight.numpy()
    return weight, array, array.reshape(B, heads, L, span)


def items(array: np.ndarray, H: int) -> np.ndarray:
    """Return a view in which H numbers are one item."""
    return array.view(f"V{4 * H}").reshape(-1)
