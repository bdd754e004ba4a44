"""What-if: how long a step would take with faster generation, with another generator, or with a larger lag.

The run is replayed from its timeline by the rules of the pipeline:

- a step's tickets are issued when the version that the lag requires has been published;
- the least loaded generator gets the next ticket, until each has samples for two engines;
- a generator decodes as many responses at once as it has slots, those of different steps too;
- each logprob actor takes one group after the other, in the order in which they come;
- where groups without signal are replaced, a replacement is issued when such a group has its rewards;
- the trainer takes groups in ticket order, and publishes a version after each step.

Logprob, training and rewards take what they took. A generator needs `fixed + each * n` seconds for a round in which n
responses grow, and a response needs as many rounds as it had verifications. The two numbers are fitted to the times at
which the run's groups were generated.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from asyncspec.wire.facts import TRY_IDS, GroupRecord
from asyncspec.wire.messages import StepDone

SKIP = 2  # steps during which the pipeline fills, at least
MOST_RESPONSES = 8000  # of a longer run the last steps are replayed, with about so many responses
LEAST_STEPS = 8  # of the steps that are replayed, after those that fill the pipeline, however many responses they have
FITTED_RESPONSES = 4000  # about so many are simulated to fit the generators' speed


@dataclass(frozen=True)
class Change:
    """A change to replay the run with; the defaults change nothing."""

    generation: float = 1.0  # these three: speed relative to the measured one
    logprob: float = 1.0
    train: float = 1.0
    generators: int = 0  # generators added
    lag: int = 0  # versions of lag added


class Speed(NamedTuple):
    """The seconds of a generator's round in which n responses grow: fixed + each * n."""

    fixed: float
    each: float


class _Work:
    """A group of the run: when a generator got it, the rounds of its responses, and what followed."""

    def __init__(self, group: GroupRecord, trained: bool) -> None:
        self.id, self.trained = group.ticket_id, trained
        # "generator0.1" replaced generator0, so they count as one
        self.generator = group.generator.partition(".")[0]
        tokens = sum(group.response_tokens)
        rounds = group.verifications / tokens if group.verifications else 1.0
        self.rounds = [rounds * max(1, n) for n in group.response_tokens]
        self.reward = _length(group, "reward")
        self.logprob = _length(group, "logprob")
        self.travel = 0.0
        if trained:
            self.travel = max(0.0, _start(group, "logprob_weights") - _end(group, "reward"))
        self.swaps = [phase.start for phase in group.phases if phase.name == "swap"]
        self.received, self.admitted = _start(group, "weights"), _end(group, "weights")
        self.done = _end(group, "generate")


class _Generator:
    """A generator's engine. All live responses progress at the same rate, so each is known by the round it ends in."""

    def __init__(self, speed: Speed, slots: int) -> None:
        self.speed, self.slots = speed, slots
        self.waiting: deque[tuple[float, int]] = deque()  # the rounds of responses, and their groups
        self.live: list[tuple[float, int]] = []  # the rounds in which responses end, and their groups; a heap
        self.round, self.at = 0.0, 0.0

    def submit(self, now: float, group: int, rounds: Sequence[float]) -> None:
        self._advance(now)
        self.waiting.extend((n, group) for n in rounds)
        self._admit()

    def next_end(self) -> float:
        """Return when the next response ends; infinity if none is live."""
        return self.at + (self.live[0][0] - self.round) * self._seconds() if self.live else float("inf")

    def end_one(self, now: float) -> int:
        """End the next response; return its group."""
        self._advance(now)
        group = heapq.heappop(self.live)[1]
        self._admit()
        return group

    def _seconds(self) -> float:
        return self.speed.fixed + self.speed.each * len(self.live)

    def _advance(self, now: float) -> None:
        if self.live:
            self.round += (now - self.at) / self._seconds()
        self.at = now

    def _admit(self) -> None:
        while self.waiting and len(self.live) < self.slots:
            rounds, group = self.waiting.popleft()
            heapq.heappush(self.live, (self.round + rounds, group))


