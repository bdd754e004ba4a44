"""Heartbeats: every process of a run sends them; the controller watches the actors, and the launchers watch it.

A launcher notices at once that one of its processes has died. A frozen process (stopped, swapped out, cut off from the
network) lives but sends no heartbeats. A stuck process (for example, hung in a driver) still sends them from its own
thread for heartbeats, but they report that its main loop has not turned. The controller has the launcher kill a frozen
or stuck process, and then handles it like any other death.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping

from asyncspec.deadlines import BEAT_EVERY_S, LOADING_PATIENCE
from asyncspec.wire.control import ControlClient
from asyncspec.wire.messages import Beat, Whole

SUFFIX = "~beat"  # appended to the actor's name to name its heart's own connection


class Heart:
    """Sends an actor's heartbeats, from a thread with its own connection."""

    def __init__(
        self,
        control_address: str,
        name: str,
        using: Mapping[str, int] | None = None,
        whole: Mapping[str, Whole] | None = None,
        every_s: float = BEAT_EVERY_S,
    ) -> None:
        """
        Args:
            using: kind of weights -> the version that the actor uses now; it may change. None: it uses none.
            whole: kind of weights -> the newest version that the actor has sent or received whole; it may change.
            every_s: seconds between two heartbeats.
        """
        self._using = {} if using is None else using  # an empty one may be filled later
        self._whole = {} if whole is None else whole
        self.name, self._address, self._turned = name, control_address, time.monotonic()
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heart", daemon=True)
        self._thread.start()

    @property
    def turn_s(self) -> float:
        """Seconds since the main loop last turned."""
        return max(0.0, time.monotonic() - self._turned)

    def turned(self) -> None:
        """Note that the main loop has turned."""
        self._turned = time.monotonic()

    def ending(self) -> None:
        """Note that the main loop is over: from now on `turn_s` is 0, because writing the last files may take long."""
        self._turned = math.inf

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _beat(self) -> None:
        client = ControlClient(self._address, self.name + SUFFIX)
        client.send(Beat(self.name, self.turn_s))  # at once: a process may freeze right after it has loaded
        while not self._stop.wait(self._every_s):
            client.send(Beat(self.name, self.turn_s, dict(self._using), dict(self._whole)))
        client.close(0)


class Vigil:
    """Watches the heartbeats of other processes, and finds the frozen and the stuck ones.

    When this process itself did not run for a while, that time does not count as silence of the others, except its
    first quarter of `silent_s`: so a watcher that is only slow still finds silent processes.
    """

    def __init__(self, silent_s: float, turn_s: float) -> None:
        """
        Args:
            silent_s: seconds without a heartbeat after which a process counts as frozen.
            turn_s: seconds that one turn of a main loop may take; after that its process counts as stuck.
        """
        self.silent_s, self.turn_s = silent_s, turn_s
        self._heard: dict[str, float] = {}
        self._turns: dict[str, float] = {}
        self._patience: dict[str, float] = {}  # seconds that each process may be silent
        self._looked = time.monotonic()
        # seconds before the last call of `overdue` in which this process did not run: stopped, or the machine asleep
        self.slept = 0.0

    def heard(self, name: str, turn_s: float = 0.0, loading: bool = False) -> None:
        """Note a heartbeat, or another message that shows that a process lives.

        Args:
            turn_s: seconds that the current turn of the process's main loop has taken.
            loading: the process is not at work yet. It may be silent for longer, because loading libraries holds the
                interpreter lock, which its heart's thread needs too.
        """
        self._heard[name], self._turns[name] = time.monotonic(), 0.0 if loading else turn_s
        self._patience[name] = self.silent_s * (LOADING_PATIENCE if loading else 1)

    def expect(self, name: str, within_s: float) -> None:
        """Note that a process has been started: its first heartbeat is due within `within_s` seconds."""
        self.heard(name)
        self._patience[name] = within_s

    def forget(self, name: str) -> None:
        self._heard.pop(name, None)

    def silence(self, name: str) -> float:
        """Return the seconds since a process was last heard; 0 if it never was."""
        return time.monotonic() - self._heard.get(name, time.monotonic())

    def overdue(self) -> list[tuple[str, str]]:
        """Return (name, what is wrong) of each frozen or stuck process, and stop watching these. Call it often."""
        now = time.monotonic()
        between, self._looked = now - self._looked, now
        self.slept = max(0.0, between - self.silent_s / 4)
        self._heard = {name: min(now, at + self.slept) for name, at in self._heard.items()}
        found = []
        for name, at in list(self._heard.items()):
            if now - at > self._patience[name]:
                found.append((name, f"frozen: no sign of life for {now - at:.1f} s"))
            elif self._turns[name] > self.turn_s:
                found.append((name, f"stuck: its main loop has not turned for {self._turns[name]:.0f} s"))
        for name, _ in found:
            self.forget(name)
        return found
