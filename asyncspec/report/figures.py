"""The figures of a report: matplotlib, one function each; runs to compare share their axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.figure import Figure

from asyncspec.messages import StepDone
from asyncspec.report.run import COLORS, Run
from asyncspec.timing.attribution import PARTS, critical_path

GANTT_STEPS = 4


def _side_by_side(runs: Sequence[Run], draw: Callable, height: float = 2.8, share_y: bool = True) -> Figure:
    figure = Figure(figsize=(5.6 * len(runs) + 0.8, height), layout="constrained")
    axes = figure.subplots(1, len(runs), sharey=share_y, squeeze=False)[0]
    for axis, run in zip(axes, runs):
        draw(axis, run)
        if len(runs) > 1:
            axis.set_title(run.label, fontsize=8)
        axis.tick_params(labelsize=7)
    return figure


def breakdown(runs: Sequence[Run]) -> Figure:
    """Seconds of each step by what the trainer did or waited for."""

    def draw(axis, run: Run) -> None:
        x = run.series("step")
        present = [part for part in PARTS if np.nan_to_num(run.series(f"time/{part}")).max() > 0]
        axis.stackplot(
            x,
            [np.nan_to_num(run.series(f"time/{part}")).clip(0) for part in present],
            step="mid" if len(x) > 1 else None,
            labels=[part.replace("_", " ") for part in present],
            colors=[COLORS[part] for part in present],
            linewidth=0,
        )
        axis.set_xlabel("step", fontsize=8)
        axis.set_ylabel("seconds", fontsize=8)
        axis.legend(fontsize=6, loc="upper right", ncols=2)

    return _side_by_side(runs, draw)


def lines(runs: Sequence[Run], keys: dict[str, str], ylabel: str) -> Figure:
    """Metrics over the steps, all runs in one picture."""
    figure = Figure(figsize=(6.4, 2.6), layout="constrained")
    axis = figure.subplots()
    for run, style in zip(runs, ("-", "--")):
        for number, (key, label) in enumerate(keys.items()):
            values = run.series(key)
            if np.isfinite(values).any():
                shown = np.isfinite(values)
                axis.plot(
                    run.series("step")[shown],
                    values[shown],
                    style,
                    color=f"C{number}",
                    linewidth=1.2,
                    label=label + (f" ({run.name})" if len(runs) > 1 else ""),
                )
    axis.set_xlabel("step", fontsize=8)
    axis.set_ylabel(ylabel, fontsize=8)
    axis.tick_params(labelsize=7)
    if axis.lines:
        axis.legend(fontsize=6)
    return figure


def lags(runs: Sequence[Run]) -> Figure:
    """How many versions behind the oldest token of each trained group was."""

    def draw(axis, run: Run) -> None:
        found = [step.step - group.version_min for step in run.steps for group in step.groups]
        values, counts = np.unique(found, return_counts=True) if found else (np.array([0]), np.array([0]))
        axis.bar(values, counts / max(1, counts.sum()), color="#2f6db5")
        axis.set_xticks(range(run.config.policy_lag + 1))
        axis.set_xlabel("lag of a group's oldest token, versions", fontsize=8)
        axis.set_ylabel("share of groups", fontsize=8)

    return _side_by_side(runs, draw, 2.2)


def lengths(runs: Sequence[Run]) -> Figure:
    def draw(axis, run: Run) -> None:
        found = [n for step in run.steps for group in step.groups for n in group.response_tokens]
        if found:
            axis.hist(found, bins=np.geomspace(1, max(2, max(found)), 40), color="#2f6db5")
            axis.set_xscale("log")
        axis.set_xlabel("tokens of a response", fontsize=8)
        axis.set_ylabel("responses", fontsize=8)

    return _side_by_side(runs, draw, 2.2)


def gantt(steps: Sequence[StepDone]) -> Figure:
    """What the trainer and each group did during some steps."""
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
        for group in sorted(step.groups, key=lambda g: g.ticket_id):
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
    axis.set_xlim(min(0.0, min(g.phases[0].start for s in steps for g in s.groups) - zero), steps[-1].end - zero)
    axis.tick_params(labelsize=7)
    handles = [
        axis.broken_barh([(0, 0)], (0, 0), color=COLORS[part], label=part.replace("_", " "))
        for part in PARTS
        if part not in ("data", "other")
    ]
    axis.legend(handles=handles, fontsize=6, ncols=7, loc="upper center", bbox_to_anchor=(0.5, 1.08), frameon=False)
    return figure
