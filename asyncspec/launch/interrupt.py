"""Interrupts: the first Ctrl-C (or SIGTERM) asks the controller to end the run, a second one ends it at once."""

from __future__ import annotations

import signal
import time


class InterruptFlag:
    """Counts SIGINT and SIGTERM instead of dying of them; make it in the main thread."""

    def __init__(self) -> None:
        self.count, self.first = 0, 0.0
        self.arm()

    def arm(self) -> None:
        """Take the signals, also from whoever has taken them since."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number, frame) -> None:
        self.count += 1
        self.first = self.first or time.monotonic()
