"""What-if: how long a step would take with faster generation, with another generator, or with a larger lag.

The run is replayed from its timeline. Each group keeps the measured durations of its stages. When a stage begins
follows from the rules of the pipeline:

- a ticket is issued when the version that the lag requires is published;
- generators share a step's tickets;
- each logprob actor takes one group after the other;
- the trainer takes groups in ticket order.

The time that a group queued for a busy actor is not kept: it follows from these rules.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from asyncspec.wire.messages import GroupRecord, StepDone

SKIP = 2  # steps during which the pipeline fills


@dataclass(frozen=True)
class Change:
    """A change to replay the run with; the defaults change nothing."""

    generation: float = 1.0  # these three: speed relative to the measured one
    logprob: float = 1.0
    train: float = 1.0
    generators: int = 0  # generators added
    lag: int = 0  # versions of lag added


def _length(group: GroupRecord, *names: str) -> float:
    return sum(p.end - p.start for p in group.phases if p.name in names)


def step_times(steps: Sequence[StepDone], lag: int, change: Change = Change(), logprobs: int = 1) -> list[float]:
    """Return the seconds of each step under a change.

    Args:
        steps: consecutive steps of a run, each with all its groups.
        lag: the policy lag that the run had.
        logprobs: the number of logprob actors that the run had.
    """
    # "generator0.1" replaced generator0, so they count as one
    generators = len({g.generator.partition(".")[0] for s in steps for g in (*s.groups, *s.unused)})
    faster = change.generation * (generators + change.generators) / generators
    published = [steps[0].start]  # when each version was published, from the version of the first step on
    trainer_free = generator_free = steps[0].start
    logprob_free = [steps[0].start] * logprobs
    ends = []
    for index, step in enumerate(steps):
        groups = sorted(step.groups, key=lambda g: g.place)
        if not groups:  # rl.dynamic_sampling left all of them out
            trainer_free += step.end - step.start
            ends.append(trainer_free)
            published.append(trainer_free)
            continue
        issued = published[max(0, index - lag - change.lag)] if index > lag + change.lag else steps[0].start
        # All tickets of a step are generated together. The engine's time from one group's end to the next one's is
        # kept.
        order = sorted(groups, key=lambda g: _end(g, "generate"))
        begun = min(_start(g, "generate") for g in groups)
        at = max(issued, generator_free)
        ready: dict[int, float] = {}
        for group in order:
            left = at + (_end(group, "generate") - begun) / faster + _length(group, "reward")
            travel = _gap(group, "reward", "logprob_weights")
            actor = group.ticket_id % logprobs
            logprob_free[actor] = max(logprob_free[actor], left + travel) + _length(group, "logprob") / change.logprob
            ready[group.ticket_id] = logprob_free[actor]
        generator_free = at + (_end(order[-1], "generate") - begun) / faster
        waits = sum(w.end - w.start for w in step.waits)
        work = (step.end - step.start - waits) / len(groups) / change.train
        for group in groups:
            trainer_free = max(trainer_free, ready[group.ticket_id]) + work
        ends.append(trainer_free)
        published.append(trainer_free)
    return [b - a for a, b in zip([steps[0].start, *ends], ends)]


def predicted(steps: Sequence[StepDone], lag: int, change: Change, logprobs: int = 1) -> float:
    """Predict the mean seconds of a step under a change.

    This is the measured mean, times the ratio of the replays with and without the change.
    """

    def mean(change: Change) -> float:
        return statistics.fmean(step_times(steps, lag, change, logprobs)[SKIP:])

    return statistics.fmean([s.end - s.start for s in steps][SKIP:]) * mean(change) / mean(Change())


def _start(group: GroupRecord, name: str) -> float:
    return next(p.start for p in group.phases if p.name == name)


def _end(group: GroupRecord, name: str) -> float:
    return next(p.end for p in reversed(group.phases) if p.name == name)


def _gap(group: GroupRecord, before: str, after: str) -> float:
    return max(0.0, _start(group, after) - _end(group, before))
