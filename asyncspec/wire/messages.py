"""The messages between actors: msgspec structs; tensors travel beside them as named numpy arrays.

`AnyMessage`, at the end, is the union of all messages; codec.py turns them into frames and back. Times are in seconds
of the run's clock (clock.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from asyncspec.wire.facts import TRY_IDS, GroupRecord, Phase, Span, ToolUse, Wait
from asyncspec.wire.shown import Shown

Arrays = dict[str, np.ndarray]


class Message(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """The base of all messages."""


# --- data: the messages on a rollout's way ----------------------------------------------------------------------------


class Ticket(Message, frozen=True):
    """The permission to generate one group. It is issued for a step only once version step - lag is published."""

    ticket_id: int
    step: int  # the step that trains on the group, and turns version `step` into `step + 1`
    min_version: int  # no token may be sampled by an older version
    prompt: str
    answer: str
    prompt_tokens: list[int]
    seeds: list[int]  # one per sample
    issued: float
    row: str = ""  # the row of the data file as JSON, see tasks.problem
    evaluation: bool = False  # the group is rewarded and reported, but never trained on
    eval_set: str = ""  # the set of held-out prompts, see tasks.problem
    lost: float = 0.0  # when the ticket was issued to a generator that died; 0: never
    shown: bool = False  # the rollouts are reported in full, for people to read
    asked: float = 0.0  # when the first ticket of this place was issued; 0: this one is the first

    @property
    def place(self) -> int:
        """The place of a training ticket's group in the order of the run. The tickets that rl.dynamic_sampling issues
        for one place, one after the other, share it.
        """
        return self.ticket_id % TRY_IDS


class Turn(Message, frozen=True):
    """The leading rank of a generator has submitted a turn of an episode; see engine.protocol.Request."""

    request_id: int
    prompt_tokens: list[int]
    seeds: list[int]
    max_response_tokens: int
    follows: int = -1  # -1: it is the first turn


class Group(Message, frozen=True):
    """All samples of one prompt.

    Arrays, concatenated over the G samples, T tokens in all: tokens int32 [T]; behavior float32 [T], the tokens'
    logprobs when they were sampled; versions int32 [T]; lengths int32 [G]. After logprob also proximal float32 [T] and,
    with a KL term, reference float32 [T].

    With an environment also loss_mask uint8 [T]: 1 for a token that the policy sampled, 0 for one that the environment
    wrote. Such a token has the version -1 and a behavior of 0, and its other logprobs mean nothing.

    With rl.routing_replay also experts [T, M, K] and prompt_experts [P, M, K], uint8 or int16: the K experts in each of
    M layers to which the generator sent each token of the responses and of the prompt. Those of a response's last
    token, which it did not have to compute, mean nothing.
    """

    ticket: Ticket
    generator: str
    rewards: list[float]
    truncated: list[bool]  # whether the length limit ended each sample
    verifications: int
    proposed: int
    accepted: int
    draft_version: int
    phases: list[Phase]
    proximal_version: int = -1
    reached_at: list[int] = []  # by position, as in engine.protocol.Completion
    accepted_at: list[int] = []
    turns: int = 0  # that the policy had, all samples together; 0: one each
    tools: dict[str, ToolUse] = {}


class Pass(Message, frozen=True):
    """One pass of a trainer's rank: prompts with some of their responses; without any, it only takes part.

    Arrays, of all responses in order: as in `Group`, and advantages float32 with one entry for each response.
    """

    step: int
    prompts: list[list[int]] = []
    responses: list[int] = []  # number of responses of each prompt
    last: bool = True  # whether this is a step's last pass


class Supervision(Message, frozen=True):
    """One group's training data for the draft. Arrays: see `drafts.supervision.pack`."""

    ticket_id: int
    policy_version: int


class Order(Message, frozen=True):
    """The leading rank of a trainer or logprob actor tells the other ranks what all do next; see actors/team.py."""

    what: str
    number: int = -1  # a version or a count, depending on `what`


# --- control: between every actor and the controller ------------------------------------------------------------------


class Hello(Message, frozen=True):
    """An actor is up. `address` is its inbox's; `device` is what it computes on: cpu, or a unique name of its GPU."""

    name: str
    address: str
    device: str


class Claim(Message, frozen=True):
    """A node that has started by itself asks under which names its actors may join the run."""

    names: list[str]


class Claimed(Message, frozen=True):
    """The answer to `Claim`: the granted names, in the same order, or a refusal."""

    names: list[str]
    refused: str = ""  # the reason of a refusal, in one line; "": the names are granted


class Connected(Message, frozen=True):
    """A rank of a generator has started its engine with the other ranks, and can join its broadcast groups."""

    name: str


class Ready(Message, frozen=True):
    """An actor has loaded what it needs and joined its broadcast groups."""

    name: str


class ClockAsked(Message, frozen=True):
    """An actor asks for the controller's time. `sent` comes back in the answer."""

    sent: float


class ClockTold(Message, frozen=True):
    """The answer to `ClockAsked`."""

    sent: float
    time: float
    host: str  # the controller's host, from clock.host


class Whole(msgspec.Struct, frozen=True, array_like=True):
    """A version of weights that was sent, or has arrived, whole."""

    version: int
    checksum: int  # of its bytes, see wire/layout.py


class Beat(Message, frozen=True):
    """A heartbeat: the sender's process lives. It comes from its own thread, so that it also comes during long work."""

    name: str
    turn_s: float = 0.0  # seconds that the current turn of the sender's main loop has taken
    using: dict[str, int] = {}  # kind of weights -> the version that the sender uses
    whole: dict[str, Whole] = {}  # kind of weights -> the newest version that the sender has sent or received whole


