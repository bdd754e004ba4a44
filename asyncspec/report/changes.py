"""Finds what changed in the course of a run, and takes noise for nothing.

`change` compares the first third of a series with its last third by ranks (Mann and Whitney 1947), so neither outliers
nor the shape of the noise matter. If the steps are independent and nothing changes, it finds a change in at most a
share CHANCE of all series. Steps that depend on the ones before say less than their number, so neighbors are averaged
first, over as many steps as they remember. With fewer than 21 values it finds nothing: chance alone could order them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CHANCE = 0.001  # share of stationary series in which a change is found, at most
SPREADS = 1.0  # by how many standard deviations of a third its median must have moved to be worth a word
MOST_ALIKE = 0.95  # the largest correlation of neighbors that is believed
FEWEST = 3  # evaluations on each side of a fall
EVALUATIONS = 12  # fewer evaluations say nothing
NOISES = 2.5  # by how many standard deviations of an evaluation the score must have fallen


class Change(NamedTuple):
    """The medians of the first and of the last third, and the step from which on the series differs."""

    before: float
    after: float
    since: int


def change(steps: np.ndarray, values: np.ndarray) -> Change | None:
    """Return how a series changed; None if it did not, or if that may be chance.

    Args:
        steps, values: [N]; values that are NaN are left out.
    """
    known = np.isfinite(values)
    steps, values = steps[known], values[known]
    third = len(values) // 3
    if third < 2 or np.ptp(values) == 0:
        return None
    from scipy.stats import mannwhitneyu

    first, last = values[:third], values[-third:]
    before, after = float(np.median(first)), float(np.median(last))
    spread = 1.4826 * np.median(np.abs(np.concatenate([first - before, last - after])))
    width = _memory(first, last)
    if (
        mannwhitneyu(_means(first, width), _means(last, width)).pvalue > CHANCE
        or abs(after - before) < SPREADS * spread
    ):
        return None
    # The signs of the distances from the middle add up to an extreme where the series goes over from one side to the
    # other.
    sums = np.abs(np.cumsum(np.sign(values - (before + after) / 2)))[:-1]
    return Change(before, after, int(steps[int(np.argmax(sums)) + 1]))


def _memory(*parts: np.ndarray) -> int:
    """Return over how many steps neighbors are alike: (1 + r) / (1 - r), with r the correlation of a step and the next
    within the parts, as for noise in which each step remembers a share r of the one before.
    """
    centered = [part - part.mean() for part in parts]
    total = sum(float(part @ part) for part in centered)
    together = sum(float(part[1:] @ part[:-1]) for part in centered)
    r = (
        min(MOST_ALIKE, max(0.0, together / total + 1 / len(parts[0]))) if total else 0.0
    )  # short parts hide a part of r
    return max(1, round((1 + r) / (1 - r)))


def _means(values: np.ndarray, width: int) -> np.ndarray:
    """Return the means of stretches of this width."""
    if width >= len(values):
        return values.mean(keepdims=True)
    return values[: len(values) // width * width].reshape(-1, width).mean(1)


def fall(scores: Sequence[float]) -> tuple[float, float] | None:
    """Return (median of the best stretch of evaluations, median of the last stretch) if the last one is clearly worse.

    Each of the last evaluations must be below each one of the best stretch, and the medians differ by
    several standard deviations of one evaluation. Of runs whose evaluations differ by chance alone, it finds a fall in
    fewer than 1 of 100.
    """
    size = max(FEWEST, len(scores) // 3)
    if len(scores) < max(EVALUATIONS, 2 * size):
        return None
    last = np.array(scores[-size:])
    stretches = [np.array(scores[begin : begin + size]) for begin in range(len(scores) - 2 * size + 1)]
    best = max(stretches, key=lambda stretch: float(np.median(stretch)))
    # A trend has no second differences; those of independent noise have 1.65 of its deviations as their median size.
    noise = float(np.median(np.abs(np.diff(scores, 2)))) / 1.65
    before, after = float(np.median(best)), float(np.median(last))
    if last.max() >= best.min() or before - after < NOISES * noise:
        return None
    return before, after
