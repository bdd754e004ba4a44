"""What a round of this machine's engine costs, fitted to the rounds of a run.

The fit rests on what the engine timed at its start. Without that it is a straight line:

    fixed + live * row + k * (draft + live * draft_row) + (k > 0) * (verify + verify_row * live) + position * positions
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from msgspec.structs import astuple

from asyncspec.wire.facts import ENTERING, Rounds

TERMS = ("fixed", "row", "draft", "draft_row", "verify", "verify_row", "position")


class Fit(NamedTuple):
    """How far a fit is from what was measured: of each piece, the ratio of fitted to measured, at three quartiles."""

    pieces: int
    seconds: float  # measured, all pieces together
    low: float
    middle: float
    high: float


@dataclass
class FittedRounds:
    """The seconds of an engine's round: a weighted sum of what a round has.

    With a table, which the engine timed at its start, a round has: the table's seconds, 1, and tokens times positions
    beyond the table's. Without one it has TERMS.

    lives, ks: the sizes in the table, ascending; [] without one.
    table_s, positions: its seconds [lives][ks], and the positions of all sequences [lives].
    """

    lives: list[int] = field(default_factory=list)
    ks: list[int] = field(default_factory=list)
    table_s: list[list[float]] = field(default_factory=list)
    positions: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    @classmethod
    def over(cls, timed: dict[tuple[int, int], np.ndarray]) -> FittedRounds:
        """Return the cost over a table; timed: by (live, k): count, seconds, tokens, positions."""
        if not timed:
            return cls()
        lives, ks = (sorted({key[place] for key in timed}) for place in (0, 1))
        table = [[float(timed[live, k][1] / timed[live, k][0]) for k in ks] for live in lives]
        return cls(lives, ks, table, [float(timed[live, ks[0]][3] / timed[live, ks[0]][0]) for live in lives])

    @property
    def names(self) -> tuple[str, ...]:
        """What the weights are of."""
        return ("table", "fixed", "position") if self.lives else TERMS

    def terms(self, live, k, positions) -> tuple:
        """Return what each weight is multiplied by. The arguments may be arrays; positions: of all live sequences."""
        live, k, positions = np.broadcast_arrays(*(np.asarray(each, float) for each in (live, k, positions)))
        if not self.lives:
            verifies = (k > 0) * 1.0
            return np.ones_like(k), live, k, k * live, verifies, verifies * live, positions
        by_k = np.array([[np.interp(k_, self.ks, row) for row in self.table_s] for k_ in k.ravel()])
        at = np.log2(np.maximum(1.0, live.ravel()))
        log_lives = np.log2(self.lives)
        seconds = np.array([np.interp(each, log_lives, row) for each, row in zip(at, by_k)]).reshape(k.shape)
        usual = np.interp(live, self.lives, self.positions)
        return seconds, np.ones_like(k), (k + 1) * (positions - usual)

    def seconds(self, live, k, positions):
        """Return the seconds of a round; the arguments are as in `terms`."""
        found = sum(weight * term for weight, term in zip(self.weights, self.terms(live, k, positions)))
        return np.maximum(found, 1e-6)


def fit_rounds(rounds: Sequence[Rounds]) -> tuple[FittedRounds, Fit]:
    """Fit the cost of rounds, such that the relative error of each second counts alike.

    Args:
        rounds: those without gained tokens were timed before the first sequence.
    """
    from scipy.optimize import nnls

    timed = _cells([each for each in rounds if not each.tokens])
    real = np.array([astuple(each) for each in rounds if each.tokens], float)
    live, k, count, measured, _, positions = real.T
    mean, at = measured / count, positions / count
    cost = FittedRounds.over(timed)
    rows = np.stack(np.broadcast_arrays(*cost.terms(live, k, at)), axis=1).astype(float)
    weight = np.sqrt(measured) / mean
    found, _ = nnls(rows * weight[:, None], mean * weight)
    cost.weights = found.tolist()
    return cost, quality(rows @ found * count, measured)


def _cells(rounds: Sequence[Rounds]) -> dict[tuple[int, int], np.ndarray]:
    """Add up rounds by live sequences and draft length: count, seconds, tokens, positions."""
    cells: dict[tuple[int, int], np.ndarray] = defaultdict(lambda: np.zeros(4))
    for each in rounds:
        if each.draft_length != ENTERING:
            cells[each.live, each.draft_length] += (each.count, each.seconds, each.tokens, each.positions)
    return cells


def quality(fitted: np.ndarray, measured: np.ndarray) -> Fit:
    """Return the quality of a fit; quartiles are weighted by seconds."""
    ratio, order = fitted / measured, np.argsort(fitted / measured)
    at = np.cumsum(measured[order]) / measured.sum()
    quartiles = [float(ratio[order][min(len(order) - 1, np.searchsorted(at, q))]) for q in (0.25, 0.5, 0.75)]
    return Fit(len(measured), float(measured.sum()), *quartiles)
