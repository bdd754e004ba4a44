"""The page of rollouts that `asyncspec report` writes beside the report: one HTML file that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from asyncspec.report.pages import render
from asyncspec.timing.rollouts import read

FILE = "rollouts.html"
MOST = 400  # rollouts on a page; of more, whole groups are left out evenly
LEAST_SCALE = 0.05  # nats of the strongest color, at least: smaller gaps are rounding


def page(directories: Sequence[Path]) -> str:
    """Return the rollouts of one or two runs as an HTML page; "" if there are none."""
    rows = [
        row | {"run": directory.name if len(directories) > 1 else ""}
        for directory in directories
        for row in read(directory)
    ]
    if not rows:
        return ""
    kept = chosen(rows)
    gaps = np.abs([gap for row in kept for gap in row["gaps"]])
    return render(
        "rollouts.html",
        title=f"Rollouts of {' and '.join(directory.name for directory in directories)}",
        data=kept,
        count=len(kept),
        total=len(rows),
        scale=round(max(LEAST_SCALE, float(np.quantile(gaps, 0.99))) if len(gaps) else LEAST_SCALE, 3),
    )


def chosen(rows: Sequence[dict], most: int = MOST) -> list[dict]:
    """Return at most `most` rows: all samples of groups that are evenly spaced."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault((row["run"], row["ticket"]), []).append(row)
    every = -(-len(rows) // most)
    return [row for group in list(groups.values())[::every] for row in group][:most]
