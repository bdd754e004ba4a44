"""Recording: an actor notes what it did from when to when.

All times are seconds of CLOCK_MONOTONIC, which processes of one host share.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import Iterator

from asyncspec.messages import Span

now = time.monotonic


class Recorder:
    """Spans of one actor, kept until `drain` takes them."""

    def __init__(self) -> None:
        self._spans: list[Span] = []

    @contextmanager
    def span(self, name: str, step: int = -1, ticket: int = -1, version: int = -1) -> Iterator[None]:
        start = now()
        try:
            yield
        finally:
            self._spans.append(Span(name, start, now(), step, ticket, version))

    def add(self, name: str, start: float, end: float, step: int = -1, ticket: int = -1, version: int = -1) -> None:
        self._spans.append(Span(name, start, end, step, ticket, version))

    def drain(self) -> list[Span]:
        spans, self._spans = self._spans, []
        return spans
