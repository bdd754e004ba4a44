"""bench calibration: whether one run on this machine predicts others that it has not seen.

The default job runs once and is calibrated, as `asyncspec simulate calibrate` does. Then each other setting is
predicted and run: draft lengths, policy lags, slots, generators. An error is the predicted step over the measured one,
minus 1. That of exposed generation is a share of the measured step. Runs have no evaluations.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from asyncspec.bench.harness import Benchmark, Samples, median
from asyncspec.bench.jobs import run_again
from asyncspec.simulate import calibrate
from asyncspec.simulate.machine import Measured

FIELDS = ("steps=40", "eval.every=0", "data.eval_prompts=8", "checkpoint.every=0")
SKIP = 3  # first steps, which fill the pipeline and warm up
SETTINGS = {  # other settings: how Measured.changed names them
    "as calibrated": {},
    "lag 0": {"lag": 0},
    "lag 2": {"lag": 2},
    "k=0": {"draft_length": 0},
    "k=1, lag 0": {"draft_length": 1, "lag": 0},
    "k=3": {"draft_length": 3},
    "16 slots": {"slots": 16},
    "k=3, lag 0, 16 slots": {"draft_length": 3, "lag": 0, "slots": 16},
    "2 generators": {"generators": 2},
}


def fields(setting: dict) -> list[str]:
    """Return the overrides of a setting."""
    names = {"lag": "policy_lag", "slots": "engine.slots", "generators": "deployment.generators"}
    found = [f"{names[name]}={value}" for name, value in setting.items() if name in names]
    if (k := setting.get("draft_length")) is not None:
        found.append(f"speculation.draft_length={k}" if k else "speculation.method=none")
    return found


class CalibrationBenchmark(Benchmark):
    name = "calibration"
    repeats = 1
    variants = tuple(SETTINGS)
    columns = ("predicted_s", "measured_s", "error", "exposed_error")

    def __init__(self, overrides: Sequence[str], out: Path) -> None:
        self.overrides, self.out = list(overrides), out
        self._measured: dict[int, Measured] = {}

    def _calibrated(self, repetition: int) -> Measured:
        """Return the calibrated run of a repetition, which is run at the first call."""
        if repetition not in self._measured:
            directory = self._run("calibrated", repetition, {})[0]
            self._measured[repetition] = measured = Measured.read(directory, calibrate.calibrate(directory))
            measured.fit_sharing()
        return self._measured[repetition]

    def _run(self, name: str, repetition: int, setting: dict) -> tuple[Path, list[dict]]:
        return run_again(self.out, name, repetition, *FIELDS, *fields(setting), *self.overrides)

    def measure(self, variant: str, repetition: int) -> dict[str, float]:
        measured = self._calibrated(repetition)
        predicted = measured.predicted(measured.changed(**SETTINGS[variant]))
        rows = self._run(variant, repetition, SETTINGS[variant])[1][SKIP:]
        step, exposed = (statistics.fmean(row[f"time/{key}"] for row in rows) for key in ("step", "exposed_generation"))
        return {
            "predicted_s": predicted.step_s,
            "measured_s": step,
            "error": predicted.step_s / step - 1,
            "predicted_exposed_s": predicted.exposed_generation_s,
            "measured_exposed_s": exposed,
            "exposed_error": (predicted.exposed_generation_s - exposed) / step,
        }

    def headline(self, samples: Samples) -> dict[str, float]:
        unseen = [name for name in self.variants if name != "as calibrated"]
        errors = {f"error {name}": median(samples, name, "error") for name in self.variants}
        return {
            "error_max": max(abs(median(samples, name, "error")) for name in unseen),
            "exposed_error_max": max(abs(median(samples, name, "exposed_error")) for name in unseen),
            **errors,
        }

    def plot(self, axes, samples: Samples) -> None:
        for key, marker, color in (("predicted", "x", "#c9362b"), ("measured", "D", "#2f6db5")):
            for part, alpha in (("", 1.0), ("exposed_", 0.4)):
                label = f"{key}{', exposed generation' if part else ''}"
                values = [median(samples, name, f"{key}_{part}s") for name in self.variants]
                axes.plot(values, list(self.variants), marker, color=color, alpha=alpha, label=label)
        axes.invert_yaxis()
        axes.set_xlabel("seconds of a step")
        axes.set_xlim(0)
        axes.legend(fontsize=7)


def make(overrides: Sequence[str], out: Path) -> CalibrationBenchmark:
    return CalibrationBenchmark(overrides, out)
