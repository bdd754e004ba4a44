"""bench soak: a small job for half an hour, thousands of steps. The memory, files and threads of each process must
not grow.

Growth is the median over the last quarter of the steps minus the median over the second quarter. What fills only once
(caches, the allocator's pools) is full by the second quarter.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from asyncspec.bench.harness import Benchmark, Samples
from asyncspec.bench.jobs import run_job

MINUTES = 30.0
JOB = (
    "steps=1000000",
    "rl.groups_per_step=4",
    "rl.group_size=4",
    "data.eval_prompts=16",
    "eval.every=100",
    "sampling.max_response_tokens=64",
    "engine.slots=16",
    "trainer.optimizer.lr=1e-6",
)
WHAT = ("mb", "files", "threads")


class SoakBenchmark(Benchmark):
    name = "soak"
    repeats = 1
    variants = ("soak",)
    columns = ("steps", "minutes", *(f"growth_{what}" for what in WHAT))

    def __init__(self, overrides: Sequence[str], out: Path) -> None:
        self.overrides, self.out = list(overrides), out
        self.series: dict[str, list[float]] = {}

    def measure(self, variant: str, repetition: int) -> dict[str, float]:
        started = time.monotonic()
        rows = run_job(
            self.out / f"soak-{repetition}", *JOB, *self.overrides, beside=_interrupt_in_time, expected=(130,)
        )
        self.series = {key: [row[key] for row in rows if key in row] for key in rows[-1] if key.startswith("process/")}
        growth = {key: grown(values) for key, values in self.series.items()}
        worst = {what: max(value for key, value in growth.items() if key.endswith(f"_{what}")) for what in WHAT}
        return {
            "steps": len(rows),
            "minutes": (time.monotonic() - started) / 60,
            **{f"growth_{what}": value for what, value in worst.items()},
            **{re.sub("^process/", "growth ", key): value for key, value in growth.items()},
        }

    def headline(self, samples: Samples) -> dict[str, float]:
        return {key: max(sample[key] for sample in samples["soak"]) for key in self.columns}

    def plot(self, axes, samples: Samples) -> None:
        for key, values in self.series.items():
            if key.endswith("_mb"):
                axes.plot(values, label=key.removeprefix("process/").removesuffix("_mb"))
        axes.set_xlabel("step")
        axes.set_ylabel("resident MB")
        axes.set_ylim(bottom=0)
        axes.legend()


def grown(values: Sequence[float]) -> float:
    """Return the growth from the second quarter to the last, in medians."""
    quarter = max(1, len(values) // 4)
    return statistics.median(values[-quarter:]) - statistics.median(values[quarter : 2 * quarter] or values[:1])


def _interrupt_in_time(process) -> None:
    until = time.monotonic() + 60 * MINUTES
    while process.poll() is None and time.monotonic() < until:
        time.sleep(1)
    if process.poll() is None:
        os.kill(process.pid, signal.SIGINT)


def make(overrides: Sequence[str], out: Path) -> SoakBenchmark:
    return SoakBenchmark(overrides, out)
