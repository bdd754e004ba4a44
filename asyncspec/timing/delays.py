"""Delays on purpose, to test that time is charged to its cause: `deployment.delays` names places and seconds."""

from __future__ import annotations

import time

from asyncspec.timing.spans import Recorder

PLACES = {  # where; each time that happens
    "generate": "an engine step of a generator",
    "reward": "a rollout's reward",
    "queue": "a group on its way to logprob",
    "logprob": "a group in logprob",
    "broadcast": "a policy version before it is sent",
    "train": "a group in the trainer",
}


def parse(text: str) -> dict[str, float]:
    """Seconds by place from "place=seconds,place=seconds".

    Raises:
        ValueError: it has another form, an unknown place or a time below 0; says what is wrong.
    """
    delays = {}
    for item in filter(None, text.split(",")):
        place, _, seconds = item.partition("=")
        if place not in PLACES:
            raise ValueError(f"{place!r} is none of {', '.join(PLACES)}")
        try:
            delays[place] = float(seconds)
        except ValueError:
            raise ValueError(f"{seconds!r} is no number of seconds") from None
        if not 0 <= delays[place] < float("inf"):
            raise ValueError(f"{seconds} is not from 0 on")
    return delays


class Delays:
    def __init__(self, text: str, recorder: Recorder) -> None:
        self.seconds, self._recorder = parse(text), recorder

    def __call__(self, place: str, times: int = 1) -> None:
        """Sleep as long as told for what happened so many times in this place; the trace shows it as "delay PLACE"."""
        if self.seconds and place in self.seconds:
            with self._recorder.span(f"delay {place}"):
                time.sleep(times * self.seconds[place])
