"""bench attribution: is time charged to its cause? The default job at lag 0, with a delay in one place at a time.

Every injected delay is a span in the run's trace. The benchmark follows each one. It asks at which instants the delay
held up the trainer, and to which part of the step these instants were charged. It compares no two runs for this, so
other work on the machine does not change the answer.

Whether a delay held up the trainer is decided from where things were, and never from a charge (`held_up`):

- A delay over a group holds up that group. The trainer is held up while it waits for the group.
- A delay of the engine's step holds up each group that is in the generator: from the issue of its ticket until its last
  token. At lag 0 a generator works only on groups whose weights it has.
- A delay of a group's rewards holds up that group, and no other.
- A delay in a logprob actor also holds up each group that waits there: from the end of its rewards until its own
  logprob pass is over.
- A delay in the queue between the two holds up the group that is held back, and no other.
- A delay of a version holds up each group that needs this version. It also holds up the trainer between its last
  group and its update, because the trainer waits there until the broadcast is over.
- A delay in the trainer holds up the trainer.

The rest of a delay is hidden. For example, a generator sleeps while the awaited group is already in logprob.

The charge is that of `critical_path`. The trainer's own work there is one piece, and its spans say what it did: the
seconds of each step's `time/train` and `time/prepare` are those of these spans.

Two runs with generation slowed by different amounts test the what-if answers. A run that records nothing shows what
recording costs.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from asyncspec import config as configuration
from asyncspec.bench.harness import Benchmark, Samples, median, plot_parts
from asyncspec.bench.jobs import run_job
from asyncspec.timing import timeline, whatif
from asyncspec.timing.attribution import PARTS, Segment, critical_path
from asyncspec.timing.exporters import read_trace
from asyncspec.timing.spans import Recorder
from asyncspec.wire.messages import GroupRecord, Span, StepDone

STEPS, SKIP = 12, 2
# place: (seconds of one delay, about one second per step in total; the part that must be charged).
DELAYS = {
    "generate": (0.05, "exposed_generation"),
    "reward": (0.125, "exposed_reward"),
    "queue": (1.0, "transport"),
    "logprob": (0.06, "exposed_logprob"),
    "broadcast": (1.0, "prepare"),
    "train": (0.06, "train"),
}
FASTER = 0.02  # seconds of a shorter delay of generate, to test the what-if answer
ENOUGH_S = 0.1  # a step: where less of a delay held up the trainer, its charge says nothing

Stretch = tuple[float, float]  # start and end, in seconds of the run's clock
ALWAYS, NEVER = (-math.inf, math.inf), (math.inf, -math.inf)


class Trace(NamedTuple):
    """What a run's trace says, on the host."""

    delays: dict[str, list[tuple[str, Span]]]  # by place: actor and delay
    work: dict[int, list[Span]]  # by step: what the trainer did, in order
    scored_by: dict[int, str]  # by ticket: the logprob actor

    @classmethod
    def of(cls, spans: Iterable[tuple[str, Span]]) -> Trace:
        """Sort the spans of a run, each with its actor."""
        trace = cls({place: [] for place in DELAYS}, {}, {})
        for actor, span in sorted(spans, key=lambda item: item[1].start):
            if span.name.startswith("delay "):
                trace.delays[span.name.removeprefix("delay ")].append((actor, span))
            elif actor == "trainer" and span.name in ("train", "prepare"):
                trace.work.setdefault(span.step, []).append(span)
            elif span.name == "logprob":
                trace.scored_by[span.ticket] = actor
        return trace


