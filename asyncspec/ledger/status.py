"""What status.json says of a run."""

from __future__ import annotations

import msgspec

FILE = "status.json"


class Actor(msgspec.Struct, frozen=True):
    """An actor that is not ready."""

    name: str
    role: str
    state: str  # as in actors/crew.py
    silent_s: float  # seconds since it was heard
    error: str = ""


class Status(msgspec.Struct, frozen=True):
    """A run at one moment. Times are seconds since 1970."""

    time: float
    began: float  # when this controller began
    ended: str  # why the run ends or has ended; "": it goes on
    failure: str
    step: int  # steps trained
    steps: int
    version: int  # the newest published version of the policy
    lag: float  # largest of the last step
    most_lag: int
    step_s: float  # of the last step
    left_s: float | None  # until the last step is trained; None: not known yet
    score: float | None  # of the last evaluation
    up: dict[str, int]  # role -> actors that are ready
    others: list[Actor]  # actors that are not ready, the first of them
    more: int  # further ones
    lost: dict[str, int]  # role -> actors lost since this controller began
    restarts: int  # how often the run was continued from a checkpoint
    waiting: int  # tickets that no generator has yet
    generating: int  # training tickets in generators
    generated: int  # and on their way to the trainer
    waits_for: str
