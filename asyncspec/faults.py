"""Injected faults, to test recovery.

`deployment.faults` gives an actor, a place in its code, at which visit of that place the fault happens, and its kind:

    generator0:swap:2:kill,trainer:checkpoint:1:freeze

Each fault happens once in a run, even if the actor starts again under the same name: a file in the run's directory
notes it. With `asked` among the faults, an actor also raises an exception at the next place that it comes to once
somebody has called `ask`.
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


ASKED = "asked"


class InjectedError(RuntimeError):
    """The exception of the kind `raise`."""


def _raise(fault: str) -> None:
    raise InjectedError(f"deployment.faults={fault}")


def _hold(fault: str) -> None:
    ctypes.PyDLL(None).sleep(2**31 - 1)  # a call through PyDLL keeps the interpreter's lock


def _full(fault: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


KINDS = {  # kind -> what the actor does to itself; called with the fault, as in deployment.faults
    "kill": lambda fault: os.kill(os.getpid(), signal.SIGKILL),
    "freeze": lambda fault: os.kill(os.getpid(), signal.SIGSTOP),
    "hold": _hold,  # freezes in native code; it can still print its stacks
    "exit": lambda fault: os._exit(3),
    "full": _full,  # the disk is full: what it does at this place fails
    "raise": _raise,
}


def parse(text: str) -> list[tuple[str, str, int, str]]:
    """Return (actor, place, times, kind) of each fault.

    Raises:
        ValueError: the text has another form; the message says what is wrong.
    """
    faults = []
    for item in filter(None, text.split(",")):
        if item == ASKED:
            continue
        parts = item.split(":")
        if len(parts) != 4:
            raise ValueError(f"{item!r}: expected actor:place:times:kind, or {ASKED}")
        actor, place, times, kind = parts
        if place not in PLACES:
            raise ValueError(f"{place!r}: expected one of {', '.join(PLACES)}")
        if not times.isdecimal() or not int(times):
            raise ValueError(f"{times!r}: expected a whole number, 1 or more")
        if kind not in KINDS:
            raise ValueError(f"{kind!r}: expected one of {', '.join(KINDS)}")
        faults.append((actor, place, int(times), kind))
    return faults


def ask(run_dir: Path, actor: str, said: str) -> None:
    """Have an actor of a run raise an exception with this message at the next place that it comes to."""
    request = _request(run_dir, actor)
    request.parent.mkdir(exist_ok=True)
    whole = request.with_suffix(".partial")  # the actor reads all of it or none
    whole.write_text(said, encoding="utf-8")
    whole.replace(request)


def asked(run_dir: Path, actor: str) -> bool:
    """Whether an exception that was asked for has not been raised yet."""
    return _request(run_dir, actor).exists()


def withdraw(run_dir: Path, actor: str) -> bool:
    """Take back what was asked for. Return whether it had not happened yet."""
    return bool(_taken(_request(run_dir, actor)))


def _request(run_dir: Path, actor: str) -> Path:
    return run_dir / "faults" / f"{actor}.{ASKED}"


def _taken(request: Path) -> str:
    """Remove a request. Return its text, "" if there is none or another process has taken it."""
    try:
        said = request.read_text(encoding="utf-8")
        request.unlink()
    except FileNotFoundError:
        return ""
    return said


class Faults:
    """The faults of one actor."""

    def __init__(self, text: str, actor: str, run_dir: Path) -> None:
        self._at = {(place, times): kind for name, place, times, kind in parse(text) if name == actor}
        self._actor, self._folder = actor, run_dir / "faults"
        self._passed: Counter[str] = Counter()
        self._asked = _request(run_dir, actor) if ASKED in text.split(",") else None

    def __call__(self, place: str) -> None:
        """Count a visit of this place, and cause the fault that is due at this visit, if there is one.

        Raises:
            InjectedError: the fault is of the kind `raise`, or was asked for.
        """
        if self._asked is not None and (said := _taken(self._asked)):
            raise InjectedError(said)
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
        KINDS[kind](f"{self._actor}:{place}:{self._passed[place]}:{kind}")
