"""What-if: how long a step would take with faster generation, with another generator, or with a larger lag.

The run is replayed from its timeline by the rules of the pipeline:

- a step's tickets are issued when the version that the lag requires has been published;
- the least loaded generator gets the next ticket, until each has samples for two engines;
- a generator decodes as many responses at once as it has slots, those of different steps too;
- each logprob actor takes one group after the other;
- the trainer takes groups in ticket order, and publishes a version after each step.

Logprob, training and rewards take what they took. A generator needs `fixed + each * n` seconds for a round in which n
responses grow, and a response needs as many rounds as it had verifications. The two numbers are fitted to the times at
which the run's groups were generated.
"""

from __future__ import annotations

import heapq
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from asyncspec.wire.messages import GroupRecord, StepDone

SKIP = 2  # steps during which the pipeline fills
MOST_RESPONSES = 8000  # of the last steps: what is replayed of a long run


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
        self.id, self.place, self.trained = group.ticket_id, group.place, trained
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

    def error(logs) -> float:
        speed = Speed(*np.exp(logs))
        found = [gap for each in arrivals.values() for gap in _gaps(each, speed, slots)]
        return statistics.fmean(map(abs, found))

    took = [(work.done - work.admitted) / max(work.rounds) for each in arrivals.values() for _, work in each]
    round_s = max(1e-6, statistics.median(took))
    starts = [(round_s / 2, round_s / 2 / slots), (round_s, round_s / 100 / slots)]
    found = [minimize(error, np.log(start), method="Nelder-Mead", options={"maxfev": 60}) for start in starts]
    return Speed(*map(float, np.exp(min(found, key=lambda result: result.fun).x)))


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
    """Return the trainer's work for each group of a step. What it did between two waits is shared evenly by the groups
    that it had got for it.
    """
    places, seconds = {work.id: place for place, work in enumerate(trained)}, [0.0] * len(trained)
    waits = [(places[w.ticket_id], w.start, w.end) for w in step.waits if w.ticket_id in places]
    begun = [(0, step.start), *((place, end) for place, _, end in waits)]
    ended = [*((place, start) for place, start, _ in waits), (len(trained), step.end)]
    for (first, start), (after, end) in zip(begun, ended):
        groups = range(first, max(after, first + 1))
        for place in groups:
            seconds[place] += (end - start) / len(groups)
    return seconds


def _delivery(steps: Sequence[StepDone], works: Sequence[Sequence[_Work]]) -> float:
    """Return the seconds from the end of a step until a generator uses its version, the median over the steps: a
    generator is interrupted for it, or admits the first tickets that waited for it.
    """
    uses = sorted(
        {p.start for s in steps for g in s.groups for p in g.phases if p.name == "swap"}
        | {w.admitted for work in works for w in work}
    )
    ends = np.array([step.end for step in steps])
    after = np.searchsorted(uses, ends)
    known = after < len(uses)
    return float(np.median(np.array(uses)[after[known]] - ends[known])) if known.any() else 0.0


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
    works = _works(steps)
    prepare = _delivery(steps, works)
    lag += change.lag
    faster = Speed(speed.fixed / change.generation, speed.each / change.generation)
    count = len({w.generator for work in works for w in work}) + change.generators
    engines, load = [_Generator(faster, slots) for _ in range(count)], [0] * count
    pending: deque[_Work] = deque()
    left: dict[int, int] = {}  # group: its responses that are not generated yet
    at: dict[int, int] = {}  # group: its generator
    by_id = {w.id: (index, w) for index, work in enumerate(works) for w in work}
    ready: list[dict[int, float]] = [{} for _ in works]  # of a step: when its groups were through logprob
    logprob_free = [0.0] * logprobs
    published = [(0.0, step) for step in range(min(lag + 1, len(steps)))]  # (when, step that it lets begin)
    ends: list[float] = []

    def dispatch(now: float) -> None:
        while pending:
            chosen = min(range(count), key=load.__getitem__)
            if load[chosen] >= 2 * slots:
                return
            work = pending.popleft()
            load[chosen] += len(work.rounds)
            left[work.id], at[work.id] = len(work.rounds), chosen
            engines[chosen].submit(now, work.id, work.rounds)

    def train() -> None:
        """Train the steps whose groups are all there, and let later ones begin."""
        while len(ends) < len(steps):
            index = len(ends)
            trained = [w for w in works[index] if w.trained]
            if len(ready[index]) < len(trained):
                return
            step, free = steps[index], ends[-1] if ends else 0.0
            if not trained:  # rl.dynamic_sampling left all of them out
                if any(w.id in left or w.id not in at for w in works[index]):
                    return
                free += step.end - step.start
            for work, seconds in zip(trained, _training(step, trained)):
                free = max(free, ready[index][work.id]) + seconds / change.train
            ends.append(free)
            if index + lag + 1 < len(steps):
                heapq.heappush(published, (free + prepare, index + lag + 1))

    while published or pending or any(engine.live for engine in engines):
        chosen = min(range(count), key=lambda i: engines[i].next_end())
        now = engines[chosen].next_end()
        if published and published[0][0] <= now:
            now, index = heapq.heappop(published)
            pending.extend(works[index])
        else:
            group = engines[chosen].end_one(now)
            left[group] -= 1
            load[chosen] -= 1
            if not left[group]:
                del left[group]
                index, work = by_id[group]
                if work.trained:
                    actor = work.id % logprobs
                    begun = max(logprob_free[actor], now + work.reward + work.travel)
                    logprob_free[actor] = ready[index][group] = begun + work.logprob / change.logprob
        dispatch(now)
        train()
    return [b - a for a, b in zip([0.0, *ends], ends)]


def predicted(
    steps: Sequence[StepDone], lag: int, slots: int, changes: Sequence[Change], logprobs: int = 1
) -> list[float]:
    """Predict the mean seconds of a step under each change.

    This is the measured mean, times the ratio of the replays with and without the change. Of a run with very many
    responses the last steps are replayed.
    """
    responses, first = 0, len(steps)
    while first and responses <= MOST_RESPONSES:
        first -= 1
        responses += sum(len(g.response_tokens) for g in (*steps[first].groups, *steps[first].unused))
    measured, played = statistics.fmean([s.end - s.start for s in steps][SKIP:]), steps[first:]
    if not responses or len(played) <= SKIP:
        return [measured] * len(changes)
    speed = fitted(played, slots)

    def mean(change: Change) -> float:
        return statistics.fmean(step_times(played, lag, slots, speed, change, logprobs)[SKIP:])

    now = mean(Change())
    return [measured * mean(change) / now for change in changes]


def _start(group: GroupRecord, name: str) -> float:
    return next(p.start for p in group.phases if p.name == name)


def _end(group: GroupRecord, name: str) -> float:
    return next(p.end for p in reversed(group.phases) if p.name == name)


def _length(group: GroupRecord, *names: str) -> float:
    return sum(p.end - p.start for p in group.phases if p.name in names)
