"""A figure of what the trainer and each group did during some steps."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from asyncspec.timing.attribution import COLORS, PARTS, critical_path
from asyncspec.wire.messages import StepDone

GANTT_STEPS = 4  # steps in one figure


def gantt(steps: Sequence[StepDone]) -> Figure:
    """Draw what the trainer and each group did during some steps: one row for the trainer, one for each group."""
    figure = Figure(figsize=(12, 0.9 + 0.045 * sum(len(s.groups) for s in steps) + 0.5), layout="constrained")
    axis = figure.subplots()
    zero, height, tall = steps[0].start, 0, 4
    for step in steps:
        for segment in critical_path(step):
            axis.broken_barh(
                [(segment.start - zero, segment.seconds)], (0, tall), color=COLORS[segment.part], linewidth=0
            )
        axis.axvline(step.end - zero, color="black", linewidth=0.6)
        axis.text(step.start - zero, -0.2, f"step {step.step}", fontsize=6)
    height = tall + 2
    colors = {
        "generate": COLORS["exposed_generation"],
        "resampled": "#e08078",
        "environment": COLORS["exposed_environment"],
        "reward": COLORS["exposed_reward"],
        "logprob": COLORS["exposed_logprob"],
        "weights": COLORS["prepare"],
        "swap": COLORS["prepare"],
        "logprob_weights": COLORS["prepare"],
        "lost": COLORS["recovery"],
        "queued": "#f3d9d6",
        "logprob_queue": "#e2d8ec",
    }
    for step in steps:
        for group in sorted(step.groups, key=lambda g: g.place):
            for phase in group.phases:
                axis.broken_barh(
                    [(phase.start - zero, phase.end - phase.start)],
                    (height, 0.9),
                    color=colors[phase.name],
                    linewidth=0,
                )
            height += 1
    axis.set_ylim(height, -2)
    axis.set_yticks([tall / 2, (tall + 2 + height) / 2], ["trainer", "groups"], fontsize=8)
    axis.set_xlabel("seconds", fontsize=8)
    begun = min((g.phases[0].start for s in steps for g in s.groups), default=zero)
    axis.set_xlim(min(0.0, begun - zero), steps[-1].end - zero)
    axis.tick_params(labelsize=7)
    handles = [
        axis.broken_barh([(0, 0)], (0, 0), color=COLORS[part], label=part.replace("_", " "))
        for part in PARTS
        if part not in ("data", "other")
    ]
    axis.legend(handles=handles, fontsize=6, ncols=7, loc="upper center", bbox_to_anchor=(0.5, 1.08), frameon=False)
    return figure
