"""A run's pipeline as events: admission, queues, order, publication and swaps, by the rules of the real actors.

- a step's tickets are issued when the policy clock admits them; the least loaded generator gets the next one, until
  each has samples for two engines;
- a generator holds a ticket back until it has the version that the ticket requires;
- a group gets its rewards, then its logprob actor takes it, one after the other;
- the trainer takes groups in ticket order, runs a pass when enough tokens are there, updates, and publishes.

Generation, exposed time, stragglers and lag come out; only the work of each piece goes in, as seconds that it takes
alone. Actors that share a host's cores slow one another down: n busy ones on c cores each run at min(1, c / n), or a
little slower, since schedulers leave a core idle at times. The draft adapter runs at a low priority, so it gets little
beyond what the others leave.

    step 0: tickets -> generators -> rewards -> logprob -> trainer: pass, pass, update -> version 1 -> step 1 + lag
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from asyncspec.lag import PolicyClock
from asyncspec.simulate.replica import Replica, RoundCosts
from asyncspec.simulate.workers import Generator, Queue, Worker

LOW_PRIORITY = 0.1  # of a core's time that a process of priority 10 gets beside a usual one
PARTS = ("prepare", "exposed_generation", "exposed_reward", "exposed_logprob", "train")


class Group(NamedTuple):
    """The work of a group.

    tokens, accept: float, of each response: its length and its acceptance rate.
    prompt: positions of the prompt.
    reward_s: seconds from the end of generation until the rewards are known; no core works on them.
    logprob_s: seconds of work.
    trained: tokens that the trainer passes over; 0 without a gradient.
    train_s: seconds of the trainer's work on them.
    """

    tokens: Sequence[float]
    accept: Sequence[float]
    prompt: float
    reward_s: float
    logprob_s: float
    trained: float = 0.0
    train_s: float = 0.0


@dataclass(frozen=True)
class Pipeline:
    """A pipeline's sizes and the seconds of its pieces of work."""

    lag: int
    generators: int
    slots: int
    costs: RoundCosts  # of the generators' rounds
    logprobs: int = 1
    swap_s: float = 0.0  # a generator's work to swap weights
    enter_s: float = 0.0  # its work to give a sequence a slot
    finish_s: float = 0.0  # its work on a group that is done
    delivery_s: float = 0.0  # from a publication until readers have the version; no core works on it
    pass_tokens: float = 0.0  # tokens of a pass; 0: one pass for each group
    pass_s: float = 0.0  # the trainer's work for a pass besides that for its tokens
    group_s: float = 0.0  # to take a group
    update_s: float = 0.0  # to update and publish
    adapted: int = 0  # groups of a step that the draft adapter learns from
    adapt_s: float = 0.0  # its work for each
    control_s: float = 0.0  # the controller's work for each group
    cores: float | None = None  # that all actors share; None: each has its own
    sharing: float = 1.0  # the share of the cores' time that is left by each busy actor beyond their number


@dataclass
class Step:
    """What came out for a step: seconds, and the oldest version of each group's tokens."""

    end: float = 0.0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    oldest: list[int] = field(default_factory=list)


class _Ticket:
    __slots__ = ("step", "place", "group", "min_version", "issued", "admitted", "generated", "rewarded", "scored")

    def __init__(self, step: int, place: int, group: Group, min_version: int, issued: float) -> None:
        self.step, self.place, self.group, self.min_version, self.issued = step, place, group, min_version, issued
        self.admitted = self.generated = self.rewarded = self.scored = np.inf


