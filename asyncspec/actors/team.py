"""A team: several ranks of the trainer, of a logprob actor, or of a generator, that hold one model together. The first
rank leads.

Only the leading rank receives groups from other actors, waits for them, decides and reports. Before each collective it
sends an order to the other ranks, so that all ranks enter the same one. A rank without an order waits. Every rank must
take part in each pass, so a rank that has nothing to do makes an empty one. Trainer ranks get packed passes
(trainer.py), generator ranks get tickets (generator_rank.py); each data rank of logprob gets one group at a time:

    leader          deal g0, g1           | deal g2         | collect
    orders to 1     g1                    | nothing         | collect
    both ranks      passes over g0, g1    | passes over g2  | sum

When a rank dies, the collective fails in the others, at once or at its deadline. They then wait until the whole run is
restarted from the last checkpoint.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable

from asyncspec.actors.base import Actor, StopRequested, first_name
from asyncspec.config import topology
from asyncspec.deadlines import COLLECTIVE_S, KILLED_S
from asyncspec.errors import first_line
from asyncspec.models.parallel import Ranks
from asyncspec.wire import messages as m
from asyncspec.wire.transport import Outbox

NOTHING, END = "nothing", "end"  # orders that every team has


class PeersLost(RuntimeError):
    """A collective among the ranks failed, and the run did not end in time."""


class Team:
    """The leading rank's side of a team: sends orders and groups to the other ranks."""

    def __init__(self, actor: Actor, ranks: Ranks) -> None:
        self.actor, self.ranks = actor, ranks
        self.outboxes: list[Outbox] = []  # to ranks 1, 2, ...
        self.lost = False

    def connect(self, welcome: m.Welcome) -> None:
        _, *others = topology.rank_names(first_name(self.actor.name), self.ranks.size)
        self.outboxes = [self.actor.outbox(name, welcome) for name in others]

    def deal(self, parts: list[tuple[m.Group, m.Arrays]], worker):
        """Have each data rank add one group. This rank adds the first; return what the worker's `add` returns for it.

        Args:
            parts: the groups, at most as many as there are data ranks.
            worker: has `passes` (how many a group takes), `add` and `add_nothing`. Each other rank has its own.
        """
        counts = [worker.passes(*part) for part in parts]
        for rank, outbox in enumerate(self.outboxes, start=1):
            part = rank // self.ranks.sharing
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
        """Tell the other ranks that no more orders will come."""
        self.order(END)
        self._sent()

    def order(self, what: str, number: int = -1) -> None:
        self.tell(m.Order(what, number))

    def tell(self, message: m.Message) -> None:
        """Send a message to every other rank."""
        for outbox in self.outboxes:
            outbox.put(message)

    def together(self, act: Callable):
        """Call `act`, which the other ranks call too by the order sent before. Return its result.

        Raises:
            PeersLost: a rank is gone, and the run was not ended in time.
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
        """Wait until every order has left. A rank cannot enter a collective while its order waits here for credit."""
        deadline = time.monotonic() + COLLECTIVE_S
        while any(outbox.backlog for outbox in self.outboxes) and time.monotonic() < deadline:
            self.actor.wait(0.005)
            for outbox in self.outboxes:
                outbox.flush()


def await_end(actor: Actor, error: RuntimeError):
    """Wait for the run to end after a rank was lost. The rank's launcher has to report the loss first.

    Raises:
        StopRequested: the run has ended.
        PeersLost: the run has not ended in time.
    """
    actor.log(f"a collective among the ranks failed: {error}")
    deadline = time.monotonic() + actor.config.deployment.silent_timeout_s + 2 * KILLED_S
    while time.monotonic() < deadline:
        actor.wait_step(0.05)
    raise PeersLost(
        f"a collective among the ranks of {topology.rank_of(first_name(actor.name))[0]} failed: {first_line(error)}"
    )


class Follower(Actor):
    """A rank beyond the first. It does what the leading rank orders."""

    takes = (m.Group, m.Order)

    def __init__(self, spec) -> None:
        super().__init__(spec)
        self.leader, self.rank = topology.rank_of(first_name(spec.name))
        self.ended, self.ordered = False, 0.0  # and when the last order arrived

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

    def finish(self) -> None:
        """Take part in what the leading rank has begun."""
        if not self.workers:  # it was stopped before it knew the leading rank
            return
        try:
            self.follow_to_the_end(KILLED_S)
        except StopRequested as stopped:  # a rank was lost meanwhile
            self.log(str(stopped))

    def follow_to_the_end(self, patience_s: float) -> None:
        """Keep following orders until the leading rank ends the team.

        Args:
            patience_s: seconds to wait for an order before the leading rank counts as gone.
        """
        self.ordered = time.monotonic()
        while not self.ended and time.monotonic() - self.ordered < patience_s:
            self.turn()
