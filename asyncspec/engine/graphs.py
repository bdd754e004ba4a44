"""Runs passes over few tokens as CUDA graphs: captured once, then replayed with a single launch.

On a GPU a pass over few tokens takes as long as launching its kernels one by one. A graph launches them all at once,
but only on the memory on which it was captured. So inputs are copied to that memory, the numbers of rows and of
attended positions are padded to one of a few sizes, and new weights overwrite the old ones in place (`memory.Arena`).
A pass is captured when it comes for the third time. Before a graph is used, its result is compared with that of the
pass itself.

Shape suffixes: B live rows.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from asyncspec.engine.kv_cache import SPAN_STEP, Spans
from asyncspec.errors import first_line

TOKENS = 1024  # most rows * positions of a captured pass: in larger ones, kernels take longer than their launches
TIMES = 3  # a pass is captured when it comes for the third time
LEAST_SPAN = 128  # positions; shorter spans are padded to it: fewer graphs, and attending to so few costs nothing
MOST = 512  # graphs that are kept; all are dropped before one more is captured
TOLERANCE = 0.01  # by which a graph's first result may differ from the pass's, relative to its norm


class CudaGraphs:
    """Captures the kernels of a call. `capture` returns a graph whose `replay` launches them."""

    def __init__(self, device) -> None:
        # Each engine has a stream of its own: captures on a shared stream share library workspaces, which are freed
        # with the first graph that is freed.
        self._stream = torch.cuda.Stream(device)
        self.forget()

    def forget(self) -> None:
        """Start a new memory pool, for use when all graphs have been dropped."""
        self._pool = torch.cuda.graph_pool_handle()  # shared by all graphs: no result stays in it after a launch

    def capture(self, call: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads, which receive weights, may allocate memory meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            call()
        return graph


class Graphs:
    """Calls functions over rows, as graphs where the calls are small."""

    def __init__(self, slots: int, backend) -> None:
        """
        Args:
            slots: number of rows; rows that are not live may be overwritten.
            backend: an object with the methods of `CudaGraphs`.
        """
        self.slots, self._backend, self._on = slots, backend, True
        self.came_early = 0  # small calls that had no graph yet; each takes as long as ten with a graph
        self._times: Counter[tuple] = Counter()
        # by kind of call: memory of its inputs, memory of its results, and the graph
        self._captured: dict[tuple, tuple[list[torch.Tensor], list[torch.Tensor], torch.cuda.CUDAGraph]] = {}
        # Result memory that all graphs share, by the result's number and dtype: distributions are large.
        self._results: dict[tuple, torch.Tensor] = {}

    @classmethod
    def of(cls, slots: int, device) -> Graphs | None:
        """Return graphs for a CUDA device; None for other devices."""
        return cls(slots, CudaGraphs(device)) if torch.device(device).type == "cuda" else None

    def __call__(
        self,
        function: Callable[..., Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        spans: Spans,
        *settings,
        most: int | None = None,
    ) -> Sequence[torch.Tensor]:
        """Return function(*inputs, spans, *settings), computed by a graph where that is faster.

        Args:
            function: a bound method that neither waits for the device nor stores tensors. Besides its inputs it may
                read and write tensors whose memory never moves, in the same rows.
            inputs: [B, ...] each, of consecutive rows. In a graph's extra rows inputs are zeros (floats),
                ones (integers), or values of earlier calls.
            spans: see `KVCache.at`.
            most: number of rows to which the call may be padded; None: the slots.

        Returns:
            The function's results, [B, ...] each. The first must be floating point.
        """
        B = len(inputs[0])
        longest = max(LEAST_SPAN, *(span for _, span in spans))
        rows, span = min(graph_size(B), most or self.slots), SPAN_STEP * graph_size(-(-longest // SPAN_STEP))
        sizes = tuple(tuple(tensor.shape[1:]) for tensor in inputs)
        small = rows * max(size[0] for size in sizes if size) <= TOKENS
        # Outside the engine's steps (when a cache is filled again) the steps' tensors must not be written to: they
        # were made in inference mode.
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
        """Capture a call. Use no graphs from then on if that fails or the graph's result differs."""
        if len(self._captured) == MOST:
            self._forget()
        own = [tensor.new_full((rows, *tensor.shape[1:]), 0 if tensor.is_floating_point() else 1) for tensor in inputs]
        _fill(own, inputs)
        expected = call(own)
        results = [self._result_memory(number, tensor) for number, tensor in enumerate(expected)]
        try:
            graph = self._backend.capture(lambda: [to.copy_(tensor) for to, tensor in zip(results, call(own))])
            _fill(own, inputs)  # the capture may have overwritten them
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
            f"{why}; continuing without graphs. Please report this, with the policy's config.json", stacklevel=2
        )
        self._on = False
        self._forget()

    def _forget(self) -> None:
        self._captured.clear()
        self._times.clear()
        self._backend.forget()

    def _result_memory(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return the memory where graphs leave a result with the shape and dtype of `tensor`."""
        memory = self._results.get((number, tensor.dtype))
        if memory is None or len(memory) < tensor.numel():  # earlier graphs keep the old memory
            memory = self._results[number, tensor.dtype] = tensor.new_empty(1 << (tensor.numel() - 1).bit_length())
        return memory[: tensor.numel()].view(tensor.shape)


def graph_size(count: int) -> int:
    """Round up to the next of four sizes per octave: 1 to 8, 10, 12, 14, 16, 20, ..."""
    step = 1 << max(0, (count - 1).bit_length() - 3)
    return -(-count // step) * step


def _fill(own: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    for to, tensor in zip(own, inputs):
        to[: len(tensor)].copy_(tensor)
