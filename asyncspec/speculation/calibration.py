"""The calibration: what the engine's steps cost for each draft length, timed before the first sequence enters.

Shape suffixes: R rounds, M timed steps (draft lengths, then others), E entries: draft lengths 0..LONGEST and one more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from asyncspec.config import LONGEST_DRAFT as LONGEST


class Calibrated(NamedTuple):
    """The calibration for one number of live sequences."""

    second_E: np.ndarray  # seconds of a step, by entry
    read_E: np.ndarray  # proposals verified per row in those steps
    position_s: float  # seconds that one more attended position costs, per token of a row
    span: float  # positions that each token attended to

    def seconds(self, k, read, span=None):
        """Return the expected seconds of a step. Arguments may be arrays.

        Args:
            k: draft length. All k proposals are drafted.
            read: how many of them are verified, on average over rows.
            span: positions that a token attends to; None: as many as in the calibration.
        """
        calibrated = self.second_E[k]
        each = (self.second_E[LONGEST] - self.second_E[-1]) / ((self.read_E[LONGEST] - self.read_E[-1]) or LONGEST)
        seconds = calibrated + max(0.0, each) * (read - self.read_E[k])
        if span is not None:
            seconds = seconds + self.position_s * (k + 1) * (span - self.span)
        return np.maximum(seconds, 0.1 * calibrated)


class Calibration(NamedTuple):
    """The timings of an engine's first steps.

    lives: numbers of live sequences, ascending.
    seconds: float [len(lives), LONGEST + 2], seconds of a step for each draft length. The last entry is the longest
        draft again, with another number of its proposals verified.
    read: float, same shape, how many proposals of each row were verified in those steps. None: all of them, and half of
        them for the last entry.
    farther: float [len(lives), 3]: seconds of a step with the longest draft and longer rows; how many positions each
        token attended to in it; how many in the other steps. None: positions cost nothing.
    """

    lives: Sequence[int]
    seconds: np.ndarray
    read: np.ndarray | None = None
    farther: np.ndarray | None = None

    def at(self, live: int) -> Calibrated:
        """Interpolate the timings for `live` sequences, linearly in the logarithm of their number."""
        seconds = plausible(np.asarray(self.seconds, dtype=float))
        read = np.tile([*range(LONGEST + 1), LONGEST / 2], (len(seconds), 1)) if self.read is None else self.read
        position = np.zeros((len(seconds), 2))
        if self.farther is not None:
            far_s, far, near = self.farther.T
            tokens = LONGEST + 1
            position[:, 0] = np.maximum(far_s - seconds[:, LONGEST], 0) / (np.maximum(far - near, 1) * tokens)
            position[:, 1] = near

        def between(measured: np.ndarray) -> np.ndarray:
            at, log_lives = np.log2(live), np.log2(np.asarray(self.lives, dtype=float))
            return np.array([np.interp(at, log_lives, column) for column in measured.T])

        return Calibrated(between(seconds), between(read), *between(position))


def calibration(lengths: Sequence[int], times_RM: np.ndarray) -> np.ndarray:
    """Return the seconds of a step for every draft length, float [LONGEST + 1 + others].

    They are medians over rounds. A length that was not timed is interpolated linearly between its neighbors.

    Args:
        lengths: the draft lengths that were timed, ascending, 0 the first and LONGEST the last.
        times_RM: float, seconds. Each round has one time for each length, then the times of the other steps, which are
            not interpolated.
    """
    times_RM = np.maximum(times_RM, 1e-9)  # a coarse clock may report 0
    of_round_R1 = times_RM.mean(1, keepdims=True)  # other work on the machine slows whole rounds
    times_M = np.median(times_RM / of_round_R1, axis=0) * np.median(of_round_R1)
    return np.append(np.interp(range(LONGEST + 1), lengths, times_M[: len(lengths)]), times_M[len(lengths) :])


def plausible(seconds: np.ndarray) -> np.ndarray:
    """Return calibrated seconds, float [lives, entries], with impossible ones raised.

    A longer draft cannot take less time than a shorter one. A lookup that finds nothing cannot take less than no
    lookup.
    """
    rising = np.maximum.accumulate(seconds[:, : LONGEST + 1], axis=1)
    return np.hstack([rising, np.maximum(seconds[:, LONGEST + 1 :], rising[:, :1])])
