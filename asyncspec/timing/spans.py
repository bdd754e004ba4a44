"""Recording: an actor notes what it did, with start and end. With a GPU it also notes when the GPU did it.

All times are seconds of the run's clock, see clock.py. GPU times come from events in the GPU's stream. They are
queried only after they have passed, so the host never waits for them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from asyncspec.clock import now
from asyncspec.wire.facts import Rounds
from asyncspec.wire.messages import Span

IDLE_S = 50e-6  # an event in an empty stream passes within this time


class _Span:
    """Context manager of a span on the host. A class costs half as much as a generator."""

    __slots__ = ("_keep", "_about", "_start", "_cpu")

    def __init__(self, keep: Callable[[tuple], None], about: tuple) -> None:
        self._keep, self._about = keep, about

    def __enter__(self) -> None:
        self._cpu, self._start = time.process_time(), now()

    def __exit__(self, *error) -> None:
        self._keep((self._about, self._start, now(), time.process_time() - self._cpu, ()))


class Mark(NamedTuple):
    """An event in a GPU's stream, and an anchor: an earlier event that passed at a known time."""

    event: Any
    anchor: Any
    anchor_at: float


class _Gpu:
    """Spans of a GPU's work, each from one event in its stream to another."""

    def __init__(self, record: Callable) -> None:
        """Record the first anchor.

        Args:
            record: callable() -> an event, recorded in the stream.
        """
        self._record = record
        self._pending: deque[tuple[tuple, Mark, Any]] = deque()
        self._anchor, self._anchor_at = record(), now()

    def mark(self) -> Mark:
        return Mark(self._record(), self._anchor, self._anchor_at)

    def add(self, about: tuple, since: Mark) -> None:
        self._pending.append((about, since, self._record()))

    def passed(self) -> list[tuple]:
        """Return the spans that the GPU has finished, in order: (about, start, end)."""
        found = []
        while self._pending and self._pending[0][2].query():
            about, (first, anchor, anchor_at), last = self._pending.popleft()
            found.append((about, *(anchor_at + 1e-3 * anchor.elapsed_time(event) for event in (first, last))))
        if not self._pending:  # renew the anchor: clocks drift, and elapsed_time is a float32
            event, at = self._record(), now()
            while not (passed := event.query()) and now() < at + IDLE_S:
                pass
            if passed:  # the stream was empty, so the event passed when it was recorded
                self._anchor, self._anchor_at = event, at
        return found


class _GpuSpan:
    """Context manager of a span on the host and on the GPU."""

    __slots__ = ("_recorder", "_about", "_start", "_mark", "_cpu")

    def __init__(self, recorder: Recorder, about: tuple) -> None:
        self._recorder, self._about = recorder, about

    def __enter__(self) -> None:
        self._cpu, self._start, self._mark = time.process_time(), now(), self._recorder.mark()

    def __exit__(self, *error) -> None:
        name, step, ticket, version = self._about
        cpu = time.process_time() - self._cpu
        self._recorder.add(name, self._start, now(), step, ticket, version, self._mark, cpu)


class _Nothing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *error) -> None:
        pass


_NOTHING = _Nothing()


class Recorder:
    """The spans of one actor, kept until `drain` takes them."""

    def __init__(self, recording: bool = True) -> None:
        self.recording = recording
        self._spans: list[tuple] = []
        self._gpu: _Gpu | None = None
        self._device = ""

    def use(self, device: str, record: Callable | None = None) -> None:
        """From now on, also record what this GPU does; a device that is not a GPU changes nothing.

        Args:
            record: callable() -> an event recorded in the GPU's stream; None: torch's.
        """
        if self.recording and device.startswith("cuda"):
            self._gpu, self._device = _Gpu(record or _recorded_event), device

    def span(self, name: str, step: int = -1, ticket: int = -1, version: int = -1):
        """Return a context manager that records what runs inside it."""
        if self._gpu is not None:
            return _GpuSpan(self, (name, step, ticket, version))
        return _Span(self._spans.append, (name, step, ticket, version)) if self.recording else _NOTHING

    def mark(self) -> Mark | None:
        """Mark where in the GPU's stream a span begins, for `add`; None without a GPU."""
        return self._asked(lambda gpu: gpu.mark())

    def add(
        self,
        name: str,
        start: float,
        end: float,
        step: int = -1,
        ticket: int = -1,
        version: int = -1,
        since: Mark | None = None,
        cpu: float = 0.0,
        rounds: Sequence[Rounds] = (),
    ) -> None:
        """Record a span that has ended.

        Args:
            since: a mark. The work that the GPU was given since then becomes a span of the GPU.
            cpu, rounds: as in `Span`.
        """
        if self.recording:
            self._spans.append(((name, step, ticket, version), start, end, cpu, rounds))
        if since is not None:
            self._asked(lambda gpu: gpu.add((name, step, ticket, version), since))

    def drain(self) -> list[Span]:
        """Return the recorded spans and forget them."""
        # In place, because a span that is still open will append to this list.
        spans = self._spans[:]
        del self._spans[: len(spans)]
        of_gpu = self._asked(lambda gpu: gpu.passed()) or []
        return [
            Span(name, start, end, step, ticket, version, device, cpu, list(rounds))
            for device, some in (("", spans), (self._device, ((*each, 0.0, ()) for each in of_gpu)))
            for (name, step, ticket, version), start, end, cpu, rounds in some
        ]

    def _asked(self, ask: Callable[[_Gpu], Any]) -> Any:
        """Query the GPU's events; None without a GPU. A GPU that failed is no longer asked; others report the
        failure.
        """
        if self._gpu is not None:
            try:
                return ask(self._gpu)
            except RuntimeError:
                self._gpu = None
        return None


def _recorded_event():
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
