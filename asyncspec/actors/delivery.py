"""Proof of delivery: finds readers that still use an older version of weights long after a newer one was published.

Each reader's heartbeats say which version of policy and draft it uses. A reader that is late is named once for each
version. Nothing is done about it here: a broadcast that fails has a deadline of its own, and a stuck reader is found by
its heart.

    published 4 at 10 s    generator0 beats: 4   logprob beats: 3
    40 s                   generator0 beats: 4   logprob beats: 3    -> logprob has used version 3 for 30 s too long
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Late(NamedTuple):
    """A reader that still uses an older version."""

    name: str
    kind: str
    uses: int
    newest: int
    seconds: float  # since the newest one was published

    def __str__(self) -> str:
        return (
            f"{self.name} still uses {self.kind} version {self.uses}: version {self.newest} was published "
            f"{self.seconds:.0f} s ago"
        )


class Delivery:
    """When each kind's newest version was published, and which readers were named for it."""

    def __init__(self, late_s: float) -> None:
        """
        Args:
            late_s: seconds after which a version should be in use everywhere.
        """
        self.late_s = late_s
        self._newest: dict[str, tuple[int, float]] = {}  # kind -> version, when it was published
        self._named: set[tuple[str, str, int]] = set()  # (reader, kind, version)

    def published(self, kind: str, version: int, now: float) -> None:
        """Note that a version was published. A version that is sent again was published before."""
        if version > self._newest.get(kind, (-1, 0.0))[0]:
            self._newest[kind] = version, now

    def late(self, using: Iterable[tuple[str, dict[str, int]]], now: float) -> list[Late]:
        """Return the readers that are late, each once for a version.

        Args:
            using: (reader, kind -> the version that it uses); a kind that is missing is not expected yet.
        """
        found = []
        for name, versions in using:
            for kind, version in versions.items():
                newest, at = self._newest.get(kind, (-1, now))
                key = name, kind, newest
                if version < newest and now - at > self.late_s and key not in self._named:
                    self._named.add(key)
                    found.append(Late(name, kind, version, newest, now - at))
        return found
