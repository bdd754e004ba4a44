#!/usr/bin/env python3
"""Print and draw the held-out score of each set of data.eval_file, version by version, of one or more runs.

python scripts/show_sets.py plot.png RUN...
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from matplotlib.figure import Figure

from asyncspec.report.run import Run

_SCORE = re.compile(r"eval/([\w-]+)/score")


def curves(run: Run) -> dict[str, dict[int, float]]:
    """Return the scores of each set, by version."""
    found: dict[str, dict[int, float]] = {}
    for row in run.rows:  # a row repeats the evaluation before it
        for name, value in row.items():
            if (match := _SCORE.fullmatch(name)) and value is not None:
                found.setdefault(match[1], {})[int(row["eval/policy_version"])] = value
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plot", type=Path, help="file for the picture")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="directory of a run")
    given = parser.parse_args()
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axis = figure.subplots()
    for number, directory in enumerate(given.runs):
        run = Run.read(directory)
        for place, (name, scores) in enumerate(sorted(curves(run).items())):
            label = f"{name}, policy lag {run.config.policy_lag}"
            print(f"{label}: " + ", ".join(f"version {version} {score:.3f}" for version, score in scores.items()))
            axis.plot(list(scores), list(scores.values()), "os^Dv"[number % 5] + "-", color=f"C{place}", label=label)
    axis.set_xlabel("version")
    axis.set_ylabel("held-out score")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=7)
    figure.savefig(given.plot, dpi=110)


if __name__ == "__main__":
    main()
