"""bench end_to_end: the time to a held-out accuracy, from a synchronous run without speculation to an asynchronous one
with it.

Two settings: the default job as it is, and one whose synchronous step has the published share of generation, 65 to 72%
(arXiv 2604.26779); fewer samples at once make it so. Four modes in each, each with the split of two cores that is the
fastest for it; benchmarks/end_to_end has those that were tried. Because the policy's matrices are small, an actor is
slower with two threads than with one. The synchronous speculative mode has two logprob actors and two trainer ranks.

A run ends once the accuracy is reached, as the mean of two evaluations in a row, and the time is interpolated between
evaluations. It counts from the beginning of the first step, so loading is left out. An evaluation's responses share
the slots with those of the steps, and may come from several versions; its time is the middle of the first and the last.

The bounds follow from the shares of a synchronous step, R of generation, P of logprob and T of training, and from the
acceptance length a (Amdahl, 1967): with speculation 1 / (1 - R + R / a), with asynchrony 1 / max(R, P, T), with both
1 / max(R / a, P, T). They take a stage to be as fast as in a synchronous run, with a processor of its own. Here three
busy actors share two cores.
"""

from __future__ import annotations

import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.table import Table

from asyncspec.bench.harness import Benchmark, Samples, median, ratio
from asyncspec.bench.jobs import job_dir, run_job
from asyncspec.errors import UserError
from asyncspec.timing.metrics import read_rows, scores_by_version

TARGET = 0.6  # held-out accuracy; the shipped policy begins at about 0.35
STEPS, EVAL_EVERY = 72, 4  # the most steps of a run, and steps between evaluations
SKIP = 1  # the first step has an evaluation and the calibration of the draft length in it
SETTINGS = {"default": (), "generation-bound": ("engine.slots=4",)}
_NO_DRAFT = ("speculation.method=none",)
MODES = {
    "synchronous": ("--policy-lag", "0", *_NO_DRAFT),
    "synchronous speculative": ("--policy-lag", "0", "deployment.logprobs=2", "trainer.ranks=2"),
    "asynchronous": ("--policy-lag", "1", *_NO_DRAFT),
    "asynchronous speculative": ("--policy-lag", "1"),
}
FIRST, LAST = "synchronous", "asynchronous speculative"
STAGES = ("generation", "logprob", "train")
_VARIANTS = {f"{setting}, {mode}": (setting, mode) for setting in SETTINGS for mode in MODES}


def curve(rows: Sequence[dict]) -> list[tuple[float, float]]:
    """Return points of a learning curve: the seconds from the beginning of the first step until two evaluations in a
    row have been passed, and their mean. The first point is the first evaluation's alone, at 0.

    Args:
        rows: rows of metrics.jsonl. `time/step` may be missing in some.
    """
    ends, at, last = {0: 0.0}, 0.0, {}
    for row in rows:
        if "time/step" in row:
            at += row["time/step"]
            ends[row["policy_version"]] = at
        if row.get("eval/score") is not None:
            last[row["eval/policy_version"]] = row.get("eval/policy_version_max", row["eval/policy_version"])
    found = list(scores_by_version(rows).items())
    later = [
        ((ends[version] + ends[min(last[version], max(ends))]) / 2, (before + score) / 2)
        for (_, before), (version, score) in zip(found, found[1:])
    ]
    return [(0.0, score) for _, score in found[:1]] + later


def reached(rows: Sequence[dict], target: float) -> float | None:
    """Return the seconds until a learning curve reached the target, interpolated; None if it did not."""
    points = curve(rows)
    for before, (seconds, mean) in zip(points, points[1:]):
        if mean >= target:
            if before[1] >= target:
                return before[0]
            return before[0] + (seconds - before[0]) * (target - before[1]) / (mean - before[1])
    return None


def to_target_s(rows: Sequence[dict], what: str) -> float:
    """Return the seconds until a run reached TARGET.

    Args:
        what: the run, for messages.

    Raises:
        UserError: it did not reach it, or began there.
    """
    if (seconds := reached(rows, TARGET)) is None:
        raise UserError(f"{what}: no accuracy of {TARGET:g} within {len(rows)} steps")
    if not seconds:
        raise UserError(f"{what}: the policy has an accuracy of {TARGET:g} untrained")
    return seconds


def bounds(generation: float, logprob: float, train: float, acceptance: float) -> dict[str, float]:
    """Return the speedup over the synchronous mode that each mode would have at most, if stages did not slow one
    another down and drafts cost nothing.

    Args:
        generation, logprob, train: shares of a synchronous step without speculation in which it does this.
        acceptance: tokens per verification, with speculation.
    """
    return {
        "synchronous": 1.0,
        "synchronous speculative": 1 / (1 - generation + generation / acceptance),
        "asynchronous": 1 / max(generation, logprob, train),
        "asynchronous speculative": 1 / max(generation / acceptance, logprob, train),
    }


