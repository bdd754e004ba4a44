"""bench learning: whether speculation changes what is learned.

The first part of the default job, with speculation off and on at lag 0 and 1, one seed for each repetition. A run's
result is the mean of its last three evaluations on the same held-out prompts. The difference that speculation makes is
taken for each seed, as the mean over the lags, so that the seeds are independent. With --full then lags 0, 1, 2 and 4
too, each with the off-policy correction and without it, all with speculation.

Equivalence is claimed only if the 90% interval of the difference lies within EQUAL either way: two one-sided tests at
5% (Schuirmann, 1987, doi:10.1007/BF01068419). Otherwise `verdict` says what was shown.
"""

from __future__ import annotations

import math
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.table import Table
from scipy.stats import t as student

from asyncspec.bench.harness import Benchmark, Samples
from asyncspec.bench.jobs import job_dir, run_job
from asyncspec.errors import UserError
from asyncspec.timing.metrics import scores_by_version

STEPS, EVAL_EVERY, LAST = 48, 8, 3  # steps of a run, between evaluations, and evaluations that make its result
EQUAL = 0.05  # the largest difference of held-out accuracy that counts as none
LAGS, MORE_LAGS = (0, 1), (0, 1, 2, 4)
_PLAIN = {f"lag {lag}, {what}": (lag, what) for lag in LAGS for what in ("without speculation", "with speculation")}
_MORE = {f"lag {lag}, {what}": (lag, what) for lag in MORE_LAGS for what in ("corrected", "not corrected")}
_FIELDS = {
    "without speculation": ("speculation.method=none",),
    "with speculation": (),
    "corrected": (),
    "not corrected": ("rl.correction_action=none",),
}


