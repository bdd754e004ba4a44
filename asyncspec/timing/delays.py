"""Injected delays, to test that time is charged to its cause: `deployment.delays` names places and seconds.

    train=0.1,trainer_rank1:checkpoint=8

A place alone is delayed in every actor that comes to it; with an actor's name, in that actor only.
"""

from __future__ import annotations

import time

from asyncspec.clock import now
from asyncspec.timing.spans import Recorder

PLACES = {  # place: what is delayed, each time it happens
    "generate": "an engine step of a generator",
    "reward": "a rollout's reward",
    "queue": "a group on its way to logprob",
    "logprob": "a group in logprob",
    "broadcast": "a policy version before it is sent",
    "train": "a group in the trainer",
    "checkpoint": "a trainer rank's part of a checkpoint before it is written",
    "export": "the policy before it is written as a Hugging Face directory",
}


def parse(text: str) -> list[tuple[str, str, float]]:
    """Return (actor, place, seconds) of each delay; the actor is "" for all of them.

    Raises:
        ValueError: the form is wrong, a place is unknown, or a time is below 0; the message says which.
    """
    delays = []
    for item in filter(None, text.split(",")):
        where, _, written = item.partition("=")
        actor, _, place = where.strip().rpartition(":")
        if place not in PLACES:
            raise ValueError(f"{place!r} is not one of {', '.join(PLACES)}")
        try:
            seconds = float(written)
        except ValueError:
            raise ValueError(f"{written!r} is not a number of seconds") from None
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"{written} is not a duration of 0 or more seconds")
        delays.append((actor, place, seconds))
    return delays


def of_actor(text: str, me: str) -> dict[str, float]:
    """Return the seconds of an actor by place. A delay that names it overrides one for all actors.

    Args:
        me: the actor's first name.
    """
    mine = [delay for delay in parse(text) if delay[0] in ("", me)]
    return {place: seconds for _, place, seconds in sorted(mine, key=lambda delay: delay[0])}  # "" comes first


class Delays:
    """Sleeps at the configured places of one actor. The trace shows each one as "delay PLACE"."""

    def __init__(self, text: str, recorder: Recorder, me: str = "") -> None:
        """
        Args:
            text: deployment.delays.
            me: the actor's first name.
        """
        self.seconds, self._recorder = of_actor(text, me), recorder

    def __call__(self, place: str, times: int = 1, ticket: int = -1, version: int = -1) -> None:
        """Sleep for what happened `times` times in this place, to the ticket or version; -1: to all in this actor."""
        if place in self.seconds:
            start = now()
            time.sleep(times * self.seconds[place])
            self.record(place, start, now(), ticket, version)

    def record(self, place: str, start: float, end: float, ticket: int = -1, version: int = -1) -> None:
        """Record a delay that has ended. Any thread may call this: it leaves the GPU alone."""
        self._recorder.add(f"delay {place}", start, end, ticket=ticket, version=version)
