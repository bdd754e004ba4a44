"""Where a step's time went: pure functions over the trainer's waits and the histories of the groups it waited for.

Each group carries its phases: what it was doing, with start and end. The trainer notes each wait: the ticket it
waited for, with start and end. Every instant of a wait is charged to the phase that the awaited group was in. An
instant between two phases is charged to transport. An instant before the first phase is charged to admission, because
a ticket is issued as soon as the policy lag admits it. The charges sum to the wait.

    group   |queued |weights|queued|   generate    |reward|~~~|logprob_queue|logprob|~~~|
    wait                                 |--------------------------------------------------|
    charged                              generation reward transp.  logprob       transport

The trainer's own work and, during its waits, the phases of the awaited groups form the critical path of the step: had
any piece of it been shorter, the step would have been shorter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from asyncspec.wire.messages import GroupRecord, Phase, StepDone, Wait

# The part that each phase of a group is charged to while the trainer waits for the group.
CAUSES = {
    "resampled": "exposed_generation",  # the groups generated before it in its place were without signal
    "lost": "recovery",  # its generator died; until the ticket is issued again
    "queued": "exposed_generation",  # for a generator with room; then, in the generator, for a free slot
    "weights": "prepare",  # in the generator, for the version that the ticket requires
    "generate": "exposed_generation",
    "swap": "prepare",  # the generator loaded new weights meanwhile
    "environment": "exposed_environment",  # its tools worked, or it began
    "reward": "exposed_reward",
    "logprob_weights": "prepare",
    "logprob_queue": "exposed_logprob",
    "logprob": "exposed_logprob",
}
BETWEEN, BEFORE = "transport", "admission"
WAITED = (
    "transport",
    "prepare",
    "admission",
    "exposed_generation",
    "exposed_environment",
    "exposed_reward",
    "exposed_logprob",
    "recovery",
)
PARTS = ("data", *WAITED, "train", "export", "other")
COLORS = {  # color of each part of a step, the same in every figure
    "data": "#8c8c8c",
    "transport": "#b5b5b5",
    "prepare": "#e6a532",
    "admission": "#f2d37f",
    "exposed_generation": "#c9362b",
    "exposed_environment": "#b5651d",
    "exposed_reward": "#e88fb0",
    "exposed_logprob": "#7a4fa3",
    "recovery": "#111111",
    "train": "#2f6db5",
    "export": "#3d9a8b",
    "other": "#dddddd",
}


class Segment(NamedTuple):
    """A stretch of a critical path: `what` happened, for which ticket (-1: the trainer's own work), and the `part`
    that it is charged to.
    """

    start: float
    end: float
    what: str
    ticket_id: int
    part: str

    @property
    def seconds(self) -> float:
        return self.end - self.start


def tile(wait: Wait, phases: Sequence[Phase]) -> Iterator[Segment]:
    """Cut a wait, without gaps, into what its group was doing.

    Args:
        phases: the group's history, in order of time, without overlaps.
    """
    at, ticket = wait.start, wait.ticket_id
    if phases and at < phases[0].start:
        until = min(wait.end, phases[0].start)
        yield Segment(at, until, BEFORE, ticket, BEFORE)
        at = until
    for phase in phases:
        start, end = max(at, phase.start), min(wait.end, phase.end)
        if end > start:
            if start > at:
                yield Segment(at, start, BETWEEN, ticket, BETWEEN)
            yield Segment(start, end, phase.name, ticket, CAUSES[phase.name])
            at = end
    if wait.end > at:
        yield Segment(at, wait.end, BETWEEN, ticket, BETWEEN)


def attribute(wait: Wait, phases: Sequence[Phase]) -> dict[str, float]:
    """Return the seconds of one wait by part; they sum to the wait. The arguments are those of `tile`."""
    charged = dict.fromkeys(WAITED, 0.0)
    for segment in tile(wait, phases):
        charged[segment.part] += segment.seconds
    return charged


def critical_path(step: StepDone) -> list[Segment]:
    """Cut the step's wall time, without gaps, into the trainer's own work and what it waited for."""
    phases = {g.ticket_id: g.phases for g in (*step.groups, *step.unused)}
    path, at = [], step.start
    for wait in step.waits:
        if wait.start > at:
            path.append(Segment(at, wait.start, "train", -1, "train"))
        path += tile(wait, phases.get(wait.ticket_id, ()))
        at = max(at, wait.end)
    if step.end > at:
        path.append(Segment(at, step.end, "train", -1, "train"))
    return path


def explain(step: StepDone, longest: int = 3) -> list[str]:
    """Say in a few lines, for a person, what the step waited for longest; the longest first."""
    groups = {g.ticket_id: g for g in (*step.groups, *step.unused)}
    total = step.end - step.start
    seconds: dict[tuple[int, str], float] = {}
    for segment in critical_path(step):
        if segment.ticket_id >= 0:
            key = (segment.ticket_id, segment.what)
            seconds[key] = seconds.get(key, 0.0) + segment.seconds
    found = sorted(seconds.items(), key=lambda item: -item[1])[:longest]
    return [
        f"step {step.step}: {value:.2f} s of {total:.2f} s spent waiting for ticket {ticket}, "
        f"{_doing(what, groups.get(ticket))}"
        for (ticket, what), value in found
        if value > 0.01 * total
    ] or [f"step {step.step}: {total:.2f} s, all of it training"]


_DOING = {
    "lost": "lost when a generator died, then sent to",
    "queued": "waiting for a slot of",
    "resampled": "which replaces groups without signal, before it was sent to",
    "weights": "waiting for weights on",
    "generate": "generating on",
    "swap": "held up by a weight swap of",
    "environment": "waiting for an environment of",
    "reward": "being rewarded on",
}
_AT_LOGPROB = {
    "logprob_weights": "waiting for weights in logprob",
    "logprob_queue": "queued for logprob",
    "logprob": "in logprob",
}


def _doing(what: str, group: GroupRecord | None) -> str:
    if what == BEFORE:
        return "not yet admitted by the policy lag"
    if what == BETWEEN or group is None:
        return "in transit between actors"
    if what in _AT_LOGPROB:
        return _AT_LOGPROB[what]
    versions = group.version_max - group.version_min + 1
    return (
        f"{_DOING[what]} {group.generator} (longest response {max(group.response_tokens)} tokens, "
        f"{versions} version{'s' if versions > 1 else ''})"
    )


def break_down(
    start: float, end: float, waits: Iterable[Wait], busy: Mapping[str, float], phases: Mapping[int, Sequence[Phase]]
) -> dict[str, float]:
    """Return the seconds of each part of a step; they sum to end - start.

    Args:
        start, end: of the trainer's step, which starts when the previous step ends.
        busy: seconds that the trainer spent on "data", "train", "prepare" and "export".
        phases: each group's history, by ticket.
    """
    parts = dict.fromkeys(PARTS, 0.0)
    for wait in waits:
        for cause, seconds in attribute(wait, phases.get(wait.ticket_id, ())).items():
            parts[cause] += seconds
    for part, seconds in busy.items():
        parts[part] += seconds
    parts["other"] = (end - start) - sum(parts.values())
    return parts


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals, in seconds."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > until:
            total += end - max(start, until)
            until = end
    return total
