"""Console lines for the person who watches a run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from asyncspec.console import terminal
from asyncspec.report.evaluations import lines
from asyncspec.timing.exporters import RunMetrics
from asyncspec.timing.metrics import TABLE_ROWS, scores

RESULTS = (
    "metrics.jsonl",
    "timeline.jsonl",
    "rollouts.jsonl",
    "tb/",
    "trace.json",
    "ledger.jsonl",
    "logs/",
    "checkpoint/",
    "checkpoints/",
    "best/",
)


class Console:
    """Prints one line per step, and a table at the end. On a terminal it also shows bars for steps, queues and lag."""

    def __init__(self, config, run_dir: Path, first_step: int = 0) -> None:
        self.config, self.run_dir, self.first_step = config, run_dir, first_step
        self._out = terminal(soft_wrap=True)
        self._started = time.monotonic()
        self._filled: float | None = None  # when the first step ended
        self._ended = 0.0  # when the last one did
        self._evaluations: list[dict] = []
        k = f"{config.speculation.method}, k={config.speculation.draft_length}" if config.drafting else "no speculation"
        self._bars: Progress | None = None
        self.line(
            f"asyncspec: {config.steps} steps of {config.rl.groups_per_step} prompts x {config.rl.group_size} samples, "
            f"policy lag {config.policy_lag}, {k}, seed {config.seed} -> {run_dir}"
        )

    def resumed(self, metrics: RunMetrics) -> None:
        """Say from which version the run resumes. Its first evaluation was before it stopped."""
        if metrics.first_evaluation is not None and metrics.last is not None and metrics.last["eval/score"] is not None:
            self._evaluations = [metrics.first_evaluation, metrics.last]
        self.line(f"resuming from version {self.first_step}, with {self.first_step} steps trained")

    def line(self, text: str) -> None:
        self._out.print(text)

    def status(self, steps: int, generating: int, generated: int, lag: int) -> None:
        """Update the bars; plain output has none.

        Args:
            steps: steps trained so far.
            generating, generated: tickets in a generator; tickets that are generated but not trained.
            lag: versions that the newest step with tickets is ahead of the policy.
        """
        if not self._out.is_terminal:
            return
        if self._bars is None:
            self._bars = Progress(
                TextColumn("{task.description:>12}"),
                BarColumn(40),
                MofNCompleteColumn(),
                console=self._out,
                refresh_per_second=4,
                transient=True,
            )
            admitted = (self.config.policy_lag + 1) * self.config.rl.groups_per_step
            for name, total in (
                ("steps", self.config.steps),
                ("generating", admitted),
                ("generated", admitted),
                ("lag", self.config.policy_lag),
            ):
                self._bars.add_task(name, total=total)
            self._bars.start()
        for task, value in zip(self._bars.task_ids, (steps, generating, generated, lag)):
            self._bars.update(task, completed=value)

    def evaluated(self, evaluation: dict, rollouts: int) -> None:
        if evaluation["eval/score"] is not None:
            self._evaluations.append(evaluation)
        for line in lines(evaluation, rollouts):
            self.line(line)

    def left_s(self, done: int) -> float | None:
        """Return the seconds until the last step is trained, after `done` steps; None if that is not known yet."""
        measured = done - self.first_step - 1
        if self._filled is None or measured < 1:
            return None
        return (self._ended - self._filled) / measured * (self.config.steps - done)

    def step(self, row: dict) -> None:
        done, self._ended, left = row["step"] + 1, time.monotonic(), ""
        if self._filled is None:  # the first step includes filling the pipeline; it does not predict the others
            self._filled = self._ended
        if (seconds := self.left_s(done)) is not None:
            left = f"  left {int(seconds) // 60}:{int(seconds) % 60:02d}"
        self.line(
            f"step {done:>4}/{self.config.steps}  reward {row['reward/mean']:.3f}  lag "
            f"{row['lag/mean']:.2f}/{row['lag/max']:.0f}  "
            f"tokens {row['tokens/response_mean']:.0f}  acceptance {row['spec/acceptance_length']:.2f}  "
            f"step {row['time/step']:.2f} s (train {row['time/train']:.2f}, exposed generation "
            f"{row['time/exposed_generation']:.2f}){left}"
        )

    def end(self, failure: str, reason: str, metrics: RunMetrics, resuming: bool = False) -> None:
        if self._bars is not None:
            self._bars.stop()
        if resuming:
            self.line(f"{reason}: all actors restart from the last checkpoint")
            return
        columns = metrics.columns
        if steps := len(columns["time/step"]):
            # The first step includes filling the pipeline, so it has a column of its own.
            table = Table(
                title=f"Seconds per step, median and mean of {steps - 1 or 1} steps after the first",
                title_justify="left",
            )
            for heading in ("part", "median", "mean", "share", "first step"):
                table.add_column(heading, justify="left" if heading == "part" else "right")
            total = float(np.mean(columns["time/step"][1:] or columns["time/step"]))
            for label, key in TABLE_ROWS:
                values = columns[key][1:] or columns[key]
                table.add_row(
                    label,
                    f"{np.median(values):.3f}",
                    f"{np.mean(values):.3f}",
                    f"{np.mean(values) / total:.0%}",
                    f"{columns[key][0]:.3f}",
                    end_section=key in ("time/other", "time/step"),
                )
            self._out.print(table)
        if self._evaluations and steps:
            self.line(
                f"{_told([self._evaluations[0], *self._evaluations[1:][-1:]])}; "
                f"largest lag {max(columns['lag/max']):.0f} of {self.config.policy_lag} allowed; "
                f"{time.monotonic() - self._started:.0f} s"
            )
        if failure:
            self.line(f"failed: {failure}")
        elif reason != "finished":
            self.line(
                f"stopped early: {reason}; "
                + ("the checkpoint holds all trained steps" if steps else "no step was trained")
            )
        if (failure or reason != "finished") and steps and (self.run_dir / "config.yaml").exists():
            self.line(f"to resume: asyncspec train --resume {self.run_dir}")
        left = [name for name in RESULTS if (self.run_dir / name).exists()]
        self.line(f"results in {self.run_dir}: {', '.join(left)}")


def _told(evaluations: Sequence[dict]) -> str:
    name, numbers = scores(evaluations)
    return f"held-out {name} {' -> '.join(numbers)}"
