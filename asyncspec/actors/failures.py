"""When errors end a run: the rule that keeps an error that always comes back from restarting actors forever.

An exception in an actor counts as its death: the actor is replaced, or all actors restart. That helps against a faulty
GPU, a full memory or a cut connection. It does not help against a reward function that always raises. So the run ends
once MOST_ALIKE errors were alike and no step was trained meanwhile:

    generator0 raises E  ->  replaced                 1
    generator1 raises E  ->  replaced                 2
    step 7 is trained                                 0    the run goes forward, so it continues
    trainer raises F in step 8  ->  all restart       1
    steps 5 to 7 are trained again                    1    they were trained before, so nothing has gone forward
    trainer raises F in step 8  ->  all restart       2
    trainer raises F in step 8  ->  the run ends      3

Two errors are alike if their texts begin alike, whichever actors raise them. Numbers, addresses, paths and what is
quoted do not count, since they differ between actors and from one try to the next. Neither does what comes after the
first ALIKE_CHARACTERS, where details stand. A step that is skipped is not trained.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

MOST_ALIKE = 3
ALIKE_CHARACTERS = 80  # the type, the field or function, and what is wrong with it; then come details
_QUOTED = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_VARYING = re.compile(rf"{_QUOTED}|[^\s'\"]*/[^\s'\"]*|\b0x[0-9a-fA-F]+|\d+(?:[.:]\d+)*")


class Failures:
    """The errors of a run since it last went forward."""

    def __init__(self) -> None:
        self._alike: Counter[str] = Counter()  # what errors have in common -> how many there were
        self._trained = 0  # the furthest step that was ever trained, counted from 1

    @classmethod
    def of(cls, events: Iterable[dict]) -> Failures:
        """Return the errors that a ledger's events tell of, since the run last ended with a failure."""
        failures = cls()
        for event in events:
            if event["event"] == "trained":
                failures.trained(event["trained_in"] + 1)
            elif event["event"] == "lost" and event.get("error"):
                failures.add(event["error"])
            elif event["event"] == "ended" and event.get("failure"):
                failures._alike.clear()
        return failures

    def trained(self, steps: int) -> None:
        """Note that the first `steps` steps are trained."""
        if steps > self._trained:
            self._trained = steps
            self._alike.clear()

    def add(self, error: str) -> int:
        """Note an error of an actor. Return how many were alike, with this one."""
        common = _VARYING.sub("#", error)[:ALIKE_CHARACTERS]
        self._alike[common] += 1
        return self._alike[common]
