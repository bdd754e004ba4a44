"""Passes over few tokens as CUDA graphs: captured once, then launched as one.

On a GPU a pass over few tokens costs what launching its kernels one by one costs. A graph launches them all at once, on
the memory on which it was captured. So inputs are copied to where it reads them, rows and attended positions are padded
to one of a few numbers, and weights stay where they are when new ones come (`memory.Arena`). What comes for the third
time is captured, and compared with the pass itself before it is used.

Shape suffixes: B live rows.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from asyncspec.engine.kv_cache import SPAN_STEP, Spans
from asyncspec.errors import first_line

TOKENS = 1024  # rows times positions up to which a pass is captured: beyond, kernels take longer than their launches
TIMES = 3  # that a pass comes until it is captured
LEAST_SPAN = 128  # positions, to which all shorter spans are padded: fewer graphs, and reading so few costs nothing
MOST = 512  # graphs that are kept; one more, and all are forgotten
TOLERANCE = 0.01  # of its norm, by which what a graph gives first may differ from what the pass gives


class CudaGraphs:
    """Captures kernels of calls, to be launched by `replay` of what `capture` gives."""

    def __init__(self, device) -> None:
        # One stream for each engine: captures on a shared one share libraries' workspaces, which go with the first
        # graph that does.
        self._stream = torch.cuda.Stream(device)
        self.forget()

    def forget(self) -> None:
        """All that was captured is gone."""
        self._pool = torch.cuda.graph_pool_handle()  # of all graphs: they leave nothing in it when the next is launched

    def capture(self, call: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Other threads, which receive weights, may allocate meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            call()
        return graph


class Graphs:
    """Calls functions over rows, by graphs where they are small."""

    def __init__(self, slots: int, backend) -> None:
        """
        Args:
            slots: rows that there are; those that are not live may be overwritten.
            backend: as `CudaGraphs`.
        """
        self.slots, self._backend, self._on = slots, backend, True
        self.came_early = 0  # calls that will be graphs once they have come often enough, and took as long as ten
        self._times: Counter[tuple] = Counter()
        # where inputs and results lie
        self._captured: dict[tuple, tuple[list[torch.Tensor], list[torch.Tensor], torch.cuda.CUDAGraph]] = {}
        # memory for those of all graphs, by number and dtype: distributions are large
        self._results: dict[tuple, torch.Tensor] = {}

    @classmethod
    def of(cls, slots: int, device) -> Graphs | None:
        """None where the device has none."""
        return cls(slots, CudaGraphs(device)) if torch.device(device).type == "cuda" else None

    def __call__(
        self,
        function: Callable[..., Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        spans: Spans,
        *settings,
        most: int | None = None,
    ) -> Sequence[torch.Tensor]:
        """function(*inputs, spans, *settings), by a graph where it is worth it.

        Args:
            function: a bound method that waits for nothing and keeps nothing. Besides its inputs it may read and write
                what never moves, in their rows.
            inputs: [B, ...], of rows from the first; rows beyond them hold zeros where they are floats, ones where they
                are integers, or what was there before.
            spans: see `KVCache.at`.
            most: rows that there are, if they are not the slots.

        Returns:
            What it returns, [B, ...] each, the first of floats.
        """
        B = len(inputs[0])
        longest = max(LEAST_SPAN, *(span for _, span in spans))
        rows, span = min(graph_size(B), most or self.slots), SPAN_STEP * graph_size(-(-longest // SPAN_STEP))
        sizes = tuple(tuple(tensor.shape[1:]) for tensor in inputs)
        small = rows * max(size[0] for size in sizes if size) <= TOKENS
        # Outside the engine's steps (a cache that is filled anew) tensors of the steps must not be written to.
        if self._on and small and torch.is_inference_mode_enabled():
            key = (function, rows, span, sizes, settings)
            if key not in self._captured:
                self.came_early += 1
                self._times[key] += 1
                if self._times[key] >= TIMES:
                    self._add(key, lambda own: function(*own, [(rows, span)], *settings), inputs, rows)
            if key in self._captured:
                own, results, graph = self._captured[key]
                _fill(own, inputs)
                graph.replay()
                return [result[:B].clone() for result in results]
        return function(*inputs, spans, *settings)

    def _add(
        self,
        key: tuple,
        call: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        rows: int,
    ) -> None:
        """Capture it; no more graphs, if that fails or it then gives something else."""
        if len(self._captured) == MOST:
            self._forget()
        own = [tensor.new_full((rows, *tensor.shape[1:]), 0 if tensor.is_floating_point() else 1) for tensor in inputs]
        _fill(own, inputs)
        expected = call(own)
        results = [self._result_memory(number, tensor) for number, tensor in enumerate(expected)]
        try:
            graph = self._backend.capture(lambda: [to.copy_(tensor) for to, tensor in zip(results, call(own))])
            _fill(own, inputs)  # which it may have overwritten
            for result in results:
                result.zero_()
            graph.replay()
        except RuntimeError as error:
            return self._give_up(f"a CUDA graph could not be captured ({first_line(error)})")
        difference, live = results[0].double() - expected[0], slice(len(inputs[0]))
        off, size = float(difference[live].norm()), float(expected[0][live].double().norm())
        if not off <= TOLERANCE * size:
            return self._give_up(f"a CUDA graph's result differs by {off / size:.1%}")
        self._captured[key] = own, results, graph

    def _give_up(self, why: str) -> None:
        warnings.warn(
            f"{why}; going on without graphs. Please report this, with the policy's config.json", stacklevel=2
        )
        self._on = False
        self._forget()

    def _forget(self) -> None:
        self._captured.clear()
        self._times.clear()
        self._backend.forget()

    def _result_memory(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """Where graphs leave a result like this one."""
        memory = self._results.get((number, tensor.dtype))
        if memory is None or len(memory) < tensor.numel():  # those that were captured before keep theirs
            memory = self._results[number, tensor.dtype] = tensor.new_empty(1 << (tensor.numel() - 1).bit_length())
        return memory[: tensor.numel()].view(tensor.shape)


def graph_size(count: int) -> int:
    """The next number of four in an octave: 1 to 8, 10, 12, 14, 16, 20, ..."""
    step = 1 << max(0, (count - 1).bit_length() - 3)
    return -(-count // step) * step


def _fill(own: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    for to, tensor in zip(own, inputs):
        to[: len(tensor)].copy_(tensor)