class AttributionBenchmark(Benchmark):
    name = "attribution"
    repeats = 1
    # Runs that are compared are neighbors, because the machine changes its speed.
    variants = ("unrecorded", "none", "generate", "faster", *(place for place in DELAYS if place != "generate"))
    columns = ("step_s", "injected_s", "held_up_s", "found")

    def __init__(self, overrides: Sequence[str], out: Path) -> None:
        self.overrides, self.out = list(overrides), out
        self._slowed: tuple | None = None  # the last run with `generate` delayed: its steps, and its generation

    def measure(self, variant: str, repetition: int) -> dict[str, float]:
        run_dir = self.out / f"{variant}-{repetition}"
        delays = {place: f"{place}={seconds}" for place, (seconds, _) in DELAYS.items()}
        delays["faster"] = f"generate={FASTER}"
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
            f"deployment.delays={delays.get(variant, '')}",
            f"deployment.record={variant != 'unrecorded'}",
            f"seed={repetition}",
            *self.overrides,
        )[SKIP:]
        steps, recorded = list(timeline.read(run_dir)), read_trace(run_dir)
        measured = {f"{part}_s": statistics.fmean(row[f"time/{part}"] for row in rows) for part in PARTS}
        measured |= {
            "step_s": statistics.fmean(row["time/step"] for row in rows),
            "generation_s": statistics.fmean(row["time/generation"] for row in rows),
            "sum_error": max(abs(sum(row[f"time/{part}"] for part in PARTS) / row["time/step"] - 1) for row in rows),
            "other_share": statistics.median(row["time/other"] / row["time/step"] for row in rows),
            "spans_per_s": len(recorded) / (steps[-1].end - steps[0].start),
        }
        if variant in DELAYS:
            measured |= follow(variant, steps[SKIP:], Trace.of(recorded))
        if variant == "generate":
            self._slowed = (steps, measured["generation_s"])
        if variant == "faster" and self._slowed is not None:
            steps, generation_s = self._slowed
            change = whatif.Change(generation=generation_s / measured["generation_s"])
            slots = configuration.load("tiny", self.overrides).engine.slots
            (measured["predicted_s"],) = whatif.predicted(steps, 0, slots, [change])
        return measured

    def headline(self, samples: Samples) -> dict[str, float]:
        charged = {place: shares(samples[place]) for place in DELAYS}
        found = {place: charged[place][part] for place, (_, part) in DELAYS.items()}
        wrongly = {
            place: max(share for other, share in charged[place].items() if other != part)
            for place, (_, part) in DELAYS.items()
        }
        unknown = any(map(math.isnan, found.values()))
        return {
            "injected_found_min": math.nan if unknown else min(found.values()),
            "charged_wrongly_max": math.nan if unknown else max(wrongly.values()),
            "recording_overhead": median(samples, "none", "spans_per_s") * span_cost_s(),
            "step_recorded_over_unrecorded": statistics.median(
                a["step_s"] / b["step_s"] for a, b in zip(samples["none"], samples["unrecorded"])
            ),
            "span_cost_us": 1e6 * span_cost_s(),
            "span_cost_off_us": 1e6 * span_cost_s(False),
            "whatif_error": statistics.median(abs(s["predicted_s"] / s["step_s"] - 1) for s in samples["faster"]),
            "parts_sum_error_max": max(s["sum_error"] for v in self.variants for s in samples[v]),
            "other_share_none": median(samples, "none", "other_share"),
            **{f"found_{place}": share for place, share in found.items()},
            **{f"wrongly_{place}": share for place, share in wrongly.items()},
            **{f"held_up_{place}_s": median(samples, place, "held_up_s") for place in DELAYS},
        }

    def plot(self, axes, samples: Samples) -> None:
        """Draw what the delays that held up the trainer were charged to."""
        charged = {
            place: [{"step_s": s["held_up_s"]} | {f"{part}_s": s[f"charged_{part}_s"] for part in PARTS} for s in runs]
            for place, runs in samples.items()
            if place in DELAYS
        }
        plot_parts(axes, charged, tuple(charged))
        axes.set_xlabel("seconds per step in which a delay held up the trainer, by what they were charged to")


