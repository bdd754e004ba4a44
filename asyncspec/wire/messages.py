"""What travels between actors: msgspec structs, with tensors beside them as named numpy arrays.

`AnyMessage` at the end is the union of all messages; codec.py turns them into frames and back. Times are seconds of the
run's clock (clock.py).
"""

from __future__ import annotations

import msgspec
import numpy as np

Arrays = dict[str, np.ndarray]


class Message(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    pass


class Phase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a group was doing from start to end; the history of a group travels with it."""

    name: str  # one of timing.attribution's causes
    start: float
    end: float


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One stretch of an actor's time, for the trace."""

    name: str
    start: float
    end: float
    step: int = -1
    ticket: int = -1
    version: int = -1
    device: str = ""  # the GPU whose time it is; "": the host's


# --- data: along the way of a rollout ---------------------------------------------------------------------------------


class Ticket(Message, frozen=True):
    """The right to generate one group. Issued for a step only once version step - lag is published."""

    ticket_id: int
    step: int  # the step that trains it: turns version `step` into `step + 1`
    min_version: int  # no token may be sampled by an older version
    prompt: str
    answer: str
    prompt_tokens: list[int]
    seeds: list[int]  # one per sample
    issued: float
    evaluation: bool = False  # rewarded and reported, never trained
    lost: float = 0.0  # when it was issued to a generator that died; 0: it was not


class Group(Message, frozen=True):
    """All samples of one prompt.

    Arrays, concatenated over samples: tokens int32 [T], behaviour float32 [T], versions int32 [T], lengths int32 [G];
    after logprob also proximal float32 [T] and, with a KL term, reference float32 [T].
    """

    ticket: Ticket
    generator: str
    rewards: list[float]
    truncated: int
    verifications: int
    proposed: int
    accepted: int
    draft_version: int
    phases: list[Phase]
    proximal_version: int = -1
    reached_at: list[int] = []  # by position, as in engine.protocol.Completion
    accepted_at: list[int] = []


class Supervision(Message, frozen=True):
    """What the draft learns from, one group. Arrays: see `drafts.supervision.pack`."""

    ticket_id: int
    policy_version: int


class Order(Message, frozen=True):
    """To the other ranks of a trainer or a logprob actor: what all of them do next, see actors/team.py."""

    what: str
    number: int = -1  # a version, or how many


# --- control: between every actor and the controller ------------------------------------------------------------------


class Hello(Message, frozen=True):
    """An actor is up. `address` is where its inbox listens, `device` what it computes on: cpu, or a name of its GPU
    that no other has.
    """

    name: str
    address: str
    device: str


class Claim(Message, frozen=True):
    """A node that starts by itself: as whom may these actors come?"""

    names: list[str]


class Claimed(Message, frozen=True):
    """Under these names, in the same order; or not at all, and why."""

    names: list[str]
    refused: str = ""


class Ready(Message, frozen=True):
    """An actor has loaded what it needs and joined its broadcast groups."""

    name: str


class ClockAsked(Message, frozen=True):
    """What time is it? `sent` comes back with the answer."""

    sent: float


class ClockTold(Message, frozen=True):
    sent: float
    time: float
    host: str  # of the controller


class Beat(Message, frozen=True):
    """The sender's process lives. From a thread of its own, so that it says so also during long work."""

    name: str
    turn_s: float = 0.0  # how long the present turn of its main loop has taken


class Kill(Message, frozen=True):
    """To launchers: end the process of an actor that has frozen; whoever started it."""

    name: str
    reason: str


class Welcome(Message, frozen=True):
    """Where everybody is: the addresses of all inboxes by role (generators by name), and where broadcast groups meet.
    Comes again when an actor has been replaced.
    """

    addresses: dict[str, str]
    store_host: str
    store_port: int
    versions: dict[str, int]  # the newest published, by kind


class Membership(Message, frozen=True):
    """A broadcast group of one epoch. The first member sends; the others receive."""

    kind: str  # policy or draft
    epoch: int
    members: list[str]
    backend: str  # nccl or gloo


class DraftEnded(Message, frozen=True):
    """The draft adapter is gone for good: the draft stays as it is, and nobody takes supervision any more."""


class Publish(Message, frozen=True):
    """A snapshot of a new version is complete and its broadcast has begun."""

    kind: str
    version: int
    policy_version: int = -1  # for a draft: the policy version it was last trained for
    epoch: int = 1


class Receive(Message, frozen=True):
    """Take part in the broadcast of this version."""

    kind: str
    version: int
    epoch: int


class Broken(Message, frozen=True):
    """A broadcast failed in this member: a new epoch is needed."""

    name: str
    kind: str
    epoch: int
    error: str


class Received(Message, frozen=True):
    name: str
    kind: str
    version: int


class Wait(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The trainer waited from start to end for the group of a ticket."""

    ticket_id: int
    start: float
    end: float


class GroupRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is kept of a group after it is trained."""

    ticket_id: int
    generator: str
    reward_mean: float
    rewards_differ: bool
    response_tokens: list[int]
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

    @classmethod
    def of(cls, group: Group, arrays: Arrays) -> GroupRecord:
        versions = arrays["versions"]
        return cls(
            ticket_id=group.ticket.ticket_id,
            generator=group.generator,
            reward_mean=float(np.mean(group.rewards)),
            rewards_differ=len(set(group.rewards)) > 1,
            response_tokens=arrays["lengths"].tolist(),
            version_min=int(versions.min()),
            version_max=int(versions.max()),
            proximal_version=group.proximal_version,
            verifications=group.verifications,
            proposed=group.proposed,
            accepted=group.accepted,
            truncated=group.truncated,
            draft_version=group.draft_version,
            phases=group.phases,
            reached_at=group.reached_at,
            accepted_at=group.accepted_at,
        )


class StepDone(Message, frozen=True):
    """The trainer turned version `step` into `step + 1`, or left it as it was."""

    step: int
    start: float
    end: float
    waits: list[Wait]
    busy: dict[str, float]  # seconds by part: data, train, prepare
    stats: dict[str, float]
    groups: list[GroupRecord]
    skipped: str = ""  # why the policy was left as it was


class Arrived(Message, frozen=True):
    """A group is with the trainer."""

    ticket_id: int


class Checkpointed(Message, frozen=True):
    """A checkpoint to resume from is complete."""

    version: int


class Generated(Message, frozen=True):
    """A group left its generator, which has room for another."""

    ticket_id: int


class EvalDone(Message, frozen=True):
    ticket_id: int
    rewards: list[float]
    version_min: int
    version_max: int


class Spans(Message, frozen=True):
    actor: str
    spans: list[Span]
    counters: dict[str, float]


class Notice(Message, frozen=True):
    """Something the person who watches should know; the run goes on."""

    name: str
    text: str


class Failed(Message, frozen=True):
    """An actor cannot go on."""

    name: str
    error: str


class Interrupt(Message, frozen=True):
    """A launcher asks the run to end: stop, write a checkpoint, leave."""

    reason: str


class Lost(Message, frozen=True):
    """A launcher tells of an actor whose process has ended without being asked to."""

    actor: str
    how: str  # in a line for people
    replacement: str = ""  # the actor that is started in its place; "": none
    may_restart: bool = False  # the launcher can start all of the run again, from the last checkpoint


class Stop(Message, frozen=True):
    """End now; the trainer writes its checkpoint first."""

    reason: str


class Stopped(Message, frozen=True):
    name: str


AnyMessage = (
    Ticket
    | Group
    | Supervision
    | Order
    | Hello
    | Claim
    | Claimed
    | Ready
    | Beat
    | Kill
    | ClockAsked
    | ClockTold
    | Welcome
    | Membership
    | DraftEnded
    | Publish
    | Receive
    | Broken
    | Received
    | StepDone
    | Arrived
    | Generated
    | Checkpointed
    | EvalDone
    | Spans
    | Notice
    | Failed
    | Interrupt
    | Lost
    | Stop
    | Stopped
)
