"""Interrupts: the first Ctrl-C (or SIGTERM) asks the controller to end the run; the second one ends it at once.

A terminal that closes interrupts the run as well, unless SIGHUP is ignored, as `nohup` has it. So does a scheduler that
warns of a time limit, with SIGUSR1 or SIGXCPU.
"""

from __future__ import annotations

import signal
import time

GENTLE = (signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU)  # they may come several times, and mean no more then


class InterruptFlag:
    """Counts SIGINT and SIGTERM, which then no longer end the process; the gentle signals count once. Make it in the
    main thread.
    """

    def __init__(self) -> None:
        self.count, self.first = 0, 0.0
        self.arm()

    def arm(self) -> None:
        """Install the signal handlers, even if a library has replaced them meanwhile."""
        for number in (signal.SIGINT, signal.SIGTERM, *GENTLE):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note)

    def _note(self, number, frame) -> None:
        # A terminal that closes may send SIGHUP more than once: from the kernel, and from the shell.
        self.count = max(1, self.count) if number in GENTLE else self.count + 1
        self.first = self.first or time.monotonic()