def fitted(steps: Sequence[StepDone], slots: int) -> Speed:
    """Return the speed of a run's generators that explains best when its groups were generated."""
    from scipy.optimize import minimize

    arrivals: dict[str, list[tuple[float, _Work]]] = {}
    for work in _works(steps):
        # The first one of a step to be admitted shows when the weights were there; the others may wait for a slot.
        there: dict[str, float] = {}
        for each in work:
            there[each.generator] = min(there.get(each.generator, float("inf")), each.admitted)
        for each in work:
            arrivals.setdefault(each.generator, []).append((max(each.received, there[each.generator]), each))
    for those in arrivals.values():
        those.sort(key=lambda pair: (pair[0], pair[1].id))
    chosen, responses = [], 0
    for those in arrivals.values():  # generators are alike
        if responses < FITTED_RESPONSES:
            chosen.append(those)
            responses += sum(len(work.rounds) for _, work in those)
    took = [(work.done - work.admitted) / max(work.rounds) for each in chosen for _, work in each]
    unit_s = max(1e-9, statistics.median(took))

    def share_of(point) -> float:
        """Return the share of a full round that grows with its responses."""
        return min(0.999, max(0.0, point[1]))

    def speed_of(point) -> Speed:
        # Where all slots are full most of the time, only a full round's time shows; so that is one of the two numbers.
        full_s, share = unit_s * math.exp(point[0]), share_of(point)
        return Speed(full_s * (1 - share), full_s * share / slots)

    def error(point) -> float:
        speed = speed_of(point)
        outside = abs(point[1] - share_of(point))
        found = [gap for each in chosen for gap in _gaps(each, speed, slots)]
        return statistics.fmean(map(abs, found)) / unit_s * (1 + outside)

    found = []
    for share in (0.1, 0.5, 0.9):
        simplex = [(0.0, share), (0.2, share), (0.0, share + (0.2 if share < 0.5 else -0.2))]
        options = {"maxfev": 60, "initial_simplex": simplex, "xatol": 1e-3, "fatol": 1e-6}
        found.append(minimize(error, simplex[0], method="Nelder-Mead", options=options))
    return speed_of(min(found, key=lambda result: result.fun).x)


def _gaps(arrivals: Sequence[tuple[float, _Work]], speed: Speed, slots: int) -> list[float]:
    """Return for each group of a generator the seconds by which its simulated end is after its real one."""
    engine, gaps, left = _Generator(speed, slots), [], {}
    coming = deque(arrivals)
    while coming or engine.live:
        if coming and coming[0][0] <= engine.next_end():
            at, work = coming.popleft()
            left[work.id] = [len(work.rounds), work.done]
            engine.submit(at, work.id, work.rounds)
            continue
        now = engine.next_end()
        group = left[engine.end_one(now)]
        group[0] -= 1
        if not group[0]:
            gaps.append(now - group[1])
    return gaps


def _works(steps: Sequence[StepDone]) -> list[list[_Work]]:
    return [
        [*(_Work(g, True) for g in sorted(s.groups, key=lambda g: g.place)), *(_Work(g, False) for g in s.unused)]
        for s in steps
    ]


def _training(step: StepDone, trained: Sequence[_Work]) -> list[float]:
    """Return the seconds that the trainer works on each group of a step. The work between two waits is shared evenly by
    the groups that the first wait had made available. A wait for a group that is left out makes none available.
    """
    places, seconds = {work.id: place for place, work in enumerate(trained)}, [0.0] * len(trained)
    first, worked, free = 0, 0.0, step.start

    def share(after: int) -> None:
        groups = range(first, max(after, first + 1))
        for place in groups:
            seconds[place] += worked / len(groups)

    for wait in step.waits:
        worked += wait.start - free
        free = wait.end
        if wait.ticket_id in places:
            share(places[wait.ticket_id])
            first, worked = places[wait.ticket_id], 0.0
    worked += step.end - free
    if trained:
        share(len(trained))
    return seconds


