#!/usr/bin/env python3
"""Print what a run has learned, with a 95% interval, and draw its curve.

    python scripts/show_learning.py RUN plot.png

The interval is that of two independent shares: (p2 - p1) +- 1.96 sqrt(p1 (1 - p1) / n + p2 (1 - p2) / n). Both shares
are of the same held-out problems, so an interval of paired answers would be narrower.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from asyncspec.report.run import Run


def interval(before: float, after: float, count: int) -> tuple[float, float]:
    """Return the 95% interval of the gain between two shares, both of `count` problems."""
    wide = 1.96 * math.sqrt((before * (1 - before) + after * (1 - after)) / count)
    return after - before - wide, after - before + wide


def draw(run: Run, file: Path) -> None:
    figure = Figure(figsize=(5.6, 2.8), layout="constrained")
    axis = figure.subplots()
    versions, solved = run.series("eval/policy_version"), run.series("eval/solved")
    axis.plot(run.series("step"), run.series("reward/mean"), linewidth=1, label="reward of a step's rollouts")
    shown = np.isfinite(solved)
    axis.plot(versions[shown], solved[shown], "o-", label="held-out problems solved")
    axis.set_xlabel("step", fontsize=8)
    axis.set_ylim(bottom=0)
    axis.tick_params(labelsize=7)
    axis.legend(fontsize=7)
    figure.savefig(file, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="directory of the run")
    parser.add_argument("plot", type=Path, nargs="?", help="file for the picture")
    parser.add_argument("--problems", type=int, default=256, help="held-out problems (default: 256)")
    given = parser.parse_args()
    run = Run.read(given.run)
    # a row repeats the evaluation before it
    found = {row["eval/policy_version"]: row["eval/solved"] for row in run.rows if row.get("eval/solved") is not None}
    evaluated = sorted(found.items())
    for version, solved in evaluated:
        print(f"version {version:.0f}: {solved:.1%} of {given.problems} held-out problems solved")
    (_, before), (_, after) = evaluated[0], evaluated[-1]
    low, high = interval(before, after, given.problems)
    print(f"gain {after - before:+.3f}, 95% interval {low:.3f} to {high:.3f}")
    if given.plot:
        draw(run, given.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
