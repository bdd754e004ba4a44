"""bench algorithms: each loss, off-policy correction and way to take a step learns the default job.

Each variant changes some fields of the default job and runs its first quarter, with one seed for each repetition. All
variants have the default learning rate and the same held-out prompts. Accuracy is measured before the first step and
after the last. Runs of one variant differ by two to three points, so this says what learns, not what is best.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from asyncspec.bench.harness import Benchmark, Samples
from asyncspec.bench.jobs import job_dir, run_job

STEPS, HELD_OUT = 30, 256
SETTINGS = {
    "ppo, token weights truncated": (),
    "ppo with dual clip": ("rl.clip_dual=3",),
    "cispo": ("rl.loss_type=cispo", "rl.clip_low=1"),
    "gspo": ("rl.loss_type=gspo", "rl.loss_aggregation=seq-mean-token-mean", "rl.clip_low=3e-4", "rl.clip_high=4e-4"),
    "token weights masked": ("rl.correction_action=mask", "rl.correction_low=0.5", "rl.correction_high=5"),
    "response weights truncated": ("rl.correction_level=sequence",),
    "response weights masked": (
        "rl.correction_level=sequence",
        "rl.correction_action=mask",
        "rl.correction_low=0.5",
    ),
    "no correction": ("rl.correction_action=none",),
    "dr_grpo": ("rl.advantage_estimator=dr_grpo", "rl.loss_aggregation=seq-mean-token-sum-norm"),
    "rloo": ("rl.advantage_estimator=rloo",),
    "reinforce_plus_plus": ("rl.advantage_estimator=reinforce_plus_plus",),
    "reinforce_plus_plus_baseline": ("rl.advantage_estimator=reinforce_plus_plus_baseline",),
    "four optimizer steps a batch": ("rl.num_iterations=2", "rl.mini_batch_size=8"),
    "dynamic sampling": ("rl.dynamic_sampling=replace",),
    "dapo": ("--config", "dapo"),
}


def interval(measured: Sequence[dict[str, float]]) -> tuple[float, float]:
    """Return the 95% interval of the mean gain: that of a difference of two shares, with the rollouts of all runs
    taken as independent.
    """
    count = HELD_OUT * len(measured)
    before, after = (statistics.fmean(s[key] for s in measured) for key in ("accuracy_start", "accuracy_end"))
    wide = 1.96 * math.sqrt((before * (1 - before) + after * (1 - after)) / count)
    return after - before - wide, after - before + wide


class AlgorithmsBenchmark(Benchmark):
    name = "algorithms"
    repeats = 2
    variants = tuple(SETTINGS)
    columns = ("accuracy_start", "accuracy_end", "gain", "clipped", "without_signal", "step_s")

    def __init__(self, overrides: Sequence[str], out: Path) -> None:
        self.overrides, self.out = list(overrides), out

    def measure(self, variant: str, repetition: int) -> dict[str, float]:
        rows = run_job(
            job_dir(self.out, variant, repetition),
            *SETTINGS[variant],
            f"steps={STEPS}",
            f"seed={repetition}",
            f"data.eval_prompts={HELD_OUT}",
            *self.overrides,
        )
        accuracy = [row["eval/score"] for row in rows if row.get("eval/score") is not None]
        return {
            "accuracy_start": accuracy[0],
            "accuracy_end": accuracy[-1],
            "gain": accuracy[-1] - accuracy[0],
            "clipped": statistics.fmean(row.get("ppo/clipped", 0.0) for row in rows),
            "without_signal": statistics.fmean(row["groups/without_signal"] for row in rows),
            "lag_max": max(row["lag/max"] for row in rows),
            "step_s": statistics.median(row["time/step"] for row in rows),
        }

    def headline(self, samples: Samples) -> dict[str, float]:
        lowest = {variant: interval(measured)[0] for variant, measured in samples.items()}
        return {
            "learned": sum(low > 0 for low in lowest.values()),
            "variants": len(lowest),
            "smallest_lower_bound": min(lowest.values()),
        }

    def plot(self, axes, samples: Samples) -> None:
        for place, measured in enumerate(samples.values()):
            low, high = interval(measured)
            axes.plot([low, high], [place, place], color="#2f6db5")
            axes.plot([s["gain"] for s in measured], [place] * len(measured), "o", color="#2f6db5", markersize=4)
        axes.set_yticks(range(len(samples)), list(samples), fontsize=7)
        axes.invert_yaxis()
        axes.axvline(0, color="black", linewidth=0.6)
        axes.set_xlabel(f"gain of held-out accuracy in {STEPS} steps: each run, and the 95% interval of the mean")


def make(overrides: Sequence[str], out: Path) -> AlgorithmsBenchmark:
    return AlgorithmsBenchmark(overrides, out)