def _delivery(steps: Sequence[StepDone], works: Sequence[Sequence[_Work]], lag: int) -> float:
    """Return the seconds from the end of a step until a generator uses its version, the median over the steps.

    A generator begins to use a version when it is interrupted for it, or when it admits the first ticket that needs it.
    """
    swaps = np.array(sorted({at for work in works for each in work for at in each.swaps}))
    found = []
    for index, step in enumerate(steps):
        admitted = [each.admitted for each in works[index + lag + 1]] if index + lag + 1 < len(works) else []
        after = [at for at in admitted if at >= step.end] + swaps[swaps >= step.end][:1].tolist()
        found += [min(after) - step.end] if after else []
    return statistics.median(found) if found else 0.0


class _Replay:
    """The events of a run under a change, from its first step on. Times begin at 0."""

    def __init__(
        self, steps: Sequence[StepDone], lag: int, slots: int, speed: Speed, change: Change, logprobs: int
    ) -> None:
        self.steps, self.lag, self.slots, self.change = steps, lag + change.lag, slots, change
        self.works = _works(steps)
        self.step_of = {work.id: (index, work) for index, works in enumerate(self.works) for work in works}
        self.delivery = _delivery(steps, self.works, lag)
        # A group without signal that was left out -> the one that replaced it, which is its place's next try.
        self.replacement: dict[int, _Work] = {}
        for works in self.works:
            tries = {work.id: work for work in works}
            left_out = [work.id for work in works if not work.trained]
            self.replacement |= {lost: tries[lost + TRY_IDS] for lost in left_out if lost + TRY_IDS in tries}
        self.later = {work.id for work in self.replacement.values()}
        count = len({work.generator for works in self.works for work in works}) + change.generators
        faster = Speed(speed.fixed / change.generation, speed.each / change.generation)
        self.engines, self.load = [_Generator(faster, slots) for _ in range(count)], [0] * count
        self.pending: deque[_Work] = deque()
        self.left: dict[int, int] = {}  # a group with a generator: its responses that are not generated yet
        self.known: set[int] = set()  # groups that have their rewards
        self.ready: list[dict[int, float]] = [{} for _ in steps]  # of a step: when its groups were through logprob
        self.rewarded: list[tuple[float, int]] = []  # when groups have their rewards, and which; a heap
        self.logprob_free = [0.0] * logprobs
        self.admitted = [(0.0, step) for step in range(min(self.lag + 1, len(steps)))]  # when a step may begin; a heap
        self.ends: list[float] = []

    def run(self) -> list[float]:
        """Return when each step ends."""
        while self.admitted or self.pending or self.rewarded or any(engine.live for engine in self.engines):
            first = min(range(len(self.engines)), key=lambda i: self.engines[i].next_end())
            now, news = self.engines[first].next_end(), False
            if self.admitted and self.admitted[0][0] <= min(now, self._next_reward()):
                now, step = heapq.heappop(self.admitted)
                self.pending.extend(work for work in self.works[step] if work.id not in self.later)
                news = not self.works[step]
            elif self._next_reward() <= now:
                now, group = heapq.heappop(self.rewarded)
                self._rewarded(now, group)
                news = True
            else:
                self._generated(first, now)
            self._dispatch(now)
            while news and len(self.ends) < len(self.steps):
                news = self._train()
        return self.ends

    def _next_reward(self) -> float:
        return self.rewarded[0][0] if self.rewarded else float("inf")

    def _dispatch(self, now: float) -> None:
        while self.pending:
            least = min(range(len(self.engines)), key=self.load.__getitem__)
            if self.load[least] >= 2 * self.slots:
                return
            work = self.pending.popleft()
            self.left[work.id] = len(work.rounds)
            self.load[least] += len(work.rounds)
            self.engines[least].submit(now, work.id, work.rounds)

    def _generated(self, engine: int, now: float) -> None:
        """End a response. The last one of a group is followed by the group's rewards."""
        group = self.engines[engine].end_one(now)
        self.left[group] -= 1
        self.load[engine] -= 1
        if not self.left[group]:
            work = self.step_of[group][1]
            heapq.heappush(self.rewarded, (now + work.reward + work.travel, group))

    def _rewarded(self, now: float, group: int) -> None:
        """Give a group to its logprob actor, or issue the one that replaces it."""
        step, work = self.step_of[group]
        self.known.add(group)
        if work.trained:
            actor = work.id % len(self.logprob_free)
            begun = max(self.logprob_free[actor], now)
            self.logprob_free[actor] = self.ready[step][group] = begun + work.logprob / self.change.logprob
        elif group in self.replacement:
            self.pending.append(self.replacement[group])

    def _train(self) -> bool:
        """Train the next step, if its groups are all there, and let a later one begin; return whether it was."""
        index, free = len(self.ends), self.ends[-1] if self.ends else 0.0
        works, step = self.works[index], self.steps[index]
        trained = [work for work in works if work.trained]
        if not all(work.id in self.known for work in works):
            return False
        for work, seconds in zip(trained, _training(step, trained)):
            free = max(free, self.ready[index][work.id]) + seconds / self.change.train
        if not trained:  # rl.dynamic_sampling left all of them out
            free += step.end - step.start
        self.ends.append(free)
        if index + self.lag + 1 < len(self.steps):
            heapq.heappush(self.admitted, (free + self.delivery, index + self.lag + 1))
        return True


