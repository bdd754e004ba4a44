"""bench what_if: whether a run that is replayed with a change tells what the change gives.

Each pair is a run, and the same run with a change. The first one is replayed with the change, as `asyncspec report`
does. The error is the predicted step over the second run's, minus 1. A step is the mean of all but the first two.

- another generator: mocked GPUs, one generator, and then two
- lag 2: mocked GPUs, long-tailed responses, lag 1 and then 2
- twice the threads: the default job at lag 0, one thread for each actor and then two. The second run says how fast
  each stage is with two threads; the replay predicts what this does to a step.
- shared cores: the default job, lag 0 and then 1. Five actors then share two cores and slow one another down, which the
  replay does not know. It is not part of `error_max`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from asyncspec import config as configuration
from asyncspec.bench.harness import Benchmark, Samples, median
from asyncspec.bench.jobs import run_again
from asyncspec.errors import UserError
from asyncspec.timing import timeline
from asyncspec.timing.whatif import SKIP, Change, predicted
from asyncspec.wire.messages import StepDone

STAGES = ("generation", "logprob", "train")  # their speeds in a Change, and their times in a row, have these names


class Pair(NamedTuple):
    """fields: of both runs. before, after: of one of them. change: what to replay the first run with; None: the stages'
    speeds in the second run over those in the first.
    """

    fields: Sequence[str]
    before: Sequence[str]
    after: Sequence[str]
    change: Change | None


_STEPS = ("steps=26", "eval.every=0", "checkpoint.every=0")
MOCKED = (
    *_STEPS,
    "data.eval_prompts=1",
    "engine.kind=mock",
    "trainer.kind=mock",
    "mock.gpus=4",
    "mock.time_scale=0.02",
    "rl.groups_per_step=16",
    "rl.group_size=8",
    "mock.logprob_s=10",
    "mock.prepare_s=2",
)
_DEFAULT = (*_STEPS, "data.eval_prompts=8", "draft.adapt=false")
_THREADS = ("engine.threads", "logprob.threads", "trainer.threads")
PAIRS = {
    "another generator": Pair(
        (*MOCKED, "policy_lag=1", "engine.slots=32", "mock.train_s=30"),
        ("deployment.generators=1",),
        ("deployment.generators=2",),
        Change(generators=1),
    ),
    "lag 2": Pair(
        (*MOCKED, "engine.slots=128", "mock.train_s=45", "mock.tokens_sigma=1.0"),
        ("policy_lag=1",),
        ("policy_lag=2",),
        Change(lag=1),
    ),
    "twice the threads": Pair(
        (*_DEFAULT, "policy_lag=0"),
        [f"{name}=1" for name in _THREADS],
        [f"{name}=2" for name in _THREADS],
        None,
    ),
    "shared cores": Pair(_DEFAULT, ("policy_lag=0",), ("policy_lag=1",), Change(lag=1)),
}


def mean(rows: Sequence[dict], key: str) -> float:
    return statistics.fmean(row[key] for row in rows[SKIP:])


class WhatIfBenchmark(Benchmark):
    name = "what_if"
    repeats = 3
    variants = tuple(PAIRS)
    columns = ("before_s", "predicted_s", "after_s", "error")

    def __init__(self, overrides: Sequence[str], out: Path) -> None:
        self.overrides, self.out = list(overrides), out

    def measure(self, variant: str, repetition: int) -> dict[str, float]:
        pair = PAIRS[variant]
        c = configuration.load("tiny", [*pair.fields, *pair.before, *self.overrides])
        steps, before = self._run(f"{variant} before", repetition, (*pair.fields, *pair.before))
        _, after = self._run(f"{variant} after", repetition, (*pair.fields, *pair.after))
        if len(steps) <= SKIP or len(after) <= SKIP:
            raise UserError(f"bench what_if: {variant}: {len(steps)} steps are too few; expected more than {SKIP}")
        speeds = {stage: mean(before, f"time/{stage}") / mean(after, f"time/{stage}") for stage in STAGES}
        changes, logprobs = [pair.change or Change(**speeds)], c.deployment.logprobs
        result = {
            "before_s": mean(before, "time/step"),
            "predicted_s": predicted(steps, c.policy_lag, c.engine.slots, changes, logprobs)[0],
            "after_s": mean(after, "time/step"),
            **{f"{stage}_speed": speed for stage, speed in speeds.items()},
        }
        return result | {"error": result["predicted_s"] / result["after_s"] - 1}

    def _run(self, name: str, repetition: int, fields: Sequence[str]) -> tuple[list[StepDone], list[dict]]:
        directory, rows = run_again(self.out, name, repetition, *fields, *self.overrides)
        return list(timeline.read(directory)), rows

    def headline(self, samples: Samples) -> dict[str, float]:
        errors = {f"error_{name.replace(' ', '_')}": median(samples, name, "error") for name in PAIRS}
        own = [abs(error) for name, error in errors.items() if name != "error_shared_cores"]
        return {"error_max": max(own), **errors}

    def plot(self, axes, samples: Samples) -> None:
        for place, name in enumerate(PAIRS):
            for key, marker in (("before_s", "o"), ("predicted_s", "x"), ("after_s", "D")):
                shown = {"label": key.removesuffix("_s")} if place == 0 else {}
                ratios = [sample[key] / sample["before_s"] for sample in samples[name]]
                color = {"o": "#8a8a8a", "x": "#c9362b", "D": "#2f6db5"}[marker]
                axes.plot(ratios, [place] * len(ratios), marker, color=color, alpha=0.7, **shown)
        axes.set_yticks(range(len(PAIRS)), list(PAIRS))
        axes.invert_yaxis()
        axes.set_xlabel("seconds of a step over those before the change")
        axes.legend(fontsize=7)


def make(overrides: Sequence[str], out: Path) -> WhatIfBenchmark:
    return WhatIfBenchmark(overrides, out)
