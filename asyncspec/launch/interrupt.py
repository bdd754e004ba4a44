"""Interrupts: the first Ctrl-C (or SIGTERM) asks the controller to end the run; the second one ends it at once."""

from __future__ import annotations

import signal
import time


class InterruptFlag:
    """Counts SIGINT and SIGTERM, which then no longer end the process. Make it in the main thread."""

    def __init__(self) -> None:
        self.count, self.first = 0, 0.0
        self.arm()

    def arm(self) -> None:
        """Install the signal handlers, even if a library has replaced them meanwhile."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number, frame) -> None:
        self.count += 1
        self.first = self.first or time.monotonic()
