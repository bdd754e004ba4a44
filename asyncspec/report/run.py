"""Read the files that a run left behind."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from asyncspec.config import Config, from_yaml, sources
from asyncspec.errors import UserError
from asyncspec.ledger import ledger
from asyncspec.ledger.evaluations import read as read_evaluations
from asyncspec.report import evaluations
from asyncspec.timing import timeline
from asyncspec.timing.attribution import PARTS
from asyncspec.timing.metrics import read_rows
from asyncspec.wire.messages import StepDone

NEEDED = {"step": 0, "time/step": 1e-9, "lag/max": 0}  # metrics that every row has: the least valid value
STATES = ("busy", "blocked_input", "blocked_output", "idle")


@dataclass(frozen=True)
class Run:
    """The records of a run, and the numbers that a report shows."""

    name: str
    config: Config
    rows: list[dict]  # from metrics.jsonl
    steps: list[StepDone]  # from timeline.jsonl; may be fewer than rows, or none
    failures: list[str]  # how many tickets were dropped, one text per reason
    evaluations: list[dict] = field(default_factory=list)  # from evaluations.jsonl

    @classmethod
    def read(cls, directory: Path) -> Run:
        """Read the directory of a run.

        Raises:
            UserError: it holds no run, the run has no finished step, or a line of its ledger is damaged.
        """
        for name in ("config.yaml", "metrics.jsonl"):
            if not os.path.isfile(directory / name):
                raise UserError(
                    f"report {directory}: no {name} in it; expected a run's directory, for example runs/20261121-120000"
                )
        rows = read_rows(directory / "metrics.jsonl")
        if not rows:
            raise UserError(f"report {directory}: expected at least one finished step; see {directory}/logs")
        try:
            dropped = _dropped(directory / "ledger.jsonl")
        except ValueError as error:
            raise UserError(f"report {directory}: {error}") from None
        for number, row in enumerate(rows, 1):
            for key, least in NEEDED.items():
                if not isinstance(row.get(key), int | float) or row[key] < least:
                    raise UserError(
                        f"report {directory}: metrics.jsonl, line {number}: {key}={row.get(key)!r}: expected a number"
                    )
        steps = list(timeline.read(directory)) if (directory / timeline.FILE).is_file() else []
        config = from_yaml((directory / "config.yaml").read_text(encoding="utf-8", errors="replace"))
        return cls(directory.name, config, rows, steps, dropped, read_evaluations(directory))

    def series(self, key: str) -> np.ndarray:
        """Return a metric over the steps, NaN where it is missing."""
        return np.array([np.nan if row.get(key) is None else row[key] for row in self.rows], dtype=float)

    @property
    def steady(self) -> slice:
        """The steps after those that fill the pipeline."""
        return slice(min(self.config.policy_lag + 1, len(self.rows) - 1), None)

    def parts(self) -> dict[str, float]:
        """Return the mean seconds of a steady step, by part."""
        return {part: float(np.nan_to_num(self.series(f"time/{part}")[self.steady]).mean()) for part in PARTS}

    def actors(self) -> list[tuple[str, dict[str, float]]]:
        """Return the share of its time that each actor was busy, blocked on input, blocked on output, and idle."""
        names = sorted(
            {
                key.removeprefix("actors/").rsplit("_busy")[0]
                for row in self.rows
                for key in row
                if key.startswith("actors/") and key.endswith("_busy")
            }
        )
        return [
            (name, {state: float(np.nanmean(self.series(f"actors/{name}_{state}"))) for state in STATES})
            for name in names
        ]

    def step_seconds(self) -> float:
        return float(self.series("time/step")[self.steady].mean())

    def tokens_per_second(self) -> float:
        """Return the response tokens of the steady steps over their seconds."""
        seconds = self.series("time/step")[self.steady]
        tokens = self.series("throughput/tokens_per_s")[self.steady] * seconds
        known = np.isfinite(tokens)
        return float(tokens[known].sum() / seconds[known].sum()) if known.any() else math.nan

    @property
    def drafting(self) -> str:
        c = self.config
        return f"{c.speculation.method}, k={c.speculation.draft_length}" if c.drafting else "no speculation"

    @property
    def label(self) -> str:
        return f"{self.name}: lag {self.config.policy_lag}, {self.drafting}"

    @property
    def what(self) -> str:
        """What ran, in a line."""
        c = self.config
        task = ", ".join(Path(part).name for part in sources(c.data.train_file)) or c.data.task
        model = re.sub(r"@([0-9a-f]{7})[0-9a-f]{33}$", r"@\1", c.model.path.removeprefix("asset:"))  # a commit
        return f"{self.name}: {model} on {task}, {len(self.rows)} steps, policy lag {c.policy_lag}, {self.drafting}"

    def summary(self) -> list[tuple[str, str]]:
        """Return the numbers that a person asks for first."""
        seconds, steady = self.step_seconds(), self.steady
        lag = self.series("lag/max")
        rows = [
            ("steps", f"{len(self.rows)} of {self.config.steps}"),
            ("step", f"{seconds:.3f} s (median {np.median(self.series('time/step')[steady]):.3f} s)"),
            (
                "exposed generation",
                f"{self.parts()['exposed_generation']:.3f} s per step, "
                f"{self.parts()['exposed_generation'] / seconds:.1%}",
            ),
            ("throughput", f"{self.tokens_per_second():.0f} tokens/s"),
            (
                "acceptance length",
                f"{np.nanmean(self.series('spec/acceptance_length')[steady]):.2f} at a mean draft length of "
                f"{np.nanmean(self.series('spec/draft_length')[steady]):.1f}",
            ),
            ("largest lag", f"{int(np.nanmax(lag))} of {self.config.policy_lag} allowed"),
            (
                "reward",
                f"{np.nanmean(self.series('reward/mean')[:5]):.3f} over the first five steps, "
                f"{np.nanmean(self.series('reward/mean')[-5:]):.3f} over the last five",
            ),
        ]
        rows += evaluations.summary(self.evaluations or self.rows)
        return rows + [("dropped tickets", ", ".join(self.failures) or "none")]


def _dropped(path: Path) -> list[str]:
    counts: dict[str, int] = {}
    for event in ledger.read(path.parent) if path.is_file() else ():
        if event["event"] == "dropped":
            counts[event.get("reason", "?")] = counts.get(event.get("reason", "?"), 0) + 1
    return [f"{count} ({reason})" for reason, count in counts.items()]
