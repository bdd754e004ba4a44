"""What messages say about groups and about time: parts of messages, which carry no tensors. Times are in seconds of the
run's clock.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from asyncspec.wire.messages import Arrays, Group

TRY_IDS = 1 << 32  # the n-th ticket for a place, n from 0, has the id n * TRY_IDS + place


class Phase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One activity of a group, from start to end. A group carries all its phases with it."""

    name: str  # a key of timing.attribution.CAUSES
    start: float
    end: float


class Rounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Rounds of an engine that were alike, added up."""

    live: int  # sequences
    draft_length: int  # ENTERING: no rounds, but sequences that got a slot, one by one
    count: int
    seconds: float  # of one processor on CPUs, else of the clock
    tokens: float  # that the sequences gained; 0: steps that the engine timed before the first sequence
    positions: float  # that the sequences had, summed over sequences and rounds


ENTERING = -1


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A named interval of an actor's time, for the trace."""

    name: str
    start: float
    end: float
    step: int = -1
    ticket: int = -1
    version: int = -1
    device: str = ""  # the GPU on which the time was measured; "": on the host
    cpu: float = 0.0  # seconds that the processors worked for the process meanwhile; 0: not measured
    rounds: list[Rounds] = []  # that an engine took meanwhile


class Wait(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The trainer waited for a ticket's group from start to end."""

    ticket_id: int
    start: float
    end: float


class ToolUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The calls of a tool, or of an environment that names no tools."""

    calls: int
    seconds: float  # of all calls
    longest: float  # seconds of the longest one


UNNAMED = "step"  # stands for the tools of an environment that does not name them


def added(uses: Iterable[Mapping[str, ToolUse]]) -> dict[str, ToolUse]:
    """Add up the uses of tools, by name."""
    found: dict[str, ToolUse] = {}
    for name, use in (item for each in uses for item in each.items()):
        before = found.get(name, ToolUse(0, 0.0, 0.0))
        found[name] = ToolUse(before.calls + use.calls, before.seconds + use.seconds, max(before.longest, use.longest))
    return found


def sampled(arrays: Arrays) -> np.ndarray:
    """Return which response tokens of a group the policy sampled, bool [T]; the others are an environment's."""
    mask = arrays.get("loss_mask")
    return np.ones(int(arrays["lengths"].sum()), dtype=bool) if mask is None else mask.astype(bool)


def sampled_lengths(arrays: Arrays) -> np.ndarray:
    """Return how many tokens of each response the policy sampled, int64 [G]."""
    if "loss_mask" not in arrays:
        return arrays["lengths"].astype(np.int64)
    return np.add.reduceat(arrays["loss_mask"], np.cumsum(arrays["lengths"]) - arrays["lengths"], dtype=np.int64)


EXPERTS = ("experts", "prompt_experts")  # arrays of a group, with rl.routing_replay


def checksum(arrays: Arrays) -> int:
    """Return a checksum of a group's tokens, of which of them the policy sampled, of their versions, and of the experts
    to which they were sent.
    """
    found, experts = 0, [arrays[name] for name in EXPERTS if name in arrays]
    for array in (arrays["tokens"], arrays["versions"], arrays["lengths"], sampled(arrays), *experts):
        found = zlib.crc32(array.tobytes(), found)
    return found


class GroupRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The facts of a group that are kept after training on it, without its tensors."""

    ticket_id: int
    generator: str
    reward_mean: float
    rewards_differ: bool
    response_tokens: list[int]  # that the policy sampled
    version_min: int
    version_max: int
    proximal_version: int
    verifications: int
    proposed: int
    accepted: int
    truncated: int
    draft_version: int
    phases: list[Phase]
    reached_at: list[int] = []  # by position, as in engine.protocol.Completion
    accepted_at: list[int] = []
    prompt_tokens: int = 0
    environment_tokens: int = 0  # within the responses, which an environment wrote
    turns: int = 0  # that the policy had, all responses together; 0: one each
    tools: dict[str, ToolUse] = {}
    checksum: int = 0

    @property
    def place(self) -> int:
        """As of `Ticket`."""
        return self.ticket_id % TRY_IDS

    @classmethod
    def of(cls, group: Group, arrays: Arrays) -> GroupRecord:
        """Return the record of a group."""
        versions, lengths = arrays["versions"][sampled(arrays)], sampled_lengths(arrays)
        return cls(
            ticket_id=group.ticket.ticket_id,
            generator=group.generator,
            reward_mean=float(np.mean(group.rewards)),
            rewards_differ=len(set(group.rewards)) > 1,
            response_tokens=lengths.tolist(),
            version_min=int(versions.min()),
            version_max=int(versions.max()),
            proximal_version=group.proximal_version,
            verifications=group.verifications,
            proposed=group.proposed,
            accepted=group.accepted,
            truncated=sum(group.truncated),
            draft_version=group.draft_version,
            phases=group.phases,
            reached_at=group.reached_at,
            accepted_at=group.accepted_at,
            prompt_tokens=len(group.ticket.prompt_tokens),
            environment_tokens=len(arrays["tokens"]) - int(lengths.sum()),
            turns=group.turns,
            tools=group.tools,
            checksum=checksum(arrays),
        )
