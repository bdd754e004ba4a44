"""Who works in a pipeline: each worker says how much work is left until something happens to it.

A worker knows no time. The pipeline lets work pass, faster or slower as cores are shared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from asyncspec.simulate.replica import Replica


class Worker(ABC):
    """Something that works on a core. Its work passes at the rate of its host."""

    def __init__(self) -> None:
        self.at, self.stamp, self.active, self.rate = 0.0, 0, False, 1.0

    @abstractmethod
    def left(self) -> float:
        """Return the seconds of work until something happens; infinity if it is idle."""

    @abstractmethod
    def spend(self, work: float) -> None:
        """Let seconds of work pass, in which nothing happens."""

    @abstractmethod
    def happen(self) -> None:
        """Do what happens after `left` seconds of work."""


class Queue(Worker):
    """A worker that takes one piece of work after the other."""

    def __init__(self, done: Callable) -> None:
        super().__init__()
        self.pieces: deque[tuple[float, object]] = deque()
        self.done, self.remaining = done, 0.0

    def put(self, work: float, what: object) -> None:
        if not self.pieces:
            self.remaining = work
        self.pieces.append((work, what))

    def left(self) -> float:
        return self.remaining if self.pieces else np.inf

    def spend(self, work: float) -> None:
        self.remaining = max(0.0, self.remaining - work)

    def happen(self) -> None:
        _, what = self.pieces.popleft()
        if self.pieces:
            self.remaining = self.pieces[0][0]
        self.done(what)


class Generator(Worker):
    """A replica that pauses for work besides its rounds."""

    def __init__(self, replica: Replica, done: Callable[[int, int], None]) -> None:
        super().__init__()
        self.replica, self.done = replica, done
        self.pause = 0.0  # work before generation goes on, such as a swap
        self.held: deque[tuple[int, Any]] = deque()  # tickets that wait for a version, by name
        self.load = 0  # responses that it was given and has not ended

    def left(self) -> float:
        return self.pause + self.replica.next_end() if self.replica.busy else np.inf

    def spend(self, work: float) -> None:
        paused = min(self.pause, work)
        self.pause -= paused
        if work > paused:
            self.replica.advance(work - paused)

    def happen(self) -> None:
        self.pause = 0.0
        self.done(*self.replica.end())
