"""Proof of delivery: finds readers that still use an older version of weights long after a newer one was published, and
readers that have received other bytes than were sent.

Each reader's heartbeats say which version of policy and draft it uses, and which one it has received, with a checksum.
The sender's heartbeats have the checksum of what it sent. A reader is named once for each version. Nothing is done
about it here: a broadcast that fails has a deadline of its own, and a stuck reader is found by its heart.

    published 4 at 10 s    generator0 beats: 4   logprob beats: 3
    40 s                   generator0 beats: 4   logprob beats: 3    -> logprob has used version 3 for 30 s too long

Bytes that arrived may still be loaded wrongly. What a generator samples shows that: the trainer compares the logprobs
of its tokens with a fresh pass of the same version (rl/observed.py), and `Acceptance` does the same for its draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from asyncspec.wire.messages import GroupRecord, Publish, Whole

KEPT = 8  # versions, the newest ones of each kind, of which something is kept
# A generator is judged by this many proposals at a time: one standard error is then below 0.02.
PROPOSALS = 1000
# It is named below this share of the expected acceptance, if it is also below it by MARGIN. Later positions of a draft
# accept less than the first one, which is the one that is expected.
LEAST_SHARE, MARGIN = 0.5, 0.1


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


class Different(NamedTuple):
    """A reader that has received other bytes than were sent."""

    name: str
    kind: str
    version: int
    sender: str

    def __str__(self) -> str:
        return f"{self.name} holds other bytes of {self.kind} version {self.version} than {self.sender} has sent"


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
        self._sums: dict[str, dict[int, int]] = {}  # kind -> version -> checksum of what was sent
        self._told: set[Different] = set()

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

    def different(
        self, senders: Mapping[str, str], whole: Iterable[tuple[str, Mapping[str, Whole]]]
    ) -> list[Different]:
        """Return the readers whose newest whole version is not what was sent, each once for a version.

        Args:
            senders: kind -> its sender.
            whole: (member, kind -> the newest version that it has sent or received whole).
        """
        held, found = dict(whole), []
        for kind, sender in senders.items():
            sums = self._sums.setdefault(kind, {})
            if (sent := held.get(sender, {}).get(kind)) is not None:
                sums[sent.version] = sent.checksum
                for old in sorted(sums)[:-KEPT]:
                    del sums[old]
            for name, versions in held.items():
                mine = versions.get(kind)
                if mine is not None and sums.get(mine.version, mine.checksum) != mine.checksum:
                    found.append(Different(name, kind, mine.version, sender))
        news = [each for each in found if each not in self._told]
        self._told.update(news)
        return news


class Acceptance:
    """Finds generators whose draft accepts far less than a fresh pass of the same version expects: it did not arrive,
    or was loaded wrongly.

    The draft that a run begins with is not judged: nobody has made such a pass of it. A version that was published is
    judged by what its trainer found shortly before. Drafts improve, so that is rather too little than too much.
    """

    def __init__(self) -> None:
        # draft version -> the acceptance of a first proposal that is expected, and the policy version of that
        self._expected: dict[int, tuple[float, int]] = {}
        # generator -> proposals that were verified, proposals that were accepted, those that were expected to be
        self._sums: dict[str, tuple[int, int, float]] = {}
        self._named: set[str] = set()

    def published(self, draft: Publish) -> None:
        """Note what is expected of a draft version."""
        if draft.expected >= 0:
            self._expected[draft.version] = draft.expected, draft.policy_version
        for old in sorted(self._expected)[:-KEPT]:
            del self._expected[old]

    def wrong(self, groups: Sequence[GroupRecord]) -> list[str]:
        """Note the groups of a step. Return a line for each generator that is found, once for each of them."""
        lines = []
        for group in groups:
            expected, policy_version = self._expected.get(group.draft_version, (-1.0, 0))
            if expected < 0 or group.version_max - policy_version > KEPT:  # not known, or of a policy that has moved on
                continue
            verified, accepted = sum(group.reached_at), sum(group.accepted_at)
            before = self._sums.get(group.generator, (0, 0, 0.0))
            self._sums[group.generator] = before[0] + verified, before[1] + accepted, before[2] + verified * expected
        for generator, (verified, accepted, hoped) in list(self._sums.items()):
            if verified < PROPOSALS:
                continue
            del self._sums[generator]
            found, hope = accepted / verified, hoped / verified
            if found < min(LEAST_SHARE * hope, hope - MARGIN) and generator not in self._named:
                self._named.add(generator)
                lines.append(
                    f"the draft of {generator} has {found:.0%} of its proposals accepted, and a fresh pass of the same "
                    f"version expects {hope:.0%}: look whether its engine loads drafts as they are sent"
                )
        return lines
