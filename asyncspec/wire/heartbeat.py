"""Signs of life: every process of a run beats, and the controller and the launchers watch each other's.

A dead process is seen by its launcher at once. A frozen one (stopped, swapped out, cut off from the network) is not
dead; it beats no more. A stuck one (hung in a driver, say) beats from its thread, but says that its main loop has not
turned. The controller has the launcher kill either, and from there on it is a death like any other.
"""

from __future__ import annotations

import math
import threading
import time

from asyncspec.deadlines import BEAT_EVERY_S, LOADING_PATIENCE
from asyncspec.wire.control import ControlClient
from asyncspec.wire.messages import Beat

SUFFIX = "~beat"  # of the name that a heart's own connection goes by


class Heart:
    """Beats for an actor, in a thread with a connection of its own."""

    def __init__(self, control_address: str, name: str) -> None:
        self.name, self._address, self._turned = name, control_address, time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heart", daemon=True)
        self._thread.start()

    @property
    def turn_s(self) -> float:
        """Seconds since the main loop turned."""
        return max(0.0, time.monotonic() - self._turned)

    def turned(self) -> None:
        """The main loop is alive."""
        self._turned = time.monotonic()

    def ending(self) -> None:
        """The main loop is over; what is still to be written takes its time."""
        self._turned = math.inf

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _beat(self) -> None:
        client = ControlClient(self._address, self.name + SUFFIX)
        client.send(Beat(self.name, self.turn_s))  # at once: one that has loaded in no time may freeze in no time
        while not self._stop.wait(BEAT_EVERY_S):
            client.send(Beat(self.name, self.turn_s))
        client.close(0)


class Vigil:
    """Keeps when each process last beat. Time in which this process itself did not run counts as nobody's silence, but
    for its beginning: a process that is merely slow still finds out who is silent.
    """

    def __init__(self, silent_s: float, turn_s: float) -> None:
        """
        Args:
            silent_s: without a beat, after which a process counts as frozen.
            turn_s: of one turn of its main loop, after which it counts as stuck.
        """
        self.silent_s, self.turn_s = silent_s, turn_s
        self._heard: dict[str, float] = {}
        self._turns: dict[str, float] = {}
        self._patience: dict[str, float] = {}  # how long each may be silent
        self._looked = time.monotonic()
        # seconds before the last look in which this process did not run: stopped, or the machine asleep
        self.slept = 0.0

    def heard(self, name: str, turn_s: float = 0.0, loading: bool = False) -> None:
        """
        Args:
            loading: it is not at work yet; libraries that are being loaded hold the interpreter, its heart's thread
                included.
        """
        self._heard[name], self._turns[name] = time.monotonic(), 0.0 if loading else turn_s
        self._patience[name] = self.silent_s * (LOADING_PATIENCE if loading else 1)

    def expect(self, name: str, within_s: float) -> None:
        """A process has been started: its first sign of life is due within so many seconds."""
        self.heard(name)
        self._patience[name] = within_s

    def forget(self, name: str) -> None:
        self._heard.pop(name, None)

    def silence(self, name: str) -> float:
        """Seconds since a process was heard of; 0 if it never was."""
        return time.monotonic() - self._heard.get(name, time.monotonic())

    def overdue(self) -> list[tuple[str, str]]:
        """(name, what is wrong) of those frozen or stuck, each once. Call it often."""
        now = time.monotonic()
        between, self._looked = now - self._looked, now
        self.slept = max(0.0, between - self.silent_s / 4)
        self._heard = {name: min(now, at + self.slept) for name, at in self._heard.items()}
        found = []
        for name, at in list(self._heard.items()):
            if now - at > self._patience[name]:
                found.append((name, f"frozen: no sign of life for {now - at:.1f} s"))
            elif self._turns[name] > self.turn_s:
                found.append((name, f"stuck: busy with one thing for {self._turns[name]:.0f} s"))
        for name, _ in found:
            self.forget(name)
        return found
