"""The evaluations of a run: when a version is evaluated, and what came back so far.

The version of the start and the last one are always evaluated, and one every `eval.every` steps. Training goes on
meanwhile, so later samples may come from newer versions: eval/policy_version and eval/policy_version_max say which
versions sampled. An evaluation that was cut short is repeated when the run resumes, with the version that it resumes
from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncspec.config import Config
from asyncspec.ledger.evaluations import NEWEST, OLDEST, Fields
from asyncspec.timing import evaluation as statistics
from asyncspec.wire import messages as m


def due(config: Config, version: int) -> bool:
    """Whether a version is to be evaluated."""
    every = config.eval.every
    return version in (0, config.steps) or bool(every and version % every == 0)


def missing(config: Config, version: int, done: Sequence[Fields]) -> bool:
    """Whether the version that a run resumes from is to be evaluated: an evaluation was due there, or before it, and
    none has been completed since.

    Args:
        done: the complete evaluations.
    """
    newest_due = next(earlier for earlier in range(version, -1, -1) if due(config, earlier))
    return all((found[OLDEST] or 0) < newest_due for found in done)


@dataclass
class _Open:
    """An evaluation whose tickets are not all back."""

    left: int  # tickets
    sets: dict[str, list[list[float | None]]]  # name -> the rewards of each prompt
    versions: list[int] = field(default_factory=list)  # the oldest and the newest of each ticket


class Evaluations:
    """Compute the results of each evaluation as its tickets come back."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._open: dict[int, _Open] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def begin(self, version: int, tickets: Sequence[m.Ticket]) -> None:
        sets = dict.fromkeys(ticket.eval_set for ticket in tickets)
        self._open[version] = _Open(len(tickets), {name: [] for name in sets})

    def add(self, ticket: m.Ticket, done: m.EvalDone) -> tuple[Fields, int] | None:
        """Note that a ticket came back. Once all tickets of its version have, return the eval/ fields and the number of
        rollouts; None before.
        """
        found = self._open[ticket.step]
        found.sets[ticket.eval_set].append(done.rewards)
        found.versions += [done.version_min, done.version_max]
        found.left -= 1
        if found.left:
            return None
        del self._open[ticket.step]
        fields = statistics.fields(found.sets, self.config.eval.ks)
        rollouts = sum(len(rewards) for prompts in found.sets.values() for rewards in prompts)
        return fields | {OLDEST: min(found.versions), NEWEST: max(found.versions)}, rollouts
