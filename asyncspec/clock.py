"""One clock for all processes of a run: the controller's monotonic clock.

Processes of one host share CLOCK_MONOTONIC. An actor on another host asks the controller for the time repeatedly. The
fastest round trip gives the offset between the two clocks; its error is at most half that round trip.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

ROUNDS = 64  # round trips that are kept; older ones are dropped, because clocks drift

_offset = 0.0


def now() -> float:
    """Return the time of the run's clock, in seconds."""
    return time.monotonic() + _offset


def align(offset: float) -> None:
    """Set how many seconds the run's clock (`now`) is ahead of this host's monotonic clock."""
    global _offset
    _offset = offset


def host() -> str:
    """Return a text that differs between hosts, and between two boots of one host: the boot id, or "" if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class Estimate:
    """Estimates from round trips how far another clock is ahead of this host's."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[float, float]] = deque(maxlen=ROUNDS)

    def add(self, sent: float, there: float, back: float) -> None:
        """Add a round trip.

        Args:
            sent, back: when the question was sent and the answer arrived, in seconds of this host's clock.
            there: the answer, in seconds of the other clock.
        """
        self._rounds.append((back - sent, there - (sent + back) / 2))

    @property
    def offset(self) -> float:
        """Seconds by which the other clock is ahead, from the fastest round trip."""
        return min(self._rounds)[1]

    @property
    def error(self) -> float:
        """Largest error of the offset in seconds, however the round trip divides into its two ways; excludes drift."""
        return min(self._rounds)[0] / 2