def watch(run_dir: Path, process: subprocess.Popen) -> None:
    """Interrupt a run once it has reached the target."""
    metrics = run_dir / "metrics.jsonl"
    while process.poll() is None:
        time.sleep(0.5)
        if metrics.exists() and reached(read_rows(metrics), TARGET) is not None:
            process.send_signal(signal.SIGINT)
            process.wait()


class EndToEndBenchmark(Benchmark):
    name = "end_to_end"
    repeats, full_repeats = 5, 12
    variants = tuple(_VARIANTS)
    columns = ("to_target_s", "steps", "step_s", "generation_share", "acceptance_length")

    def __init__(self, overrides: Sequence[str], out: Path) -> None:
        self.overrides, self.out = list(overrides), out

    def measure(self, variant: str, repetition: int) -> dict[str, float]:
        setting, mode = _VARIANTS[variant]
        directory = job_dir(self.out, variant, repetition)
        shutil.rmtree(directory, ignore_errors=True)  # of a sitting that was cut short
        rows = run_job(
            directory,
            *MODES[mode],
            f"steps={STEPS}",
            f"eval.every={EVAL_EVERY}",
            f"seed={repetition}",
            "checkpoint.every=0",
            *SETTINGS[setting],
            *self.overrides,
            beside=partial(watch, directory),
            expected=(0, 130),
        )
        steady = rows[SKIP:]
        step = sum(row["time/step"] for row in steady)
        return {
            "to_target_s": to_target_s(rows, f"bench end_to_end: {variant}"),
            "steps": float(len(rows)),
            "step_s": statistics.median(row["time/step"] for row in steady),
            **{f"{stage}_share": sum(row[f"time/{stage}"] for row in steady) / step for stage in STAGES},
            "acceptance_length": statistics.fmean(row["spec/acceptance_length"] for row in steady),
        }

    def headline(self, samples: Samples) -> dict[str, float]:
        return {
            "speedup_default": self._speedup(samples, "default", LAST),
            "speedup_generation_bound": self._speedup(samples, "generation-bound", LAST),
            "generation_share": self._share(samples, "generation-bound"),
            "generation_share_default": self._share(samples, "default"),
        }

    def _speedup(self, samples: Samples, setting: str, mode: str) -> float:
        return ratio(samples, "to_target_s", f"{setting}, {FIRST}", f"{setting}, {mode}")

    def _share(self, samples: Samples, setting: str, stage: str = "generation") -> float:
        return median(samples, f"{setting}, {FIRST}", f"{stage}_share")

    def tables(self, samples: Samples) -> list[Table]:
        table = Table(title=f"Time to a held-out accuracy of {TARGET:g}", title_justify="left")
        for column in ("setting", "mode", "seconds", "speedup", "bound", "by step"):
            table.add_column(column, justify="left" if column in ("setting", "mode") else "right")
        for setting in SETTINGS:
            shares = [self._share(samples, setting, stage) for stage in STAGES]
            most = bounds(*shares, median(samples, f"{setting}, {LAST}", "acceptance_length"))
            for mode in MODES:
                measured = samples[f"{setting}, {mode}"]
                seconds = statistics.median(sample["to_target_s"] for sample in measured)
                by_step = ratio(samples, "step_s", f"{setting}, {FIRST}", f"{setting}, {mode}")
                speedup = self._speedup(samples, setting, mode)
                table.add_row(setting, mode, f"{seconds:.0f}", f"{speedup:.2f}", f"{most[mode]:.2f}", f"{by_step:.2f}")
        return [*super().tables(samples), table]

    def plot(self, axes, samples: Samples) -> None:
        for place, (variant, (setting, _)) in enumerate(_VARIANTS.items()):
            times = [sample["to_target_s"] for sample in samples[variant]]
            color = "#2f6db5" if setting == "default" else "#c9362b"
            axes.barh(place, statistics.median(times), color=color, alpha=0.5)
            axes.plot(times, [place] * len(times), "o", color=color, markersize=3)
        axes.set_yticks(range(len(_VARIANTS)), list(_VARIANTS), fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel(f"seconds to a held-out accuracy of {TARGET:g}: median, and each seed")


def make(overrides: Sequence[str], out: Path) -> EndToEndBenchmark:
    return EndToEndBenchmark(overrides, out)
