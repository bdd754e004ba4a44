"""bench adapter: the draft adapter never slows the trainer. The default job runs with an adapter that works, with one
that gets a tenth of its time, with one that is killed, and without one. Whole runs are interleaved.

The lag is 0, because then a core is free while the trainer trains. The slow adapter is a working one that SIGSTOP and
SIGCONT pause again and again.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from asyncspec.bench.harness import Benchmark, Samples, ratio
from asyncspec.bench.jobs import run_job

STEPS, SKIP = 20, 4  # the adapter is killed during the skipped steps
RUNS_S, STOPS_S = 0.02, 0.18


class AdapterBenchmark(Benchmark):
    name = "adapter"
    repeats = 3
    variants = ("off", "on", "slow", "killed")
    columns = ("step_s", "train_s", "updates", "dropped")

    def __init__(self, overrides: Sequence[str], out: Path) -> None:
        self.overrides, self.out = list(overrides), out

    def measure(self, variant: str, repetition: int) -> dict[str, float]:
        run_dir = self.out / f"{variant}-{repetition}"
        beside = {"slow": _slow_down, "killed": _kill}.get(variant)
        rows = run_job(
            run_dir,
            "--policy-lag",
            "0",
            "--steps",
            str(STEPS),
            "eval.every=0",
            "data.eval_prompts=8",
            "speculation.draft_length=3",
            f"draft.adapt={variant != 'off'}",
            "deployment.replacements=0",
            f"seed={repetition}",
            *self.overrides,
            beside=None if beside is None else lambda process: beside(process, run_dir),
        )[SKIP:]
        return {
            "step_s": statistics.median(row["time/step"] for row in rows),
            "train_s": statistics.median(row["time/train"] for row in rows),
            "other_share": sum(row["time/other"] for row in rows) / sum(row["time/step"] for row in rows),
            "updates": rows[-1].get("draft/updates", 0),
            "dropped": rows[-1].get("draft/groups_dropped", 0),
        }

    def headline(self, samples: Samples) -> dict[str, float]:
        return {
            f"{what}_{variant}_over_off": ratio(samples, f"{what}_s", variant, "off")
            for what in ("step", "train")
            for variant in self.variants[1:]
        }

    def plot(self, axes, samples: Samples) -> None:
        for place, variant in enumerate(self.variants):
            axes.plot([place] * len(samples[variant]), [s["step_s"] for s in samples[variant]], "o")
        axes.set_xticks(range(len(self.variants)), self.variants)
        axes.set_ylabel("seconds per step, median of a run")
        axes.set_ylim(bottom=0)


def _adapter(process, run_dir: Path) -> int:
    """Wait for the first trained step and return the adapter's process id; 0 if the run ended before."""
    metrics, log = run_dir / "metrics.jsonl", run_dir / "logs" / "draft_adapter.log"
    while process.poll() is None:
        if metrics.exists() and metrics.stat().st_size:
            return int(re.search(r"pid (\d+)", log.read_text()).group(1))
        time.sleep(0.05)
    return 0


def _slow_down(process, run_dir: Path) -> None:
    adapter = _adapter(process, run_dir)
    last = run_dir / "checkpoint" / "policy" / "config.json"
    try:
        while adapter and process.poll() is None and not last.exists():
            os.kill(adapter, signal.SIGSTOP)
            time.sleep(STOPS_S)
            os.kill(adapter, signal.SIGCONT)
            time.sleep(RUNS_S)
    except ProcessLookupError:  # the adapter has ended
        pass


def _kill(process, run_dir: Path) -> None:
    if adapter := _adapter(process, run_dir):
        os.kill(adapter, signal.SIGKILL)


def make(overrides: Sequence[str], out: Path) -> AdapterBenchmark:
    return AdapterBenchmark(overrides, out)
