"""The slot KV cache where numpy attends: in float32 on one thread of a CPU.

A call of numpy's costs a third of one of torch's, and its products of small matrices are faster on processors that MKL
slows. Keys lie position by position, as a product with queries reads them.

Shape suffixes: those of kv_cache.py; Q queries of a group, C = Q * L that attend to the same keys; T tokens of a pass,
N = B * L.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from asyncspec.engine import memory
from asyncspec.engine.kv_cache import Spans, runs, whole_span
from asyncspec.engine.workspace import LayerShape, Workspace
from asyncspec.speculation.drafter import Packed

PACKED = 4  # tokens: workspaces are kept for their multiples
LEFT_OUT = 8  # tokens, from which on it pays to leave them out
LINE = 16  # numbers of a cache line: of what begins elsewhere every vector that is read lies in two
ALIASING = 512  # numbers: what lies so far apart competes for the same places of a processor's cache


class NumpyRowGroup(NamedTuple):
    """Rows that are attended to together, over the same positions."""

    rows: slice  # of rows times key-value groups
    keys: tuple[np.ndarray, ...]  # of each layer, [rows, H, span]
    values: tuple[np.ndarray, ...]  # of each layer, [rows, span, H]
    mask_BLP: np.ndarray  # float32, 0 or -inf
    weight: torch.Tensor  # scores and weights of whichever layer, [rows, C, span]
    array: np.ndarray  # the same memory
    by_query: np.ndarray  # the same as [B, G * Q, L, span]


def packing(count_B: np.ndarray, J: int) -> tuple[int, Packed | None, np.ndarray | None]:
    """How to compute the first so many of J tokens of each row.

    Args:
        count_B: int64, 1 to J.

    Returns:
        L, the width of a rectangle that holds them; those of B * L to compute, None: all; and for each of B * J tokens
        which of those that are computed it is, int64 [B, J], one behind its row's count the row's last. None: all are
        computed.
    """
    L, total, index_J = int(count_B.max()), int(count_B.sum()), np.arange(J)
    if len(count_B) * L - total < LEFT_OUT:
        of_BJ = np.arange(len(count_B))[:, None] * L + np.minimum(index_J, L - 1)
        return L, None, None if L == J else of_BJ
    of_BJ = (count_B.cumsum() - count_B)[:, None] + np.minimum(index_J, count_B[:, None] - 1)
    at_T = (index_J[:L] < count_B[:, None]).reshape(-1).nonzero()[0]
    at_T = np.append(at_T, at_T[-1:].repeat(-total % PACKED))  # the last again
    return L, Packed(at_T, of_BJ[:, :L].reshape(-1)), of_BJ


class NumpyCacheAccess(NamedTuple):
    """Where a forward pass reads and writes."""

    shape: tuple[int, int]  # B, L
    # int64 [T * G], where each value lies in the flattened cache of a layer; T = B * L, or what is packed of it
    index: np.ndarray
    key_index: np.ndarray  # int64 [T * G * H], the same of each number of a key
    groups: tuple[NumpyRowGroup, ...]
    layout: _Layout | None = None  # None: L is 1, where a row's queries lie together as they are

    def each(self) -> Iterator[NumpyCacheAccess]:
        """The L positions one by one, for L passes of one position each."""
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
    """A workspace whose heads numpy sees as `NumpyKVCache` takes them. A head is one item, see `items`."""

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
    """Keys of all layers, and values: as `KVCache`."""

    def __init__(self, layers: int, slots: int, positions: int, shape: LayerShape) -> None:
        self.shape, self.positions, (_, G, _, H, *_) = shape, positions, shape
        stride = -(-positions // LINE) * LINE
        stride += LINE * (stride % ALIASING == 0)
        self.keys = memory.zeros(layers, slots, G, H, stride, dtype=torch.float32, device="cpu")
        self.values = memory.zeros(layers, slots, G, positions, H, dtype=torch.float32, device="cpu")
        self._flat_keys = list(self.keys.numpy().reshape(layers, -1))
        # written in half the time of rows of numbers
        self._flat_values = [items(values, H) for values in self.values.numpy()]
        self._start_SG = np.arange(slots * G).reshape(slots, 1, G) * positions
        self._start_SGH = np.arange(slots * G * H).reshape(slots, 1, G, H) * stride
        # A window of it is the mask of a position.
        self._seen = np.repeat(np.float32([0.0, -np.inf]), positions)
        self._views = lru_cache(maxsize=256)(self._make_views)

    def at(
        self, first_row: int, position_BL: torch.Tensor, spans: Spans, packed: Packed | None = None
    ) -> NumpyCacheAccess:
        """See `KVCache.at`.

        Args:
            packed: the tokens that are computed, if not all.
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
        """Keys and values of all layers, and all masks there are."""
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
    """Memory where a pass's queries lie row by row, those that attend to the same keys as one matrix, in the order B,
    G, Q, L; and what they attend to in their place. A head is one item: a copy of them takes a third of the time of one
    of their numbers.
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
        """Queries of the heads of T tokens, [B * G, Q * L, H]; what attends to them may be put in their access."""
        heads.take(self._of_BGQL, 0, self._items, "clip")
        return self._matrices

    def scatter(self, attended: np.ndarray) -> None:
        """What was put there goes to T tokens."""
        self._items.take(self._at_TGQ, 0, attended, "clip")


def _weights(B: int, heads: int, L: int, groups: int, span: int) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    weight = torch.empty(B * groups, heads // groups * L, span)
    array = weight.numpy()
    return weight, array, array.reshape(B, heads, L, span)


def items(array: np.ndarray, H: int) -> np.ndarray:
    """A view in which H numbers are one item."""
    return array.view(f"V{4 * H}").reshape(-1)
