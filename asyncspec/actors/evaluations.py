"""The evaluations of a run: when a version is evaluated, what came back so far, and which results are on disk.

    RUN/evaluations.jsonl    one line for each complete evaluation: its eval/ fields

The version of the start and the last one are always evaluated, and one every `eval.every` steps. Training goes on
meanwhile, so later samples may come from newer versions: eval/policy_version and eval/policy_version_max say which
versions sampled. An evaluation that was cut short is repeated when the run resumes, with the version that it resumes
from.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asyncspec.config import Config
from asyncspec.files import LineFiles, replace_file
from asyncspec.timing import evaluation as statistics
from asyncspec.timing.metrics import read_rows
from asyncspec.wire import messages as m

FILE = "evaluations.jsonl"
OLDEST, NEWEST = "eval/policy_version", "eval/policy_version_max"
Fields = dict[str, float | int | None]
NONE: Fields = {"eval/score": None, "eval/solved": None, OLDEST: -1, NEWEST: -1}  # before the first evaluation


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


class EvaluationFile:
    """The results on disk. Those that a rewind has undone are removed: newer versions sampled in them."""

    def __init__(self, files: LineFiles, first_step: int) -> None:
        """
        Args:
            first_step: the version that the run starts or resumes from.

        Raises:
            OSError: the file cannot be written.
        """
        self.found = read(files.folder)
        if kept := [fields for fields in self.found if fields[NEWEST] <= first_step]:
            replace_file(files.folder / FILE, "".join(json.dumps(fields) + "\n" for fields in kept))
        else:
            (files.folder / FILE).unlink(missing_ok=True)
        self.found = kept
        self._file = files.open(FILE)

    def write(self, fields: Fields) -> None:
        self.found.append(fields)
        self._file.write(json.dumps(fields) + "\n")

    def close(self) -> None:
        self._file.close()


def read(run_dir: Path) -> list[dict]:
    """Return the complete evaluations of a run, in the order in which they ended."""
    path = run_dir / FILE
    rows = read_rows(path) if path.exists() else []
    return [row for row in rows if type(row.get(OLDEST)) is int and type(row.get(NEWEST)) is int]
