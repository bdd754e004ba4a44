"""Interrupts: the first Ctrl-C (or SIGTERM) asks the controller to end the run; the second one ends it at once.

A terminal that closes interrupts the run as well, unless SIGHUP is ignored, as `nohup` has it.
"""

from __future__ import annotations

import signal
import time


class InterruptFlag:
    """Counts SIGINT and SIGTERM, which then no longer end the process, and so does SIGHUP. Make it in the main
    thread.
    """

    def __init__(self) -> None:
        self.count, self.first = 0, 0.0
        self.arm()

    def arm(self) -> None:
        """Install the signal handlers, even if a library has replaced them meanwhile."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note)

    def _note(self, number, frame) -> None:
        # A terminal that closes may send SIGHUP more than once: from the kernel, and from the shell.
        self.count = self.count + 1 if number != signal.SIGHUP else max(1, self.count)
        self.first = self.first or time.monotonic()
