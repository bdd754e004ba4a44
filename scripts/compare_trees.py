#!/usr/bin/env python3
"""Compare the speed of two checkouts, A and B, measured in turn: rollouts of the default job, and cells of
`bench speculation`.

    scripts/compare_trees.py ../before .                      the job and six cells
    scripts/compare_trees.py ../before . --rounds 30 --cell   the job alone
    scripts/compare_trees.py ../before . --cell "1 random" "64 mtp"

Each checkout measures in a process of its own, which lives through all rounds. The job's result is tokens per second,
B over A, for each pair of measurements. In a cell (live sequences, drafter) each checkout first finds its best fixed
draft length, then compares its automatic draft length with that. Medians and quartiles are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

JOB = ("job eagle3 auto", "job eagle3 7", "job eagle3 none")
CELLS = ("1 eagle3", "1 random", "2 random", "4 suffix", "16 ngram", "64 mtp")
LENGTHS = ("none", "1", "2", "3", "5", "7", "15")
SEARCHES = 3  # measurements of each length when searching for a cell's best one

WORKER = """
import json, os, sys
from pathlib import Path
from asyncspec.bench.speculation import SpeculationBenchmark
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
benchmark = SpeculationBenchmark([], Path("."))
for line in sys.stdin:
    print(json.dumps(benchmark.measure(*json.loads(line))), file=answers, flush=True)
"""


class Tree:
    """A checkout, and the process that measures in it."""

    def __init__(self, checkout: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", WORKER]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=tempfile.gettempdir(),
        )

    def measure(self, variant: str, repetition: int) -> dict[str, float]:
        """Measure a variant of `bench speculation` and return its figures."""
        print(json.dumps([variant, repetition]), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def best(self, cell: str) -> str:
        """Return the fixed length with the most tokens per second; "none" means no speculation."""

        def rate(length: str) -> float:
            return statistics.median(self.measure(f"{cell} {length}", i)["tokens_per_s"] for i in range(SEARCHES))

        return max(LENGTHS, key=rate)


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", type=Path, metavar="A", help="a checkout")
    parser.add_argument("b", type=Path, metavar="B", help="another checkout")
    parser.add_argument("--rounds", type=int, default=12, metavar="N", help="pairs of measurements (default: 12)")
    parser.add_argument("--cell", nargs="*", default=CELLS, metavar="CELL", help=f"cells; default: {', '.join(CELLS)}")
    args = parser.parse_args()
    trees = {"A": Tree(args.a), "B": Tree(args.b)}
    orders = [("A", "B") if i % 2 else ("B", "A") for i in range(args.rounds)]
    for variant in JOB:
        rates = {name: [] for name in trees}
        for name in trees:
            trees[name].measure(variant, 0)  # calibrates and warms the caches
        for repetition, order in enumerate(orders, 1):
            for name in order:
                rates[name].append(trees[name].measure(variant, repetition)["tokens_per_s"])
        medians = ", ".join(f"{name} {statistics.median(values):.0f}" for name, values in rates.items())
        over = quartiles([b / a for a, b in zip(rates["A"], rates["B"])])
        print(f"{variant}: {medians} tokens/s; B over A {over}", flush=True)
    for cell in args.cell:
        best = {name: tree.best(cell) for name, tree in trees.items()}
        over_best = {name: [] for name in trees}
        for repetition, order in enumerate(orders):
            for name in order:
                variant = f"{cell} auto over {best[name]}"
                over_best[name].append(trees[name].measure(variant, repetition)["over"])
        for name, values in over_best.items():
            print(f"{cell}: {name}, auto over {best[name]}: {quartiles(values)}", flush=True)


if __name__ == "__main__":
    main()
