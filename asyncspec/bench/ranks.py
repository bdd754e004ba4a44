"""bench ranks: trainers of 1, 2 and 4 ranks, and one that divides its matrices, learn equally well. Each runs the
first half of the default job.

Accuracy is measured on the held-out prompts, before the first step and after the last. Runs of the same configuration
differ by two to three points. On one machine the ranks share its cores, so their steps are slower. Ranks are for
models that do not fit on one device; this benchmark does not show that.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from asyncspec.bench.harness import Benchmark, Samples
from asyncspec.bench.jobs import job_dir, run_job

STEPS = 60
SETTINGS = {
    "1": (),
    "2": ("trainer.ranks=2",),
    "4": ("trainer.ranks=4",),
    "2, tensor parallel": ("trainer.ranks=2", "trainer.tensor_parallel=2"),
}


class RanksBenchmark(Benchmark):
    name = "ranks"
    repeats = 1
    variants = tuple(SETTINGS)
    columns = ("accuracy_start", "accuracy_end", "step_s", "train_s", "prepare_share")

    def __init__(self, overrides: Sequence[str], out: Path) -> None:
        self.overrides, self.out = list(overrides), out

    def measure(self, variant: str, repetition: int) -> dict[str, float]:
        rows = run_job(
            job_dir(self.out, variant, repetition),
            f"steps={STEPS}",
            f"seed={repetition}",
            *SETTINGS[variant],
            *self.overrides,
        )
        accuracy = [row["eval/score"] for row in rows if row.get("eval/score") is not None]
        return {
            "accuracy_start": accuracy[0],
            "accuracy_end": accuracy[-1],
            "step_s": statistics.median(row["time/step"] for row in rows),
            "train_s": statistics.median(row["time/train"] for row in rows),
            "lag_max": max(row["lag/max"] for row in rows),
            "prepare_share": sum(row["time/prepare"] for row in rows) / sum(row["time/step"] for row in rows),
        }

    def headline(self, samples: Samples) -> dict[str, float]:
        gains = {
            variant: statistics.fmean(s["accuracy_end"] - s["accuracy_start"] for s in samples[variant])
            for variant in self.variants
        }
        return {
            **{f"gain_{variant.replace(', ', '_').replace(' ', '_')}": gain for variant, gain in gains.items()},
            "gain_spread": max(gains.values()) - min(gains.values()),
        }

    def plot(self, axes, samples: Samples) -> None:
        for place, variant in enumerate(self.variants):
            for s in samples[variant]:
                axes.plot([place, place], [s["accuracy_start"], s["accuracy_end"]], "o-")
        axes.set_xticks(range(len(self.variants)), self.variants)
        axes.set_ylabel("held-out accuracy, before and after")
        axes.set_ylim(0, 1)


def make(overrides: Sequence[str], out: Path) -> RanksBenchmark:
    return RanksBenchmark(overrides, out)
