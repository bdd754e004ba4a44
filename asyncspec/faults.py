"""Faults on purpose, to test recovery: `deployment.faults` names an actor, where it is, how many times it comes by
there, and what happens.

    generator0:swap:2:kill,trainer:checkpoint:1:freeze

Each happens once in a run, also where the actor comes back under the same name: a file in the run's directory notes it.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

PLACES = {  # where; each actor passes by those that it has
    "start": "just started, no sign of life given yet",
    "boot": "loaded, not yet known to the controller",
    "join": "joining a broadcast group",
    "receive": "receiving a version",
    "swap": "taking a version into use",
    "work": "generating, in logprob, training, adapting, controlling",
    "send": "a group or version just sent",
    "checkpoint": "writing a checkpoint",
}
KINDS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}


def parse(text: str) -> list[tuple[str, str, int, str]]:
    """(actor, place, times, kind) of each fault.

    Raises:
        ValueError: the text has another form; says what is wrong.
    """
    faults = []
    for item in filter(None, text.split(",")):
        parts = item.split(":")
        if len(parts) != 4:
            raise ValueError(f"{item!r} is not actor:place:times:kind")
        actor, place, times, kind = parts
        if place not in PLACES:
            raise ValueError(f"{place!r} is none of {', '.join(PLACES)}")
        if not times.isdecimal() or not int(times):
            raise ValueError(f"{times!r} is not a number from 1 on")
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is none of {', '.join(KINDS)}")
        faults.append((actor, place, int(times), kind))
    return faults


class Faults:
    """Those of one actor."""

    def __init__(self, text: str, actor: str, run_dir: Path) -> None:
        self._at = {(place, times): kind for name, place, times, kind in parse(text) if name == actor}
        self._actor, self._folder = actor, run_dir / "faults"
        self._passed: Counter[str] = Counter()

    def __call__(self, place: str) -> None:
        """The actor is at this place."""
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
        os.kill(os.getpid(), KINDS[kind])
