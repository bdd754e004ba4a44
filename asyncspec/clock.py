"""One clock for all processes of a run: the controller's monotonic clock.

Processes of one host share CLOCK_MONOTONIC. An actor on another host asks the controller for the time again and again;
the answer of the quickest round trip says how far its own clock is off, and by how much that may be wrong: half the
round trip.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

ROUNDS = 64  # round trips remembered: clocks drift

_offset = 0.0


def now() -> float:
    """Seconds of the run's clock."""
    return time.monotonic() + _offset


def align(offset: float) -> None:
    """Let `now` be so far ahead of this host's clock."""
    global _offset
    _offset = offset


def host() -> str:
    """What differs between hosts, and between two boots of one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class Estimate:
    """How far another clock is ahead, from round trips."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[float, float]] = deque(maxlen=ROUNDS)

    def add(self, sent: float, there: float, back: float) -> None:
        """A round trip: sent and back by the own clock, `there` what the other said in between."""
        self._rounds.append((back - sent, there - (sent + back) / 2))

    @property
    def offset(self) -> float:
        return min(self._rounds)[1]

    @property
    def error(self) -> float:
        """The offset is wrong by at most this, whatever part of the trip was the way there; clocks' drift apart."""
        return min(self._rounds)[0] / 2
