#!/usr/bin/env python3
"""Replace the samples in a benchmark's result.json by the quartiles of each measurement: what tables and plots need.

    scripts/thin_result.py FILE...

Each measurement becomes [first quartile, median, third quartile, count].
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


def quartiles(values: list[float]) -> list[float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return [*map(rounded, (low, middle, high)), len(values)]


def thin(samples: list[dict[str, float]]) -> dict[str, list[float]]:
    names = dict.fromkeys(name for sample in samples for name in sample)
    return {
        name: quartiles([sample[name] for sample in samples if isinstance(sample.get(name), int | float)])
        for name in names
        if any(isinstance(sample.get(name), int | float) for sample in samples)
    }


def main() -> None:
    if not sys.argv[1:]:
        sys.exit("usage: thin_result.py FILE...")
    for name in sys.argv[1:]:
        file = Path(name)
        try:
            result = json.loads(file.read_text(encoding="utf-8"))
            samples, _ = result.pop("samples"), result["benchmark"]
            lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(thin(rows))}" for key, rows in samples.items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            sys.exit(f"{file}: expected the result.json that a benchmark wrote, with its samples")
        rest = json.dumps(result, indent=1)
        file.write_text(rest[:-2] + ',\n "quartiles": {\n' + lines + "\n }\n}\n")


if __name__ == "__main__":
    main()