def step_times(
    steps: Sequence[StepDone], lag: int, slots: int, speed: Speed, change: Change = Change(), logprobs: int = 1
) -> list[float]:
    """Return the seconds of each step under a change.

    Args:
        steps: consecutive steps of a run, each with all its groups.
        lag: the policy lag that the run had.
        slots: the responses that one generator decodes at once.
        speed: the generators' speed in the run.
        logprobs: the number of logprob actors that the run had.
    """
    ends = _Replay(steps, lag, slots, speed, change, logprobs).run()
    return [b - a for a, b in zip([0.0, *ends], ends)]


def predicted(
    steps: Sequence[StepDone], lag: int, slots: int, changes: Sequence[Change], logprobs: int = 1
) -> list[float]:
    """Predict the mean seconds of a step under each change.

    This is the measured mean, times the ratio of the replays with and without the change. Of a run with very many
    responses the last steps are replayed, and of a run that was resumed on another clock those of the last part.

    Returns:
        One number for each change; [] if the steps are too few, or if the history of a group is not known.
    """
    skip = max(SKIP, 2 * (lag + 1 + max(change.lag for change in changes)))
    begun = [0, *(i for i, (a, b) in enumerate(zip(steps, steps[1:]), start=1) if b.start < a.start)][-1]
    steps, responses, first = steps[begun:], 0, len(steps) - begun
    while first and (responses <= MOST_RESPONSES or len(steps) - first < skip + LEAST_STEPS):
        first -= 1
        responses += sum(len(g.response_tokens) for g in (*steps[first].groups, *steps[first].unused))
    played = steps[first:]
    skip = min(skip, max(SKIP, len(played) // 2))
    if not responses or len(played) <= skip or not all(_known(g) for s in played for g in (*s.groups, *s.unused)):
        return []
    measured, speed = statistics.fmean([s.end - s.start for s in steps][SKIP:]), fitted(played, slots)

    def mean(change: Change) -> float:
        return statistics.fmean(step_times(played, lag, slots, speed, change, logprobs)[skip:])

    now = mean(Change())
    return [measured * mean(change) / now for change in changes]


def _known(group: GroupRecord) -> bool:
    return {"weights", "generate"} <= {phase.name for phase in group.phases}


def _start(group: GroupRecord, name: str) -> float:
    return next(p.start for p in group.phases if p.name == name)


def _end(group: GroupRecord, name: str) -> float:
    return next(p.end for p in reversed(group.phases) if p.name == name)


def _length(group: GroupRecord, name: str) -> float:
    return sum(p.end - p.start for p in group.phases if p.name == name)
