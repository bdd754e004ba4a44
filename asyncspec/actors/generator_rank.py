"""The ranks of a generator beyond the first; see team.py.

Each rank has an engine of its own, which schedules and samples as the others do, as long as it is given the same calls
in the same order. So the first rank sends each ticket, or turn of an episode, that it submits, and an order before each
swap and each step.
Every rank is a member of the broadcast groups. The others report to the first which versions have arrived whole; it
swaps in a version once all ranks have it:

    generator       submit t0, t1 | step | step |            | swap 4 | step ...
    rank 1          submit t0, t1 | step | step | reports 4  | swap 4 | step ...

What a rank's engine returns is discarded: the first rank has the same.
"""

from __future__ import annotations

from asyncspec.actors.engine_holder import EngineHolder
from asyncspec.actors.team import Follower
from asyncspec.config.topology import GENERATOR_RANK
from asyncspec.wire import messages as m
from asyncspec.wire.transport import Outbox

# The first rank's orders: do a step; propose so many tokens in all further steps; keep the policy, though there is a
# newer one; forget a conversation; swap in a version.
STEP, LENGTH, HOLD, FORGET = "step", "draft length", "hold", "forget"
SWAP = {"policy": "swap policy", "draft": "swap draft"}
_KINDS = {order: kind for kind, order in SWAP.items()}


class RanksDiffer(Exception):
    """The ranks of a generator have sampled different tokens."""


class GeneratorRank(EngineHolder, Follower):
    """A rank of a generator that follows the first."""

    role = GENERATOR_RANK
    takes = (m.Ticket, m.Turn, m.Order)

    def __init__(self, spec) -> None:
        super().__init__(spec)
        self.to_leader: Outbox | None = None  # set by `connect`

    def connect(self, welcome: m.Welcome) -> set[str]:
        self.to_leader = self.outbox(self.leader, welcome)
        return super().connect(welcome)

    def handle(self, message: m.Message) -> None:
        if isinstance(message, m.DraftEnded):
            self.using.pop("draft", None)  # the first rank may still order a version that has arrived
        else:
            super().handle(message)

    def turn(self) -> None:
        for message in self.tell_received():
            self.to_leader.put(message)
        self.receivers["policy"].check()
        super().turn()

    def follow(self, message: m.Message, arrays: m.Arrays) -> None:
        if isinstance(message, m.Ticket):
            self.submit(message)
        elif isinstance(message, m.Turn):
            self.submit_turn(message)
        elif message.what == STEP:
            if message.number != self.sampled:
                raise RanksDiffer(f"{self.name} has sampled other tokens than {self.leader}")
            self.fault("work")
            self.poll()
        elif message.what == LENGTH:
            self.engine.follow(message.number)
        elif message.what == FORGET:
            self.engine.forget(message.number)
        elif message.what == HOLD:
            self.receivers["policy"].drop_before(message.number)
            self.using.pop("policy", None)
        elif (kind := _KINDS.get(message.what)) is not None:
            self.swap(kind, *self.receivers[kind].take(message.number))
