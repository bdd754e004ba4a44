"""A team: several ranks of the trainer, or of a logprob actor, that hold one model together; the first leads them.

The leading rank alone has an inbox for groups, waits, decides and reports. Before each collective it sends the others
an order, so that all ranks come to the same one; a rank without an order waits. Each data rank gets one group at a
time. A rank that has no group, or whose group takes fewer passes, makes passes over nothing, and so takes part.

    leader          deal g0, g1           | deal g2         | update, or collect
    orders to 1     g1                    | nothing         | update, or collect
    both ranks      passes over g0, g1    | passes over g2  | step, or sum

When a rank dies, the collective fails in the others at once or at its deadline. They wait for the whole run to be
started again from the last checkpoint.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable

from asyncspec.errors import first_line
from asyncspec.actors.base import Actor, first_name
from asyncspec.config import topology
from asyncspec.deadlines import COLLECTIVE_S, KILLED_S
from asyncspec.models.parallel import Ranks
from asyncspec.wire import messages as m
from asyncspec.wire.transport import Outbox

NOTHING, END = "nothing", "end"  # orders that all teams have


class PeersLost(RuntimeError):
    """A collective among the ranks has failed."""


class Team:
    """The leading rank's means to lead the others."""

    def __init__(self, actor: Actor, ranks: Ranks) -> None:
        self.actor, self.ranks = actor, ranks
        self.outboxes: list[Outbox] = []  # to ranks 1, 2, ...
        self.lost = False

    def connect(self, welcome: m.Welcome) -> None:
        _, *others = topology.rank_names(first_name(self.actor.name), self.ranks.size)
        self.outboxes = [self.actor.outbox(name, welcome) for name in others]

    def deal(self, parts: list[tuple[m.Group, m.Arrays]], worker):
        """Have each data rank add a group of its own; returns what the worker's `add` returns for this rank's group, the
        first.

        Args:
            parts: no more than there are data ranks.
            worker: has `passes` (how many a group takes), `add` and `add_nothing`; the other ranks have one too.
        """
        counts = [worker.passes(*part) for part in parts]
        for rank, outbox in enumerate(self.outboxes, start=1):
            part = rank // self.ranks.tensor_parallel
            done = 0
            if part < len(parts):
                outbox.put(*parts[part])
                done = counts[part]
            if done < max(counts):
                outbox.put(m.Order(NOTHING, max(counts) - done))

        def add():
            result = worker.add(*parts[0])
            for _ in range(max(counts) - counts[0]):
                worker.add_nothing()
            return result

        return self.together(add)

    def end(self) -> None:
        """Nothing more will come."""
        self.order(END)
        self._sent()

    def order(self, what: str, number: int = -1) -> None:
        for outbox in self.outboxes:
            outbox.put(m.Order(what, number))

    def together(self, act: Callable):
        """Call `act`, which all ranks call now.

        Raises:
            PeersLost: a rank is gone, and nobody has ended the run for it.
        """
        self._sent()
        try:
            return act()
        except RuntimeError as error:
            if not self.outboxes:
                raise
            self.lost = True
            return await_end(self.actor, error)

    def _sent(self) -> None:
        """Wait until every order has left: nobody would come to a collective whose order waits here for credit."""
        deadline = time.monotonic() + COLLECTIVE_S
        while any(outbox.backlog for outbox in self.outboxes) and time.monotonic() < deadline:
            self.actor.wait(0.005)
            for outbox in self.outboxes:
                outbox.flush()


def await_end(actor: Actor, error: RuntimeError):
    """Wait for the run to end, because a rank is gone: its launcher has to say so first.

    Raises:
        PeersLost: the run has not ended in time.
    """
    actor.log(f"a collective among the ranks failed: {error}")
    deadline = time.monotonic() + actor.config.deployment.silent_timeout_s + 2 * KILLED_S
    while time.monotonic() < deadline:
        actor.wait_step(0.05)
    raise PeersLost(f"ranks of {topology.rank_of(first_name(actor.name))[0]}: {first_line(error)}")


class Follower(Actor):
    """A rank beyond the first: it does as the leading one says."""

    takes = (m.Group, m.Order)

    def __init__(self, spec) -> None:
        super().__init__(spec)
        self.leader, self.rank = topology.rank_of(spec.name)
        self.ended, self.ordered = False, 0.0  # and when it was last told to do something

    def inbox_credits(self) -> int:
        return 64

    @abstractmethod
    def follow(self, message: m.Message, arrays: m.Arrays) -> None:
        """Do what a group or an order asks for."""

    def turn(self) -> None:
        item = self.inbox.take()
        if item is None:
            self.wait(0.05)
            return
        self.ordered = time.monotonic()
        if isinstance(item[0], m.Order) and item[0].what == END:
            self.ended = True
            return
        try:
            self.follow(item[0], item[1])
        except RuntimeError as error:
            self.ended = True
            await_end(self, error)

    def follow_to_the_end(self, patience_s: float) -> None:
        """Take part in what the leading rank has begun.

        Args:
            patience_s: how long to wait for an order before the leading rank counts as gone.
        """
        self.ordered = time.monotonic()
        while not self.ended and time.monotonic() - self.ordered < patience_s:
            self.turn()
