"""Injected faults, to test recovery.

`deployment.faults` gives an actor, a place in its code, at which visit of that place the fault happens, and its kind:

    generator0:swap:2:kill,trainer:checkpoint:1:freeze

Each fault happens once in a run, even if the actor starts again under the same name: a file in the run's directory
notes it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from collections import Counter
from pathlib import Path

PLACES = {  # place -> what the actor does there; an actor visits only some of them
    "start": "has just started, and sent no heartbeat yet",
    "boot": "has loaded, and is not yet known to the controller",
    "join": "joins a broadcast group",
    "receive": "receives a version",
    "swap": "takes a version into use",
    "work": "does its main work: generates, scores, trains, adapts or controls",
    "send": "has just sent a group or a version",
    "checkpoint": "writes a checkpoint",
}


def _hold() -> None:
    ctypes.PyDLL(None).sleep(2**31 - 1)  # a call through PyDLL keeps the interpreter's lock


def _full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


KINDS = {  # kind -> what the actor does to itself
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "freeze": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hold": _hold,  # freezes in native code; it can still print its stacks
    "exit": lambda: os._exit(3),
    "full": _full,  # the disk is full: what it does at this place fails
}


def parse(text: str) -> list[tuple[str, str, int, str]]:
    """Return (actor, place, times, kind) of each fault.

    Raises:
        ValueError: the text has another form; the message says what is wrong.
    """
    faults = []
    for item in filter(None, text.split(",")):
        parts = item.split(":")
        if len(parts) != 4:
            raise ValueError(f"{item!r}: expected actor:place:times:kind")
        actor, place, times, kind = parts
        if place not in PLACES:
            raise ValueError(f"{place!r}: expected one of {', '.join(PLACES)}")
        if not times.isdecimal() or not int(times):
            raise ValueError(f"{times!r}: expected a whole number, 1 or more")
        if kind not in KINDS:
            raise ValueError(f"{kind!r}: expected one of {', '.join(KINDS)}")
        faults.append((actor, place, int(times), kind))
    return faults


class Faults:
    """The faults of one actor."""

    def __init__(self, text: str, actor: str, run_dir: Path) -> None:
        self._at = {(place, times): kind for name, place, times, kind in parse(text) if name == actor}
        self._actor, self._folder = actor, run_dir / "faults"
        self._passed: Counter[str] = Counter()

    def __call__(self, place: str) -> None:
        """Count a visit of this place, and cause the fault that is due at this visit, if there is one."""
        if not self._at:
            return
        self._passed[place] += 1
        kind = self._at.get((place, self._passed[place]))
        if kind is None:
            return
        self._folder.mkdir(exist_ok=True)
        try:
            (self._folder / f"{self._actor}-{place}-{self._passed[place]}-{kind}").touch(exist_ok=False)
        except FileExistsError:
            return
        KINDS[kind]()
