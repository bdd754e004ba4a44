"""Passes over few tokens as CUDA graphs: captured once, then launched as one.

On a GPU a pass over few tokens costs what launching its kernels one by one costs. A graph launches them all at once, on the memory on which it
was captured. So inputs are copied to where it reads them, rows and attended positions are padded to one of a few numbers, and weights stay
where they are when new ones come (`memory.Arena`). What comes for the second time is captured, and compared with the pass itself before it is used.

Shape suffixes: B live rows.
"""

from __future__ import annotations

import warnings
from typing import Callable, Sequence

import torch

from asyncspec.engine.kv_cache import SPAN_STEP, Spans

TOKENS = 512  # rows times positions up to which a pass is captured: beyond, kernels take longer than their launches
MOST = 256  # graphs that are kept; one more, and all are forgotten
TOLERANCE = 0.01  # of its norm, by which what a graph gives first may differ from what the pass gives


class CudaGraph:
    """The kernels of a call, captured, which `replay` launches."""

    def __init__(self, call: Callable[[], object], pool) -> None:
        """
        Args:
            pool: memory shared with other graphs, which leave nothing in it when the next is launched.
        """
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, which receive weights, may allocate meanwhile.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            call()

    def replay(self) -> None:
        self._graph.replay()


class Graphs:
    """Calls functions over rows from 0, by graphs where they are small."""

    def __init__(self, slots: int, capture=CudaGraph, pool=None) -> None:
        """
        Args:
            slots: rows that there are; those that are not live may be overwritten.
            capture: (call, pool) -> what has `replay`.
        """
        self.slots, self._capture, self._pool = slots, capture, pool
        self._seen: set[tuple] = set()
        self._captured: dict[tuple, tuple[list[torch.Tensor], list[torch.Tensor], CudaGraph]] = {}  # where its inputs and its results lie
        self._results: dict[tuple, torch.Tensor] = {}  # memory for those of all graphs, by number and dtype: distributions are large

    @classmethod
    def of(cls, slots: int, device) -> "Graphs | None":
        """None where the device has none."""
        return cls(slots, pool=torch.cuda.graph_pool_handle()) if torch.device(device).type == "cuda" else None

    def __call__(self, function: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], spans: Spans, *settings) -> Sequence[torch.Tensor]:
        """function(*inputs, spans, *settings), by a graph where it is worth it.

        Args:
            function: a bound method that waits for nothing and keeps nothing. Besides its inputs it may read and write what never moves, in their rows.
            inputs: [B, ...], of rows from 0; rows beyond them hold zeros where they are floats, ones where they are integers, or what was there before.
            spans: see `KVCache.at`.

        Returns:
            What it returns, [B, ...] each, the first of floats.
        """
        B = len(inputs[0])
        rows, span = min(padded(B), self.slots), SPAN_STEP * padded(-(-max(span for _, span in spans) // SPAN_STEP))
        sizes = tuple(tuple(tensor.shape[1:]) for tensor in inputs)
        key = (function, rows, span, sizes, settings)
        if self._capture is None or rows * max(size[0] for size in sizes if size) > TOKENS or key not in self._captured and not self._came(key):
            return function(*inputs, spans, *settings)
        if key not in self._captured and not self._add(key, lambda own: function(*own, [(rows, span)], *settings), inputs, rows):
            return function(*inputs, spans, *settings)
        own, results, graph = self._captured[key]
        _fill(own, inputs)
        graph.replay()
        return [result[:B].clone() for result in results]

    def _came(self, key: tuple) -> bool:
        """Whether it has come before."""
        came = key in self._seen
        self._seen.add(key)
        return came

    def _add(self, key: tuple, call: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], rows: int) -> bool:
        """Capture it; False, and no more graphs, if it then gives something else."""
        if len(self._captured) == MOST:
            self._captured.clear()
        own = [tensor.new_full((rows, *tensor.shape[1:]), 0 if tensor.is_floating_point() else 1) for tensor in inputs]
        _fill(own, inputs)
        expected = call(own)
        results = [self._place(number, tensor) for number, tensor in enumerate(expected)]
        graph = self._capture(lambda: [to.copy_(tensor) for to, tensor in zip(results, call(own))], self._pool)
        _fill(own, inputs)  # which it may have overwritten
        graph.replay()
        difference, live = results[0].double() - expected[0], slice(len(inputs[0]))
        off, size = float(difference[live].norm()), float(expected[0][live].double().norm())
        if not off <= TOLERANCE * size:
            warnings.warn(f"a CUDA graph's result differs by {off / size:.1%}; going on without graphs. Please report this, with the policy's config.json")
            self._capture = None
            self._captured.clear()
            return False
        self._captured[key] = own, results, graph
        return True

    def _place(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """Where graphs leave a result like this one."""
        place = self._results.get((number, tensor.dtype))
        if place is None or len(place) < tensor.numel():  # those that were captured before keep theirs
            place = self._results[number, tensor.dtype] = tensor.new_empty(1 << (tensor.numel() - 1).bit_length())
        return place[: tensor.numel()].view(tensor.shape)


def padded(count: int) -> int:
    """The next number of four in an octave: 1 to 8, 10, 12, 14, 16, 20, ..."""
    step = 1 << max(0, (count - 1).bit_length() - 3)
    return -(-count // step) * step


def _fill(own: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    for to, tensor in zip(own, inputs):
        to[: len(tensor)].copy_(tensor)
