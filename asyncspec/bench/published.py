"""bench published: the simulator's predictions beside published results.

published.yaml has what is assumed where a publication is silent, and the label of each cell. Nothing is run; each
prediction has a range over the assumptions. `predicted_errors` compares the cells labeled predicted.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from asyncspec.bench.harness import Benchmark, Samples
from asyncspec.bench.published_cells import LABELS, PROMPT, PUBLISHED, Prediction, cells, predict, target_of
from asyncspec.config.fields import hint
from asyncspec.errors import UserError, first_line
from asyncspec.simulate.devices import Drafting
from asyncspec.simulate.pipeline import Group, Pipeline, simulate
from asyncspec.simulate.rollout import Rounds
from asyncspec.simulate.workload import Acceptance, Lengths

ROUNDED = 0.005  # published values have three digits


def simulated_s(steps: int = 1000) -> float:
    """Return the processor seconds in which 1,000 steps of 2,048 GPUs are simulated: 192 generators of 8 GPUs, 4,096
    rollouts, policy lag 2.
    """
    rng, slots = np.random.default_rng(0), 64
    target = target_of("Qwen/Qwen3-235B-A22B", "GB200", "fp8", 8)
    costs = Rounds(target, Drafting(target, "eagle3")).costs(slots, 3, 800, 12_000)
    shape = (steps, 256, 16)
    tokens = Lengths(6000, 0.8, 20480).draw(rng, steps * 4096).reshape(shape)
    accept = Acceptance.of_length(3, 3, 0.05).draw(rng, steps * 4096).reshape(shape)
    work = [[Group(t, a, PROMPT, 0.1, 0.5, 1.0, 0.1) for t, a in zip(*of_step)] for of_step in zip(tokens, accept)]
    pipeline = Pipeline(lag=2, generators=192, slots=slots, costs=costs, logprobs=8, delivery_s=2.0)
    simulate(pipeline, work[:3])  # compiles
    began = time.process_time()
    simulate(pipeline, work)
    return time.process_time() - began


class PublishedBenchmark(Benchmark):
    name = "published"
    repeats = 1
    variants = ("cells", "1,000 steps")
    columns = ("seconds",)

    def __init__(self, known: Mapping[str, float]) -> None:
        self.known = known

    @cached_property
    def predictions(self) -> dict[str, Prediction]:
        return {cell.id: predict(cell) for cell in cells()}

    def measure(self, variant: str, repetition: int) -> dict[str, float]:
        if variant != "cells":
            return {"seconds": simulated_s()}
        found: dict[str, float] = {}
        for each in self.predictions.values():
            found |= {each.id: each.value, f"{each.id} low": each.low, f"{each.id} high": each.high}
        return found

    def headline(self, samples: Samples) -> dict[str, Any]:
        compared = [(self.predictions[name], value) for name, value in self.known.items()]
        predicted = {each.id: each.value / value - 1 for each, value in compared if each.label == "predicted"}
        inside = [each.low * (1 - ROUNDED) <= value <= each.high * (1 + ROUNDED) for each, value in compared]
        widths = [each.high / each.low for each in self.predictions.values() if each.low > 0]
        return {
            "predicted_errors": predicted,
            "in_range": statistics.fmean(inside),
            "range_width": statistics.median(widths),
            "simulated_1000_steps_s": statistics.median(sample["seconds"] for sample in samples["1,000 steps"]),
        }

    def tables(self, samples: Samples) -> list[Table]:
        table = Table(title="bench published: predictions and their ranges", title_justify="left")
        for column in ("cell", "label", "prediction", "range", "published", "error"):
            table.add_column(column, justify="left" if column in ("cell", "label") else "right")
        for each in self.predictions.values():
            known = self.known.get(each.id)
            error = "" if known is None else f"{100 * (each.value / known - 1):+.0f}%"
            shown = "" if known is None else f"{known:.3g}"
            table.add_row(each.id, each.label, f"{each.value:.3g}", f"{each.low:.3g} to {each.high:.3g}", shown, error)
        return [table]

    def plot(self, axes, samples: Samples) -> None:
        """Draw prediction over published value, with its range, of each cell whose value is known."""
        colors = dict(zip(LABELS, ("#2f6db5", "#8a8a8a", "#e6a532", "#3d9a8b")))
        shown = [(self.predictions[name], value) for name, value in self.known.items()]
        for place, (each, value) in enumerate(shown):
            color = colors[each.label]
            axes.plot([each.low / value, each.high / value], [place, place], color=color, linewidth=3, alpha=0.4)
            axes.plot([each.value / value], [place], "o", color=color)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_yticks(range(len(shown)), [each.id for each, _ in shown], fontsize=5)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlabel("prediction over published value; bars: range over what is not published")
        for label, color in colors.items():
            axes.plot([], [], "o", color=color, label=label)
        axes.legend(fontsize=7)


def _read(path: str) -> dict[str, float]:
    """Return cells and their values from a file.

    Raises:
        UserError: it is not a JSON object of numbers above 0, or a list of objects with id and value.
    """
    form = 'expected JSON such as {"235b-512/best": 4.0}, or a list of objects with id and value'
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--cells {path}: {error.strerror}; expected a JSON file") from None
    except ValueError as error:
        raise UserError(f"--cells {path}: {first_line(error)}; {form}") from None
    if isinstance(found, dict):
        found = [{"id": name, "value": value} for name, value in found.items()]
    known = isinstance(found, list) and all(isinstance(each, dict) and {"id", "value"} <= set(each) for each in found)
    if not known or not found:
        raise UserError(f"--cells {path}: {form}")
    values: dict[str, float] = {}
    for each in found:
        name, value = each["id"], each["value"]
        number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
        if not isinstance(name, str) or name in values or not number:
            raise UserError(f"--cells {path}: {name!r}: {value!r}: expected each cell once, with a number above 0")
        values[name] = float(value)
    return values


def make(overrides: Sequence[str], out: Path) -> PublishedBenchmark:
    files = [word.removeprefix("cells=") for word in overrides if word.startswith("cells=")]
    if len(files) != len(overrides):
        other = next(word for word in overrides if not word.startswith("cells="))
        raise UserError(f"bench published {other}: expected only --cells FILE")
    known = dict(PUBLISHED)
    for path in files:
        known |= _read(path)
    ids = {cell.id for cell in cells()}
    if unknown := [name for name in known if name not in ids]:
        name = unknown[0]
        near = hint(name, sorted(ids))
        raise UserError(f"--cells {name}: expected a cell that `asyncspec bench published` prints{near}")
    return PublishedBenchmark(known)
