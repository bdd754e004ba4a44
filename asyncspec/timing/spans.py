"""Recording: an actor notes what it did from when to when.

All times are seconds of the run's clock, see clock.py.
"""

from __future__ import annotations

import functools
from typing import Callable

from asyncspec.messages import Span
from asyncspec.timing.clock import now


class _Span:
    """A class rather than a generator: half the price."""

    __slots__ = ("_keep", "_about", "_start")

    def __init__(self, keep: Callable[[tuple], None], about: tuple) -> None:
        self._keep, self._about = keep, about

    def __enter__(self) -> None:
        self._start = now()

    def __exit__(self, *error) -> None:
        self._keep((self._about, self._start, now()))


class _Nothing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *error) -> None:
        pass


_NOTHING = _Nothing()


class Recorder:
    """Spans of one actor, kept until `drain` takes them."""

    def __init__(self, recording: bool = True) -> None:
        self.recording = recording
        self._spans: list[tuple] = []

    def span(self, name: str, step: int = -1, ticket: int = -1, version: int = -1):
        """A context manager around what is recorded."""
        return _Span(self._spans.append, (name, step, ticket, version)) if self.recording else _NOTHING

    def recorded(self, name: str) -> Callable:
        """A decorator: every call is a span."""
        def decorate(function: Callable) -> Callable:
            @functools.wraps(function)
            def call(*args, **kwargs):
                with self.span(name):
                    return function(*args, **kwargs)

            return call

        return decorate

    def add(self, name: str, start: float, end: float, step: int = -1, ticket: int = -1, version: int = -1) -> None:
        if self.recording:
            self._spans.append(((name, step, ticket, version), start, end))

    def drain(self) -> list[Span]:
        # In place: a span that is still open appends to this list.
        spans = self._spans[:]
        del self._spans[: len(spans)]
        return [Span(name, start, end, step, ticket, version) for (name, step, ticket, version), start, end in spans]