class Simulation:
    """One run of a pipeline."""

    def __init__(self, pipeline: Pipeline, steps: Sequence[Sequence[Group]]) -> None:
        """
        Args:
            steps: the groups of each step.
        """
        self.pipeline, self.groups = pipeline, steps
        self.clock, self.now, self.next_step = PolicyClock(pipeline.lag), 0.0, 0
        self.steps = [Step() for _ in steps]
        self.events: list[tuple[float, int, Callable, object]] = []
        self._sequence = 0
        self.tickets: dict[int, _Ticket] = {}
        self.pending: deque[int] = deque()
        self.generators = [
            Generator(Replica(pipeline.slots, pipeline.costs), self._generated_by(i))
            for i in range(pipeline.generators)
        ]
        self.loads = [(0, i) for i in range(pipeline.generators)]
        self.logprobs = [Queue(self._scored) for _ in range(pipeline.logprobs)]
        self.trainer, self.adapter, self.controller = (
            Queue(done) for done in (self._worked, lambda what: None, lambda what: None)
        )
        self.working: dict[Worker, None] = {}  # those that share cores and are at work
        self.step, self.place, self.free = 0, 0, 0.0
        self.pool, self.pool_s = 0.0, 0.0  # tokens that wait for a pass, and the work on them
        self._first = 0  # the name of the first ticket of the step that is trained
        self.offered = [0] * len(steps)
        self._names = 0

    def run(self) -> list[Step]:
        """Return what came out for each step."""
        self._issue()
        while self.events and self.step < len(self.groups):
            self.now, _, call, argument = heapq.heappop(self.events)
            call(argument)
        return self.steps

    # Time.

    def _later(self, at: float, call: Callable, argument: object = None) -> None:
        self._sequence += 1
        heapq.heappush(self.events, (at, self._sequence, call, argument))

    def _settle(self, worker: Worker) -> None:
        """Let the work pass that a worker did since it was last looked at."""
        if worker.active and self.now > worker.at:
            worker.spend((self.now - worker.at) * worker.rate)
        worker.at = self.now

    def _plan(self, worker: Worker) -> None:
        """Plan a worker's next event, after something changed for it. It must be settled."""
        left = worker.left()
        active = left < np.inf
        if active != worker.active:
            worker.active = active
            if self.pipeline.cores is not None:
                self._share(worker)
        worker.stamp += 1
        if active:
            self._later(self.now + left / worker.rate, self._happen, (worker, worker.stamp))

    def _share(self, worker: Worker) -> None:
        """Share the cores with a worker that began or stopped to work."""
        if worker.active:
            self.working[worker] = None
        else:
            del self.working[worker]
        low, cores = self.adapter in self.working, self.pipeline.cores
        busy = len(self.working) - low
        cores *= self.pipeline.sharing ** max(0.0, len(self.working) - cores)
        rate = min(1.0, cores / max(1.0, busy + LOW_PRIORITY * low))
        left = min(1.0, max(cores - busy * rate, 1e-6))
        for other in self.working:
            now = left if other is self.adapter else rate
            if other is worker:
                worker.rate = now
            elif now != other.rate:
                self._settle(other)
                other.rate, other.stamp = now, other.stamp + 1
                self._later(self.now + other.left() / now, self._happen, (other, other.stamp))

    def _happen(self, planned: tuple[Worker, int]) -> None:
        worker, stamp = planned
        if stamp == worker.stamp:
            worker.at = self.now
            worker.happen()
            self._plan(worker)

    # The controller.

    def _issue(self, _=None) -> None:
        """Issue the tickets that the clock admits."""
        while self.next_step < len(self.groups) and self.clock.may_issue(self.next_step):
            step, first = self.next_step, self._names
            for place, group in enumerate(self.groups[step]):
                self.tickets[first + place] = _Ticket(step, place, group, self.clock.min_version(step), self.now)
                self.pending.append(first + place)
            self._names = first + len(self.groups[step])
            self.next_step += 1
        self._dispatch()

    def _dispatch(self) -> None:
        changed = set()
        while self.pending:
            while self.loads[0][0] != self.generators[self.loads[0][1]].load:  # an entry that is out of date
                heapq.heappop(self.loads)
            load, least = self.loads[0]
            if load >= 2 * self.pipeline.slots:
                break
            name = self.pending.popleft()
            generator, ticket = self.generators[least], self.tickets[name]
            generator.load += len(ticket.group.tokens)
            heapq.heapreplace(self.loads, (generator.load, least))
            generator.held.append((name, ticket))
            changed.add(least)
        for index in changed:
            self._admit(self.generators[index])

    # Generators.

    def _admit(self, generator: Generator, settled: bool = False) -> None:
        ready = bool(generator.held) and generator.held[0][1].min_version <= generator.replica.version
        if not ready:
            return
        if not settled:
            self._settle(generator)
        while generator.held and generator.held[0][1].min_version <= generator.replica.version:
            name, ticket = generator.held.popleft()
            ticket.admitted = self.now
            generator.pause += self.pipeline.enter_s * len(ticket.group.tokens)
            generator.replica.submit(name, ticket.group.tokens, ticket.group.accept, ticket.group.prompt)
        self._plan(generator)

    def _generated_by(self, index: int) -> Callable[[int, int], None]:
        def generated(name: int, oldest: int) -> None:
            generator, ticket = self.generators[index], self.tickets[name]
            ticket.generated = self.now
            generator.pause += self.pipeline.finish_s
            if self.pipeline.control_s:
                self._settle(self.controller)
                self.controller.put(self.pipeline.control_s, name)
                self._plan(self.controller)
            generator.load -= len(ticket.group.tokens)
            heapq.heappush(self.loads, (generator.load, index))
            self.steps[ticket.step].oldest.append(oldest)
            self._later(self.now + ticket.group.reward_s, self._rewarded, name)
            if self.pending:
                self._dispatch()

        return generated

    def _rewarded(self, name: int) -> None:
        ticket = self.tickets[name]
        ticket.rewarded = self.now
        actor = self.logprobs[name % len(self.logprobs)]
        self._settle(actor)
        actor.put(ticket.group.logprob_s, name)
        self._plan(actor)

    def _scored(self, name: int) -> None:
        ticket = self.tickets[name]
        ticket.scored = self.now
        if self.offered[ticket.step] < self.pipeline.adapted and not self.adapter.pieces:
            self.offered[ticket.step] += 1
            self._settle(self.adapter)
            self.adapter.put(self.pipeline.adapt_s, name)
            self._plan(self.adapter)
        self._train()

    # The trainer.

    def _train(self) -> None:
        """Take the groups that are there, in order, unless the trainer is at work."""
        p = self.pipeline
        while not self.trainer.pieces and self.step < len(self.groups):
            groups = self.groups[self.step]
            if self.place < len(groups):
                ticket = self.tickets[self._first + self.place]
                if ticket.scored == np.inf:
                    return
                self._charge(ticket)
                self.place += 1
                del self.tickets[self._first + self.place - 1]
                self.pool += ticket.group.trained
                self.pool_s += ticket.group.train_s
                work = p.group_s
                while self.pool and self.pool >= p.pass_tokens:
                    work += self._pass(min(1.0, p.pass_tokens / self.pool) or 1.0)
                if work:
                    self._work(work, False)
                else:
                    self.free = max(self.free, self.now)
            else:
                self._work(p.update_s + self._pass(1.0), True)

    def _pass(self, share: float) -> float:
        """Take a share of the waiting tokens into a pass; return its work."""
        work, left = self.pool_s * share, 1 - share
        took = self.pipeline.pass_s + work if self.pool else 0.0
        self.pool, self.pool_s = left * self.pool, left * self.pool_s
        return took

    def _work(self, work: float, ends: bool) -> None:
        self._settle(self.trainer)
        self.trainer.put(work, (self.now, ends))
        self._plan(self.trainer)

    def _worked(self, what: tuple[float, bool]) -> None:
        began, ends = what
        step = self.steps[self.step]
        step.parts["train"] += self.now - began
        self.free = self.now
        if ends:
            step.end = self.now
            self._first += len(self.groups[self.step])
            self.step, self.place = self.step + 1, 0
            self.clock.publish(self.step)
            self._later(self.now + self.pipeline.delivery_s, self._deliver, self.step)
            self._issue()
        self._later(self.now, lambda _: self._train())

    def _charge(self, ticket: _Ticket) -> None:
        """Charge the trainer's wait for a group to what the group was doing."""
        parts, at = self.steps[self.step].parts, self.free
        for name, until in (
            ("prepare", ticket.admitted),
            ("exposed_generation", ticket.generated),
            ("exposed_reward", ticket.rewarded),
            ("exposed_logprob", ticket.scored),
        ):
            if until > at:
                parts[name] += until - at
                at = until

    def _deliver(self, version: int) -> None:
        """Swap a version in, in every generator."""
        for generator in self.generators:
            self._settle(generator)
            generator.replica.version = version
            if generator.replica.busy:
                generator.pause += self.pipeline.swap_s
            self._admit(generator, settled=True)
            if generator.replica.busy:
                self._plan(generator)


def simulate(pipeline: Pipeline, steps: Sequence[Sequence[Group]]) -> list[Step]:
    """Return what comes out for each step of a run."""
    return Simulation(pipeline, steps).run()


def seconds(steps: Sequence[Step], skip: int = 0) -> np.ndarray:
    """Return the seconds of each step after the first `skip`, float [steps - skip]."""
    ends = np.array([0.0, *(step.end for step in steps)])
    return np.diff(ends)[skip:]