class Kill(Message, frozen=True):
    """The controller has an actor killed, for example a frozen one, by the launcher that started it."""

    name: str
    reason: str


class Dismiss(Message, frozen=True):
    """The run continues without an actor. The launcher that started it does not replace it."""

    name: str


class Welcome(Message, frozen=True):
    """The inboxes that an actor may send to, and the store where broadcast groups meet. When some of the inboxes have
    changed, it is sent again with these alone.
    """

    addresses: dict[str, str]  # by the actor's first name
    store_host: str
    store_port: int
    versions: dict[str, int]  # the newest published version of each kind


class Membership(Message, frozen=True):
    """The members of a broadcast group in one epoch. The first member sends; the others receive.

    With `since`, only what has changed since that epoch: who has `left`, and the `members` that have come. They stand
    behind those that stayed.
    """

    kind: str  # policy or draft
    epoch: int
    members: list[str]  # all of them; with `since` those that have come
    backend: str  # nccl or gloo
    catch_up: bool = False  # a second group of the epoch: the sender, and the members that lack its newest version
    since: int = 0
    left: list[str] = []

    def whole(self, before: Sequence[str]) -> list[str]:
        """Return all members.

        Args:
            before: the members in the epoch `since`.
        """
        left = set(self.left)
        return [*(name for name in before if name not in left), *self.members] if self.since else self.members


class DraftEnded(Message, frozen=True):
    """The draft adapter is gone for good. The draft stays as it is; supervision need not be sent any more."""


class Publish(Message, frozen=True):
    """The first bucket of a version is ready, and its broadcast begins."""

    kind: str
    version: int
    policy_version: int = -1  # of a draft: the policy version that it was last trained for
    expected: float = -1.0  # of a draft: the acceptance rate of a first proposal in its last training; -1: not known
    epoch: int = 1
    catch_up: bool = False  # as in `Membership`


class Receive(Message, frozen=True):
    """The controller asks the receivers to take part in the broadcast of a version."""

    kind: str
    version: int
    epoch: int
    catch_up: bool = False  # as in `Membership`


class Broken(Message, frozen=True):
    """A broadcast failed in this member, so its group needs a new epoch."""

    name: str
    kind: str
    epoch: int
    error: str


class Received(Message, frozen=True):
    """A version is complete in a receiver, which can take it into use from now on."""

    name: str
    kind: str
    version: int


class Unused(Message, frozen=True):
    """A generator has made a group without signal, which rl.dynamic_sampling keeps from training."""

    record: GroupRecord


class LeftOut(Message, frozen=True):
    """The trainer need not wait for the group of a place: it is left out of its step."""

    place: int
    ticket_id: int  # of the last group that was generated for it


class StepDone(Message, frozen=True):
    """The trainer has finished a step: version `step` became `step + 1`, with the same weights if it was skipped."""

    step: int
    start: float
    end: float
    waits: list[Wait]
    busy: dict[str, float]  # seconds spent in each part: data, train, prepare
    stats: dict[str, float]
    groups: list[GroupRecord]
    skipped: str = ""  # why the update was skipped; "": it was not
    unused: list[GroupRecord] = []  # groups without signal that were generated for the step; the controller knows them
    shown: list[Shown] = []  # the groups whose tickets ask for it


class Arrived(Message, frozen=True):
    """A group has arrived at the trainer."""

    ticket_id: int


class Checkpointed(Message, frozen=True):
    """A checkpoint that the run can resume from is complete, or was given up."""

    version: int
    failed: bool = False


class Generated(Message, frozen=True):
    """A group has left its generator, which has room for another."""

    ticket_id: int
    checksum: int = 0  # see facts.py


class EvalDone(Message, frozen=True):
    """All rollouts of an evaluation ticket have their rewards."""

    ticket_id: int
    rewards: list[float | None]  # None: it failed, or does not apply
    version_min: int
    version_max: int
    shown: Shown | None = None  # if the ticket asks for it


class Spans(Message, frozen=True):
    """An actor's spans since its last report, and the latest values of its counters."""

    actor: str
    spans: list[Span]
    counters: dict[str, float]


class Notice(Message, frozen=True):
    """A line for the console: something the user should know. The run continues."""

    name: str
    text: str


class Failed(Message, frozen=True):
    """An exception was raised in an actor, which ends."""

    name: str
    error: str
    mistake: bool = False  # a user has to correct something: the same would happen again


class Interrupt(Message, frozen=True):
    """A launcher asks the run to stop early, with a checkpoint."""

    reason: str


class Lost(Message, frozen=True):
    """A launcher reports an actor whose process has ended although nobody asked it to."""

    actor: str
    how: str  # what happened, in one line for people
    replacement: str = ""  # the actor that the launcher starts in its place; "": none
    may_restart: bool = False  # whether the launcher can restart the whole run from the last checkpoint


class Stop(Message, frozen=True):
    """The controller asks an actor to end now. The trainer writes its checkpoint first."""

    reason: str


class Stopped(Message, frozen=True):
    """An actor has done its last work and ends."""

    name: str


AnyMessage = (
    Ticket
    | Turn
    | Group
    | Pass
    | Supervision
    | Order
    | Hello
    | Claim
    | Claimed
    | Connected
    | Ready
    | Beat
    | Kill
    | Dismiss
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
    | Unused
    | LeftOut
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
