"""What travels between actors: msgspec structs, with raw tensor frames beside them.

Nothing executable is on the wire: a message is a tagged struct from the union below, encoded as MessagePack; tensors
follow as raw frames, described by name, dtype and shape. Times are seconds of the run's clock (clock.py).
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

WIRE_VERSION = 5
MAX_DIMENSIONS = 8
MAX_MESSAGE_BYTES = 1 << 30
MAX_CONTROL_BYTES = 64 << 20  # of a frame on the control channel
_DTYPES = {"float32", "float16", "int32", "int64", "uint8", "bool"}

Arrays = dict[str, np.ndarray]


class WireError(ValueError):
    """Frames that are not a message of ours."""


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
    """A broadcast group of one epoch. The first member sends; the others receive. Without members: it is no more."""

    kind: str  # policy or draft
    epoch: int
    members: list[str]
    backend: str  # nccl or gloo


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
    """A launcher asks the run to end: stop, write a checkpoint, leave. Or it tells of an actor whose process died."""

    reason: str
    lost: str = ""  # the actor that died
    replacement: str = ""  # the one that is started in its place: the run goes on
    may_restart: bool = False  # the launcher can start all of it again, from the last checkpoint


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
    | Stop
    | Stopped
)


class _ArraySpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: tuple[int, ...]


class _Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    wire: int
    body: AnyMessage
    arrays: tuple[_ArraySpec, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Envelope)


def encode(body: Message, arrays: Arrays | None = None) -> list:
    """Frames of a message: one header, then one buffer an array.

    Raises:
        WireError: it is larger than a receiver would accept.
    """
    kept = {name: np.asarray(array, order="C") for name, array in (arrays or {}).items()}
    if (size := sum(array.nbytes for array in kept.values())) > MAX_MESSAGE_BYTES:
        raise WireError(f"{type(body).__name__} with {size} bytes of tensors: expected at most {MAX_MESSAGE_BYTES}")
    specs = tuple(_ArraySpec(name, array.dtype.name, array.shape) for name, array in kept.items())
    return [
        _encoder.encode(_Envelope(WIRE_VERSION, body, specs)),
        *(a.reshape(-1).view(np.uint8).data for a in kept.values()),
    ]


def decode(frames: list) -> tuple[Message, Arrays]:
    """The message and arrays of `frames`.

    Raises:
        WireError: anything that `encode` does not produce: another wire version, an unknown type, sizes that disagree.
    """
    if not frames or sum(len(f) for f in frames) > MAX_MESSAGE_BYTES:
        raise WireError(f"{len(frames)} frames, more than {MAX_MESSAGE_BYTES} bytes or none")
    try:
        envelope = _decoder.decode(frames[0])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"header: {error}") from None
    if envelope.wire != WIRE_VERSION:
        raise WireError(f"wire version {envelope.wire}: expected {WIRE_VERSION}")
    if len(envelope.arrays) != len(frames) - 1:
        raise WireError(f"{len(frames) - 1} tensor frames: the header lists {len(envelope.arrays)}")
    arrays: Arrays = {}
    for spec, frame in zip(envelope.arrays, frames[1:]):
        sides_valid = len(spec.shape) <= MAX_DIMENSIONS and all(0 <= side <= MAX_MESSAGE_BYTES for side in spec.shape)
        if spec.dtype not in _DTYPES or not sides_valid or spec.name in arrays:
            raise WireError(f"tensor {spec.name!r}: dtype {spec.dtype!r}, shape {spec.shape}, or a name given twice")
        dtype = np.dtype(spec.dtype)
        if math.prod(spec.shape) * dtype.itemsize != len(frame):
            raise WireError(f"tensor {spec.name!r}: {len(frame)} bytes do not fill {spec.shape} of {spec.dtype}")
        try:
            arrays[spec.name] = np.frombuffer(frame, dtype).reshape(spec.shape)
        except ValueError as error:  # an empty one whose other sides multiply to too much
            raise WireError(f"tensor {spec.name!r}: shape {spec.shape}: {error}") from None
    return envelope.body, arrays
