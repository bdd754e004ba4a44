"""bench async: what the policy lag hides. The default job at policy lag 0 and at 1; whole runs are interleaved.

Seconds are means over the steps of a run without the first two, which fill the pipeline. They are means, not medians,
because an occasional long rollout is what exposes generation. Generation is exposed while the trainer waits for
rollouts that are not generated yet, as the groups' histories show.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from asyncspec.bench.harness import Benchmark, Samples, median, plot_parts, ratio
from asyncspec.bench.jobs import run_job
from asyncspec.timing.attribution import PARTS

STEPS = 24
SKIP = 2


class AsyncBenchmark(Benchmark):
    name = "async"
    repeats = 3
    variants = ("lag 0", "lag 1")
    columns = (
        "step_s",
        "exposed_generation_s",
        "exposed_logprob_s",
        "train_s",
        "generation_s",
        "lag_max",
        "tokens_per_s",
    )

    def __init__(self, overrides: Sequence[str], out: Path) -> None:
        self.overrides, self.out = list(overrides), out

    def measure(self, variant: str, repetition: int) -> dict[str, float]:
        lag = variant.split()[1]
        run_dir = self.out / f"lag{lag}-{repetition}"
        # No evaluation and no draft adaptation: they use the same cores and blur the comparison.
        rows = run_job(
            run_dir,
            "--policy-lag",
            lag,
            "--steps",
            str(STEPS),
            "eval.every=0",
            "data.eval_prompts=8",
            "draft.adapt=false",
            f"seed={repetition}",
            *self.overrides,
        )[SKIP:]

        def mean(key: str) -> float:
            return statistics.fmean(row[key] for row in rows)

        return {
            "step_s": mean("time/step"),
            **{f"{part}_s": mean(f"time/{part}") for part in PARTS},
            "generation_s": mean("time/generation"),
            "lag_max": max(row["lag/max"] for row in rows),
            "tokens_per_s": sum(row["throughput/tokens_per_s"] * row["time/step"] for row in rows)
            / sum(row["time/step"] for row in rows),
        }

    def headline(self, samples: Samples) -> dict[str, float]:
        return {
            "exposed_generation_lag0_s": median(samples, "lag 0", "exposed_generation_s"),
            "exposed_generation_lag1_s": median(samples, "lag 1", "exposed_generation_s"),
            "step_speedup_lag1": ratio(samples, "step_s", "lag 0", "lag 1"),
        }

    def plot(self, axes, samples: Samples) -> None:
        plot_parts(axes, samples, self.variants)


def make(overrides: Sequence[str], out: Path) -> AsyncBenchmark:
    return AsyncBenchmark(overrides, out)
