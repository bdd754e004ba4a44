"""The figures of a report, drawn with matplotlib, one function each. Runs that are compared share their axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.figure import Figure

from asyncspec.report.run import Run
from asyncspec.timing.attribution import COLORS, PARTS


def _side_by_side(runs: Sequence[Run], draw: Callable, height: float = 2.8, width: float = 0.0) -> Figure:
    figure = Figure(figsize=(width or 5.6 * len(runs) + 0.8, height), layout="constrained")
    axes = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
    for axis, run in zip(axes, runs):
        draw(axis, run)
        if len(runs) > 1:
            axis.set_title(run.label.replace("$", r"\$"), fontsize=8)
        axis.tick_params(labelsize=7)
    return figure


def breakdown(runs: Sequence[Run]) -> Figure:
    """Draw the seconds of each step, by what the trainer did or waited for."""

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

    return _side_by_side(runs, draw, 3.2, 12.0)


def lines(runs: Sequence[Run], keys: dict[str, str], ylabel: str) -> Figure:
    """Draw metrics over the steps, all runs in one picture."""
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
                    label=label + (f" ({run.name})".replace("$", r"\$") if len(runs) > 1 else ""),
                )
    axis.set_xlabel("step", fontsize=8)
    axis.set_ylabel(ylabel, fontsize=8)
    axis.tick_params(labelsize=7)
    if axis.lines:
        axis.legend(fontsize=6)
    return figure


def lags(runs: Sequence[Run]) -> Figure:
    """Draw by how many versions the oldest token of each trained group lagged."""

    def draw(axis, run: Run) -> None:
        found = [step.step - group.version_min for step in run.steps for group in step.groups]
        values, counts = np.unique(found, return_counts=True) if found else (np.array([0]), np.array([0]))
        axis.bar(values, counts / max(1, counts.sum()), color="#2f6db5")
        axis.set_xticks(range(run.config.policy_lag + 1))
        axis.set_xlabel("lag of a group's oldest token (versions)", fontsize=8)
        axis.set_ylabel("share of groups", fontsize=8)

    return _side_by_side(runs, draw, 2.2)


def lengths(runs: Sequence[Run]) -> Figure:
    """Draw how long the responses were."""

    def draw(axis, run: Run) -> None:
        groups = [group for step in run.steps for group in (*step.groups, *step.unused)]
        found = [n for group in groups for n in group.response_tokens]
        if found:
            axis.hist(found, bins=np.geomspace(1, max(2, max(found)), 40), color="#2f6db5")
            axis.set_xscale("log")
        axis.set_xlabel("tokens per response", fontsize=8)
        axis.set_ylabel("responses", fontsize=8)

    return _side_by_side(runs, draw, 2.2)
