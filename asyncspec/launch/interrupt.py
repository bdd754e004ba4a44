"""Interrupts: the first Ctrl-C (or SIGTERM) asks the controller to end the run, a second one ends it at once."""

from __future__ import annotations

import signal
import time

from asyncspec import transport
from asyncspec.messages import Interrupt


class InterruptFlag:
    """Counts SIGINT and SIGTERM instead of dying of them; make it in the main thread."""

    def __init__(self) -> None:
        self.count, self.first = 0, 0.0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number, frame) -> None:
        self.count += 1
        self.first = self.first or time.monotonic()


def ask_to_stop(control_address: str, name: str, reason: str = "interrupted", lost: str = "", replacement: str = "") -> None:
    """Tell the controller that the run should end, or which actor's process died and what takes its place."""
    client = transport.ControlClient(control_address, name)
    client.send(Interrupt(reason, lost, replacement))
    client.close()
