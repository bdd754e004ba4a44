#!/usr/bin/env python3
"""Draw docs/images/draft-length.svg: tokens(k), seconds(k) and rate(k) as `bench speculation` measured them."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "speculation" / "result.json"
FILE = ROOT / "docs" / "images" / "draft-length.svg"
LIVE, LENGTHS = (1, 16, 64), ("none", "1", "2", "3", "5", "7", "15")
PANELS = (
    ("acceptance_length", "tokens(k), per verification"),
    ("step_ms", "seconds(k), over those of k = 0"),
    ("tokens_per_s", "rate(k), over that of k = 0"),
)


def main() -> None:
    matplotlib.rcParams["svg.hashsalt"] = "asyncspec"  # the same file each time
    quartiles = json.loads(RESULT.read_text())["quartiles"]
    figure = Figure(figsize=(9, 3), layout="constrained")
    for axis, (key, title) in zip(figure.subplots(1, len(PANELS)), PANELS):
        for live in LIVE:
            # without speculation a step emits one token for each sequence
            cells = [quartiles[f"{live} eagle3 {length}"] for length in LENGTHS]
            values = [cell[key][1] if key in cell else 1.0 for cell in cells]
            scale = 1.0 if key == "acceptance_length" else values[0]
            lengths = [0 if length == "none" else int(length) for length in LENGTHS]
            axis.plot(lengths, [value / scale for value in values], marker="o", markersize=3, label=f"{live} live")
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("k", fontsize=8)
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=7)
    axis.legend(fontsize=7)
    figure.savefig(FILE, metadata={"Date": None})


if __name__ == "__main__":
    main()
