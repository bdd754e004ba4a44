"""Where a step's time went: pure functions over the trainer's waits and the histories of the groups it waited for.

Each group carries its phases (what it was doing, from when to when). The trainer notes each wait: for which ticket, from
when to when. Every instant of a wait is charged to the phase its group was in at that instant; an instant between two
phases is charged to moving data, one before the first phase to weight synchronisation, since a ticket is issued as soon as
its version is published. The charges sum to the wait.

    group   |queued |weights|queued|   generate    |reward|~~~|logprob_queue|logprob|~~~|
    wait                                 |--------------------------------------------------|
    charged                              generation         data    logprob          data
"""

from __future__ import annotations

from typing import Iterable, Mapping, Sequence

from asyncspec.messages import Phase, Wait

# What each phase of a group is charged to when the trainer waits for it.
CAUSES = {
    "queued": "exposed_generation",  # issued, for a generator with room; and in the generator, for a free slot
    "weights": "prepare",  # in the generator, for the version the ticket asks for
    "generate": "exposed_generation",
    "reward": "exposed_generation",
    "logprob_weights": "prepare",
    "logprob_queue": "exposed_logprob",
    "logprob": "exposed_logprob",
}
PARTS = ("data", "prepare", "exposed_generation", "exposed_logprob", "train", "other")


def attribute(wait: Wait, phases: Sequence[Phase]) -> dict[str, float]:
    """Seconds of one wait by cause; they sum to the wait.

    Args:
        phases: the group's history, in order of time and not overlapping.
    """
    charged = dict.fromkeys(("data", "prepare", "exposed_generation", "exposed_logprob"), 0.0)
    at = wait.start
    if phases and at < phases[0].start:
        until = min(wait.end, phases[0].start)
        charged["prepare"] += until - at
        at = until
    for phase in phases:
        start, end = max(at, phase.start), min(wait.end, phase.end)
        if end > start:
            charged["data"] += start - at
            charged[CAUSES[phase.name]] += end - start
            at = end
    charged["data"] += wait.end - at
    return charged


def break_down(start: float, end: float, waits: Iterable[Wait], busy: Mapping[str, float],
               phases: Mapping[int, Sequence[Phase]]) -> dict[str, float]:
    """The parts of a step; they sum to end - start.

    Args:
        start, end: the trainer's step, from the end of the one before.
        busy: seconds the trainer spent on "data", "train" and "prepare".
        phases: the history of each group, by ticket.
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
    """Length of the union of intervals, in seconds."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > until:
            total += end - max(start, until)
            until = end
    return total
