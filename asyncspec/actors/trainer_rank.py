"""The trainer's ranks beyond the first, and how the first leads them.

Rank 0 is the trainer: it alone has an inbox for groups, waits, reports and publishes. Before each collective it sends the others an
order, so that all of them come to the same one; a rank without an order waits. Of groups that have a gradient as many as there are data
ranks are added at once, one in each; a rank for which none is left, or whose group takes fewer passes, adds nothing, and so takes part.

    trainer         add g0 | add g1 | flush      | update | snapshot, publish ...
    orders to 1            | g1     | -          | update | snapshot, gather
    both ranks             | backward of g0, g1  | step   | gather bucket by bucket (in a thread)

A rank that dies ends a collective with an error in the others, or leaves it to its deadline; the whole run is started again from the
last checkpoint, which the others wait for.
"""

from __future__ import annotations

import time
from pathlib import Path

from asyncspec import messages as m
from asyncspec.actors.base import Actor, StopRequested
from asyncspec.deadlines import COLLECTIVE_S, KILLED_S
from asyncspec.rl.learner import Learner
from asyncspec.topology import TRAINER_RANK

NOTHING, UPDATE, SNAPSHOT, GATHER, SAVE, CLEAR, END = "nothing", "update", "snapshot", "gather", "save", "clear", "end"


class PeersLost(RuntimeError):
    """A collective among the trainer's ranks has failed."""


class Team:
    """The trainer's hold of its other ranks."""

    def __init__(self, actor: Actor, learner: Learner) -> None:
        self.actor, self.learner = actor, learner
        self.outboxes: list = []  # to ranks 1, 2, ...
        self.waiting: list[tuple[m.Group, m.Arrays]] = []  # groups with a gradient, fewer than there are data ranks
        self.lost = False

    def connect(self, welcome: m.Welcome) -> None:
        self.outboxes = [self.actor.outbox(f"{TRAINER_RANK}{rank}", welcome) for rank in range(1, self.learner.ranks.size)]

    def add(self, group: m.Group, arrays: m.Arrays):
        """Accumulate a group's gradient, now or with the next ones; returns what `GradientAccumulator.add` does if it was this rank's turn."""
        if not self.learner.accumulator.has_gradient(group):
            return self.learner.accumulator.add(group, arrays)
        self.waiting.append((group, arrays))
        return self.flush() if len(self.waiting) == self.learner.ranks.data_size else None

    def flush(self):
        """Add what waits."""
        if not self.waiting:
            return None
        parts, self.waiting = self.waiting, []
        accumulator = self.learner.accumulator
        counts = [accumulator.passes(*part) for part in parts]
        for rank, outbox in enumerate(self.outboxes, start=1):
            part = rank // self.actor.config.trainer.tensor_parallel
            done = 0
            if part < len(parts):
                outbox.put(*parts[part])
                done = counts[part]
            for _ in range(max(counts) - done):
                outbox.put(m.Order(NOTHING))

        def add():
            forward = accumulator.add(*parts[0])
            for _ in range(max(counts) - counts[0]):
                accumulator.add_nothing()
            return forward

        return self.together(add)

    def update(self) -> dict[str, float]:
        """See `Learner.update`."""
        self.flush()
        self.order(UPDATE)
        return self.together(self.learner.update)

    def clear(self) -> None:
        """Forget the groups of a step that was begun."""
        self.waiting = []
        self.order(CLEAR)
        self.learner.accumulator.clear()

    def snapshot(self):
        """The policy as it is now, in all ranks."""
        self.order(SNAPSHOT)
        return self.learner.snapshot(lambda: self.order(GATHER))

    def save(self, version: int) -> None:
        """Begin a checkpoint."""
        self.order(SAVE, version)
        self.together(lambda: self.learner.save(version))

    def end(self) -> None:
        """Nothing more will come."""
        self.order(END)
        self._sent()

    def order(self, what: str, version: int = -1) -> None:
        for outbox in self.outboxes:
            outbox.put(m.Order(what, version))

    def together(self, act):
        """Do what all ranks do now.

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
            self.actor.log(f"a collective among the trainer's ranks failed: {error}")
            return await_end(self.actor, error)

    def _sent(self) -> None:
        """Until every order has left: nobody would come to a collective whose order waits here for credit."""
        deadline = time.monotonic() + COLLECTIVE_S
        while any(outbox.backlog for outbox in self.outboxes) and time.monotonic() < deadline:
            self.actor.wait(0.005)
            for outbox in self.outboxes:
                outbox.flush()


def await_end(actor: Actor, error: RuntimeError):
    """A rank is gone: give its launcher the time to say so and the controller to end this run for another start; raises PeersLost after it."""
    deadline = time.monotonic() + actor.config.deployment.silent_timeout_s + 2 * KILLED_S
    while time.monotonic() < deadline:
        actor.wait_step(0.05)
    raise PeersLost(f"trainer ranks: {str(error).splitlines()[0]}")


class TrainerRank(Actor):
    role = TRAINER_RANK
    learner_class = Learner

    def __init__(self, spec) -> None:
        super().__init__(spec)
        self.threads = self.config.trainer.threads
        self.learner = self.learner_class(self.config, Path(spec.run_dir), self.device, int(spec.name.removeprefix(TRAINER_RANK)))
        self.step_index, self.ended = max(0, spec.resume), False

    def inbox_credits(self) -> int:
        return 64

    def load(self) -> None:
        self.learner.load()

    def connect(self, welcome: m.Welcome) -> set[str]:
        self.learner.join(welcome.store_host, welcome.store_port, COLLECTIVE_S)
        if self.step_index:
            self.learner.restore(self.step_index)
        return set()

    def turn(self) -> None:
        item = self.inbox.take()
        if item is None:
            self.wait(0.05)
            return
        try:
            self._follow(item[0], item[1])
        except RuntimeError as error:
            self.ended = True
            self.log(f"a collective among the trainer's ranks failed: {error}")
            await_end(self, error)

    def _follow(self, message: m.Message, arrays: m.Arrays) -> None:
        learner = self.learner
        if isinstance(message, m.Group):
            with self.recorder.span("train", message.ticket.step, message.ticket.ticket_id):
                self.fault("work")
                learner.accumulator.add(message, arrays)
        elif message.what == NOTHING:
            learner.accumulator.add_nothing()
        elif message.what == UPDATE:
            try:
                learner.update()
            except FloatingPointError as error:
                self.log(str(error))
        elif message.what == SNAPSHOT:
            self.snapshot = learner.snapshot()
        elif message.what == GATHER:
            self.snapshot.begin()
        elif message.what == SAVE:
            learner.checkpoints.saved(wait=True)
            learner.save(message.version)
        elif message.what == CLEAR:
            learner.accumulator.clear()
        elif message.what == END:
            self.ended = True

    def finish(self) -> None:
        """Take part in what rank 0 still writes."""
        deadline = time.monotonic() + COLLECTIVE_S
        try:
            while not self.ended and time.monotonic() < deadline:
                self.turn()
            self.learner.checkpoints.saved(wait=True)
        except (StopRequested, OSError) as error:  # a rank was lost now; or rank 0 says what is wrong
            self.log(str(error))
