"""bench attribution: is time charged to its cause? The default job at lag 0, with a delay in one place at a time.

Each delayed run is compared with the run without delays of the same repetition. The step became longer: which share
of this growth was charged to the delayed place, and which share to generation, although the delay was elsewhere?

A charge to generation may be right in one case. While the generator sleeps over a reward, the trainer catches up, and
then no longer hides the generation that follows. So rewards are counted directly: of the injected sleep during which
the trainer waited, the shares that were charged to rewards and to generation.

Two runs with generation slowed by different amounts test the what-if answers. A run that records nothing shows what
recording costs.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from asyncspec.bench.harness import Benchmark, Samples, median, plot_parts
from asyncspec.bench.jobs import run_job
from asyncspec.timing import timeline, whatif
from asyncspec.timing.attribution import PARTS, WAITED, critical_path
from asyncspec.timing.spans import Recorder

STEPS, SKIP = 12, 2
# place: (seconds of one delay, about one second per step in total; the part that must be charged).
DELAYS = {
    "generate": (0.05, "exposed_generation"),
    "reward": (0.008, "exposed_reward"),
    "queue": (1.0, "transport"),
    "logprob": (0.06, "exposed_logprob"),
    "broadcast": (1.0, "prepare"),
    "train": (0.06, "train"),
}
FASTER = 0.02  # seconds of a shorter delay of generate, to test the what-if answer


class AttributionBenchmark(Benchmark):
    name = "attribution"
    repeats = 2
    variants = ("none", *DELAYS, "faster", "unrecorded")
    columns = ("step_s", *(f"{part}_s" for part in PARTS))

    def __init__(self, overrides: Sequence[str], out: Path) -> None:
        self.overrides, self.out = list(overrides), out
        self._slowed: tuple | None = None  # the last run with `generate` delayed: its steps, and its generation

    def measure(self, variant: str, repetition: int) -> dict[str, float]:
        run_dir = self.out / f"{variant}-{repetition}"
        delays = (
            f"generate={FASTER}"
            if variant == "faster"
            else f"{variant}={DELAYS[variant][0]}"
            if variant in DELAYS
            else ""
        )
        rows = run_job(
            run_dir,
            "--policy-lag",
            "0",
            "--steps",
            str(STEPS),
            "eval.every=0",
            "data.eval_prompts=0",
            "draft.adapt=false",
            "speculation.draft_length=3",
            f"deployment.delays={delays}",
            f"deployment.record={variant != 'unrecorded'}",
            f"seed={repetition}",
            *self.overrides,
        )[SKIP:]
        steps, recorded = list(timeline.read(run_dir)), spans(run_dir)
        measured = {f"{part}_s": statistics.fmean(row[f"time/{part}"] for row in rows) for part in PARTS}
        measured |= {
            "step_s": statistics.fmean(row["time/step"] for row in rows),
            "generation_s": statistics.fmean(row["time/generation"] for row in rows),
            "sum_error": max(abs(sum(row[f"time/{part}"] for part in PARTS) / row["time/step"] - 1) for row in rows),
            "other_share": statistics.median(row["time/other"] / row["time/step"] for row in rows),
            "spans_per_s": len(recorded) / (steps[-1].end - steps[0].start),
        }
        if variant == "reward":
            measured |= {
                f"asleep_{part}_s": seconds / len(rows) for part, seconds in asleep(recorded, steps[SKIP:]).items()
            }
        if variant == "generate":
            self._slowed = (steps, measured["generation_s"])
        if variant == "faster" and self._slowed is not None:
            steps, generation_s = self._slowed
            measured["predicted_s"] = whatif.predicted(
                steps, 0, whatif.Change(generation=generation_s / measured["generation_s"])
            )
        return measured

    def headline(self, samples: Samples) -> dict[str, float]:
        found, grew = {}, {}
        for place, (_, part) in DELAYS.items():
            pairs = list(zip(samples[place], samples["none"]))
            found[place] = statistics.median(
                (a[f"{part}_s"] - b[f"{part}_s"]) / (a["step_s"] - b["step_s"]) for a, b in pairs
            )
            if part != "exposed_generation":
                grew[place] = statistics.median(
                    max(0.0, a["exposed_generation_s"] - b["exposed_generation_s"]) / (a["step_s"] - b["step_s"])
                    for a, b in pairs
                )
        asleep_in = {
            part: statistics.median(
                s[f"asleep_{part}_s"] / sum(s[f"asleep_{other}_s"] for other in WAITED) for s in samples["reward"]
            )
            for part in ("exposed_reward", "exposed_generation")
        }
        return {
            "injected_found_min": min((found | {"reward": asleep_in["exposed_reward"]}).values()),
            "charged_wrongly_max": max((grew | {"reward": asleep_in["exposed_generation"]}).values()),
            "recording_overhead": median(samples, "none", "spans_per_s") * span_cost_s(),
            "step_recorded_over_unrecorded": statistics.median(
                a["step_s"] / b["step_s"] for a, b in zip(samples["none"], samples["unrecorded"])
            ),
            "span_cost_us": 1e6 * span_cost_s(),
            "span_cost_off_us": 1e6 * span_cost_s(False),
            "whatif_error": statistics.median(abs(s["predicted_s"] / s["step_s"] - 1) for s in samples["faster"]),
            "parts_sum_error_max": max(s["sum_error"] for v in self.variants for s in samples[v]),
            "other_share_none": median(samples, "none", "other_share"),
            **{f"grew_{place}": value for place, value in found.items()},
            **{f"reward_asleep_in_{part}": share for part, share in asleep_in.items()},
            **{f"generation_grew_{place}": value for place, value in grew.items()},
        }

    def plot(self, axes, samples: Samples) -> None:
        plot_parts(axes, samples, self.variants)


def spans(run_dir: Path) -> list[tuple[str, float, float]]:
    """Return name, start and end of each span on a host, from a run's trace."""
    events = json.loads((run_dir / "trace.json").read_text())
    origin = next(event["args"]["origin_s"] for event in events if event["name"] == "process_labels")
    return [
        (e["name"], origin + 1e-6 * e["ts"], origin + 1e-6 * (e["ts"] + e["dur"]))
        for e in events
        if e["ph"] == "X" and "device" not in e["args"]
    ]


def asleep(recorded: Sequence[tuple[str, float, float]], steps: Sequence) -> dict[str, float]:
    """Return for how many seconds of the steps' critical path the generator slept over a reward, by the part that
    these seconds were charged to.
    """
    sleeps = [(start, end) for name, start, end in recorded if name == "delay reward"]
    seconds = dict.fromkeys(PARTS, 0.0)
    for segment in (segment for step in steps for segment in critical_path(step)):
        seconds[segment.part] += sum(
            max(0.0, min(segment.end, until) - max(segment.start, since)) for since, until in sleeps
        )
    return seconds


def span_cost_s(recording: bool = True, count: int = 20_000) -> float:
    """Return the seconds that it takes to record a span, the median of seven rounds."""
    rounds = []
    for _ in range(7):
        recorder, start = Recorder(recording), time.perf_counter()
        for i in range(count):
            with recorder.span("a span", i, i, i):
                pass
        rounds.append((time.perf_counter() - start) / count)
    return statistics.median(rounds)


def make(overrides: Sequence[str], out: Path) -> AttributionBenchmark:
    return AttributionBenchmark(overrides, out)