def follow(place: str, steps: Sequence[StepDone], trace: Trace) -> dict[str, float]:
    """Return, in seconds per step, how much delay was injected in this place, how much of it held up the trainer, and
    to which parts that was charged.
    """
    injected, charged = 0.0, dict.fromkeys(PARTS, 0.0)
    for step in steps:
        path = list(charges(step, trace.work.get(step.step, ())))
        for actor, delay in trace.delays[place]:
            injected += common((delay.start, delay.end), (step.start, step.end))
            for stretch in held_up(place, actor, delay, step, trace):
                for segment in path:
                    charged[segment.part] += common(stretch, (segment.start, segment.end))
    measured = {
        "injected_s": injected / len(steps),
        "held_up_s": sum(charged.values()) / len(steps),
        **{f"charged_{part}_s": seconds / len(steps) for part, seconds in charged.items()},
    }
    return measured | {"found": shares([measured])[DELAYS[place][1]]}


def shares(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the share of each part in the delay that held up the trainer in some runs; NaN if it was not enough."""
    held_up_s = sum(run["held_up_s"] for run in runs)
    if held_up_s < ENOUGH_S * len(runs):
        return dict.fromkeys(PARTS, math.nan)
    return {part: sum(run[f"charged_{part}_s"] for run in runs) / held_up_s for part in PARTS}


def held_up(place: str, actor: str, delay: Span, step: StepDone, trace: Trace) -> Iterator[Stretch]:
    """Yield the stretches of a step in which an actor's delay held up the trainer, by the rule of this module."""
    if place == "train":
        stretches = [(step.start, step.end)]
    else:
        groups = {group.ticket_id: group for group in step.groups}
        stretches = [
            overlap((wait.start, wait.end), holds_up(place, actor, delay, groups[wait.ticket_id], step, trace))
            for wait in step.waits
        ]
        if place == "broadcast" and delay.version == step.step:
            stretches += before_update(trace.work.get(step.step, ()))
    for stretch in stretches:
        start, end = overlap(stretch, (delay.start, delay.end))
        if end > start:
            yield start, end


def holds_up(place: str, actor: str, delay: Span, group: GroupRecord, step: StepDone, trace: Trace) -> Stretch:
    """Return the stretch in which an actor's delay, while it lasts, holds up this group."""
    if place == "broadcast":
        return (
            ALWAYS if delay.version == step.step else NEVER
        )  # at lag 0 a step's groups need the version of its number
    if delay.ticket == group.ticket_id:
        return ALWAYS
    rewards = next(phase for phase in group.phases if phase.name == "reward")
    if place == "generate" and group.generator == actor:
        return group.phases[0].start, rewards.start
    if place == "logprob" and trace.scored_by.get(group.ticket_id) == actor:
        return rewards.end, group.phases[-1].end
    return NEVER


def before_update(work: Sequence[Span]) -> list[Stretch]:
    """Return the stretch between the trainer's last group and its update, in which it waits for a broadcast."""
    trained = [span.end for span in work if span.name == "train" and span.ticket >= 0]
    updates = [span.start for span in work if span.name == "train" and span.ticket < 0]
    return [(max(trained), min(updates))] if trained and updates else []


def charges(step: StepDone, work: Sequence[Span]) -> Iterator[Segment]:
    """Yield the critical path of a step, with the trainer's own work cut into what its spans say. Work without a span
    is charged to "other": it is too short to have one.
    """
    for segment in critical_path(step):
        if segment.ticket_id >= 0:
            yield segment
            continue
        at = segment.start
        for span in work:
            start, end = overlap((at, segment.end), (span.start, span.end))
            if end > start:
                yield Segment(at, start, "other", -1, "other")
                yield Segment(start, end, span.name, -1, span.name)
                at = end
        yield Segment(at, segment.end, "other", -1, "other")


def overlap(one: Stretch, other: Stretch) -> Stretch:
    """Return what two stretches have in common; its end is not after its start if that is nothing."""
    return max(one[0], other[0]), min(one[1], other[1])


def common(one: Stretch, other: Stretch) -> float:
    """Return the seconds that two stretches have in common."""
    start, end = overlap(one, other)
    return max(0.0, end - start)


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
