"""The records of a run: its ledger, metrics, timeline and trace, and the console that the user watches."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from asyncspec.actors.base import REPORT_EVERY_S, resource_usage
from asyncspec.files import LineFiles
from asyncspec.ledger import ledger as ledgers
from asyncspec.ledger.evaluations import NONE, EvaluationFile, Fields
from asyncspec.models.tokenizer import response_pieces
from asyncspec.report.console import Console
from asyncspec.timing.boards import Boards, Place, openers
from asyncspec.timing.exporters import RunMetrics, TraceFile
from asyncspec.timing.metrics import step_row
from asyncspec.timing.rollouts import COLUMNS, RolloutFile, rows_of, table
from asyncspec.timing.timeline import TimelineFile
from asyncspec.wire import messages as m
from asyncspec.wire.shown import Shown

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PICTURE_EVERY, PICTURE_STEPS = 40, 4  # steps between two timeline pictures in TensorBoard, and in each one


class Records:
    """Everything that the controller writes down about a run."""

    def __init__(self, run_dir: Path, first_step: int, console: Console) -> None:
        """
        Args:
            first_step: the step to resume at; what was recorded about it and later steps is void. 0 in a new run.

        Raises:
            OSError: a file cannot be written, or another process writes the ledger.
        """
        self.run_dir, self.console, self._first_step = run_dir, console, first_step
        self.failed = console.line  # called once, with a line for the user, if the run can no longer be recorded
        self._files = LineFiles(run_dir, lambda failure: self.failed(failure))
        self.ledger = ledgers.Ledger(self._files)
        self.metrics = RunMetrics(self._files, self._open_boards, first_step)
        self.timeline, self.trace = TimelineFile(self._files, first_step), TraceFile(run_dir, console.line, first_step)
        self._rollouts = RolloutFile(run_dir, console.line, first_step)
        self._held_out: list[dict] = []  # rollouts of evaluations that are not complete
        self.line, self.note = console.line, self.ledger.note
        self.counters: dict[str, float] = {}  # the latest from all actors, for the next row of metrics
        self.evaluations = EvaluationFile(self._files, first_step)
        self._evaluation: Fields = self.evaluations.found[-1] if self.evaluations.found else NONE
        self._latest: deque[m.StepDone] = deque(maxlen=PICTURE_STEPS)
        self._measured = 0.0

    def _open_boards(self, shown: int) -> Boards:
        config = self.console.config
        name = config.logging.run_name or self.run_dir.name
        place = Place(self.run_dir, config.logging.project, name, asdict(config), self._first_step, shown)
        return Boards(openers(config.logging.boards, place), lambda text: self.console.line(text))

    def resume(self, version: int) -> list[dict]:
        """Resume a run. Of the open tickets in its ledger, those of step `version` and later are void: they are issued
        again. The others are dropped now. Return the ledger's events before this.
        """
        before = list(ledgers.read(self.run_dir))
        self.counters["recovery/restarts"] = 1 + sum(event["event"] == "resumed" for event in before)
        cut_short = ledgers.open_tickets([*before, {"event": "resumed", "version": version}])
        for ticket, issued in cut_short.items():
            self.note(
                "dropped",
                ticket=ticket,
                step=issued["step"],
                min_version=issued["min_version"],
                evaluation=issued["evaluation"],
                reason="the run was cut short",
            )
        void = len(ledgers.open_tickets(before)) - len(cut_short)
        self.note("resumed", version=version, tickets_undone=ledgers.undone(before, version), tickets_void=void)
        self.console.resumed(self.metrics)
        return before

    def spans(self, message: m.Spans) -> None:
        """Write an actor's spans and keep its counters."""
        self.trace.write(message.actor, message.spans)
        self.counters |= message.counters

    def evaluated(self, evaluation: Fields, rollouts: int) -> None:
        """Write the eval/ fields of a version whose evaluation is complete."""
        self._evaluation = evaluation
        self.evaluations.write(evaluation)
        self.console.evaluated(evaluation, rollouts)
        self.metrics.evaluated(evaluation)
        version = evaluation["eval/policy_version"]
        if rows := table([row for row in self._held_out if row["step"] == version]):
            self._held_out = [row for row in self._held_out if row["step"] != version]
            self.metrics.boards.table("rollouts/evaluation", COLUMNS, rows, version)

    def step(self, done: m.StepDone, final: bool) -> None:
        """Write the row, the trace and the timeline of a step, unless the run can no longer be recorded.

        Args:
            final: the row waits for the evaluation of the version that the step made.
        """
        for record in (*done.groups, *done.unused):
            self.trace.write_group(done.step, record)
        self.ledger.sync()
        if self._files.stopped:
            return
        self.timeline.write(done)
        self._latest.append(done)
        if (done.step + 1) % PICTURE_EVERY == 0:
            self.metrics.picture(list(self._latest))
        if time.monotonic() - self._measured > REPORT_EVERY_S:
            self._measured = time.monotonic()
            self.counters |= {f"process/controller_{what}": value for what, value in resource_usage().items()}
        row = step_row(done, self.counters, self._evaluation, self.console.config.rl.kl_coef > 0)
        self.metrics.write(row, final)
        self.console.step(row)

    def rollouts(self, groups: Sequence[Shown], tokenizer: Tokenizer) -> None:
        """Write the rollouts of groups, and show them."""
        rows = []
        for group in groups:
            rows += rows_of(group, lambda tokens, truncated: response_pieces(tokenizer, tokens, truncated))
        self._rollouts.write(rows)
        if groups and groups[0].evaluation:
            self._held_out += rows
        elif groups:
            self.metrics.boards.table("rollouts/training", COLUMNS, table(rows), groups[0].step)

    def closing(self) -> list[Callable[[], None]]:
        """Return the calls that close all files. Each may fail on its own."""
        clock_error = max((v for k, v in self.counters.items() if k.startswith("clock/")), default=0.0) / 1e3
        files = [self.ledger.close, self.metrics.close, self.evaluations.close]
        files += [lambda: self.trace.close(clock_error), self.timeline.close, self._rollouts.close]
        return [*files, self.metrics.boards.close]