def interval(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Return the two-sided interval of the mean of normally distributed values, by Student's t; NaN for one value."""
    if len(values) < 2:
        return math.nan, math.nan
    wide = float(student.ppf((1 + confidence) / 2, len(values) - 1)) * standard_error(values)
    return statistics.fmean(values) - wide, statistics.fmean(values) + wide


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean; NaN for one value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def smallest_detectable(values: Sequence[float], power: float = 0.8, level: float = 0.05) -> float:
    """Return the smallest difference from 0 that a two-sided t-test of so many values, which scatter like these, finds
    with this power: (t(1 - level / 2) + t(power)) standard errors.
    """
    freedom = len(values) - 1
    if freedom < 1:
        return math.nan
    return float(student.ppf(1 - level / 2, freedom) + student.ppf(power, freedom)) * standard_error(values)


def equivalent(differences: Sequence[float]) -> bool:
    """Whether the 90% interval of the differences lies within EQUAL either way."""
    low, high = interval(differences, 0.9)
    return -EQUAL < low and high < EQUAL


def verdict(differences: Sequence[float]) -> str:
    """Return in a sentence what the differences show."""
    low, high = interval(differences, 0.9)
    if math.isnan(low):
        return "One seed shows no difference and no equivalence"
    if equivalent(differences):
        return f"Speculation on and off are equivalent within {EQUAL:g}"
    if low > EQUAL or high < -EQUAL:
        return f"Speculation changes the accuracy by more than {EQUAL:g}"
    seen = smallest_detectable(differences)
    return f"Equivalence within {EQUAL:g} is not shown: the test sees differences from {seen:.3f} on"


class LearningBenchmark(Benchmark):
    name = "learning"
    repeats, full_repeats = 8, 8
    variants, full_variants = tuple(_PLAIN), tuple(_MORE)
    columns = ("accuracy_start", "accuracy_end", "reward_end", "lag_max", "acceptance_length", "step_s", "seconds")

    def __init__(self, overrides: Sequence[str], out: Path) -> None:
        self.overrides, self.out = list(overrides), out

    def measure(self, variant: str, repetition: int) -> dict[str, float]:
        lag, what = (_PLAIN | _MORE)[variant]
        directory = job_dir(self.out, variant, repetition)
        shutil.rmtree(directory, ignore_errors=True)  # of a sitting that was cut short
        rows = run_job(
            directory,
            "--policy-lag",
            str(lag),
            f"steps={STEPS}",
            f"eval.every={EVAL_EVERY}",
            f"seed={repetition}",
            "checkpoint.every=0",
            "eval.exact=true",  # each point of a curve is one version's
            *_FIELDS[what],
            *self.overrides,
        )
        found = scores_by_version(rows)
        if not (values := list(found.values())):
            raise UserError(f"bench learning: {variant}: the run had no evaluation; expected eval.every of 1 or more")
        return {
            "accuracy_start": values[0],
            "accuracy_end": statistics.fmean(values[-LAST:]),
            **{f"accuracy_{version:.0f}": score for version, score in found.items()},
            "reward_end": statistics.fmean(row["reward/mean"] for row in rows[-EVAL_EVERY:]),
            "lag_max": max(row["lag/max"] for row in rows),
            "acceptance_length": statistics.fmean(row["spec/acceptance_length"] for row in rows),
            "step_s": statistics.median(row["time/step"] for row in rows),
            "seconds": sum(row["time/step"] for row in rows),
        }

    def differences(self, samples: Samples) -> list[float]:
        """Return what speculation adds to the final accuracy, for each seed: the mean over the lags."""

        def ends(lag: int, what: str) -> list[float]:
            return [sample["accuracy_end"] for sample in samples[f"lag {lag}, {what} speculation"]]

        by_lag = [np.subtract(ends(lag, "with"), ends(lag, "without")) for lag in LAGS]
        return np.mean(by_lag, axis=0).tolist()

    def recovered(self, samples: Samples, lag: int) -> list[float]:
        """Return what the off-policy correction adds to the final accuracy at a lag, for each seed."""
        corrected, plain = (samples[f"lag {lag}, {what}"] for what in ("corrected", "not corrected"))
        return [one["accuracy_end"] - other["accuracy_end"] for one, other in zip(corrected, plain, strict=True)]

    def headline(self, samples: Samples) -> dict[str, float]:
        found = self.differences(samples)
        low, high = interval(found, 0.95)
        return {
            "difference": statistics.fmean(found),
            "difference_low": low,
            "difference_high": high,
            "smallest_detectable": smallest_detectable(found),
            "equivalent": float(equivalent(found)),
            "seeds": len(found),
        }

    def tables(self, samples: Samples) -> list[Table]:
        title = f"{verdict(self.differences(samples))}.\nFinal held-out accuracy, mean over the seeds"
        table = Table(title=title, title_justify="left")
        for column in ("variant", "accuracy", "95% interval"):
            table.add_column(column, justify="left" if column == "variant" else "right")
        for variant, measured in samples.items():
            ends = [sample["accuracy_end"] for sample in measured]
            low, high = interval(ends, 0.95)
            table.add_row(variant, f"{statistics.fmean(ends):.3f}", f"{low:.3f} to {high:.3f}")
        if not samples.keys() & _MORE.keys():
            return [*super().tables(samples), table]
        recovered = Table(title="What the correction adds to the final accuracy, for each seed", title_justify="left")
        for column in ("lag", "difference", "95% interval", "smallest detectable"):
            recovered.add_column(column, justify="right")
        for lag in MORE_LAGS:
            found = self.recovered(samples, lag)
            low, high = interval(found, 0.95)
            seen = smallest_detectable(found)
            recovered.add_row(str(lag), f"{statistics.fmean(found):.3f}", f"{low:.3f} to {high:.3f}", f"{seen:.3f}")
        return [*super().tables(samples), table, recovered]

    def plot(self, axes, samples: Samples) -> None:
        """Draw the mean curve of each plain variant, with the 95% interval of the mean."""
        for variant in self.variants:
            every = [
                {key for key in sample if key.startswith("accuracy_") and key[9:].isdigit()}
                for sample in samples[variant]
            ]
            versions = sorted(int(key[9:]) for key in set.intersection(*every))
            found = [[sample[f"accuracy_{version}"] for sample in samples[variant]] for version in versions]
            (line,) = axes.plot(versions, [statistics.fmean(each) for each in found], "o-", markersize=3, label=variant)
            if len(found[0]) > 1:
                low, high = zip(*(interval(each, 0.95) for each in found))
                axes.fill_between(versions, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("held-out accuracy: mean, 95% interval")
        axes.legend(fontsize=7)


def make(overrides: Sequence[str], out: Path) -> LearningBenchmark:
    return LearningBenchmark(overrides, out)
