"""What an engine's first timings of each draft length are taken to say, before any sequence lives.

Shape suffixes: R rounds, M lengths and others that were timed, E entries: draft lengths, and one more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from asyncspec.config import LONGEST_DRAFT as LONGEST


class Calibrated(NamedTuple):
    """What a calibration says of one number of live sequences."""

    second_E: np.ndarray  # of steps, by entry
    read_E: np.ndarray  # proposals of each row that were read meanwhile
    position_s: float  # seconds that a position more takes, of each token of a row
    span: float  # positions that each token attended to

    def seconds(self, k, read, span=None):
        """Seconds of a step; arguments may be arrays.

        Args:
            k: draft length. All k proposals are drafted.
            read: how many of them are read, on average over rows.
            span: positions that a token attends to; None: as in the calibration.
        """
        calibrated = self.second_E[k]
        each = (self.second_E[LONGEST] - self.second_E[-1]) / ((self.read_E[LONGEST] - self.read_E[-1]) or LONGEST)
        seconds = calibrated + max(0.0, each) * (read - self.read_E[k])
        if span is not None:
            seconds = seconds + self.position_s * (k + 1) * (span - self.span)
        return np.maximum(seconds, 0.1 * calibrated)


class Calibration(NamedTuple):
    """What an engine's first steps took.

    lives: numbers of live sequences, ascending.
    seconds: float [len(lives), LONGEST + 2], a step's time for each draft length; the last: for the longest, of which
        more was read, or less.
    read: float, of the same shape, how many proposals of each row were read meanwhile; None: all, and for the last half
        of them.
    farther: float [len(lives), 3], the longest draft's time with rows farther on; how many positions each token
        attended to there, and how many elsewhere; None: positions cost nothing.
    """

    lives: Sequence[int]
    seconds: np.ndarray
    read: np.ndarray | None = None
    farther: np.ndarray | None = None

    def at(self, live: int) -> Calibrated:
        """Between what was measured, linearly in the logarithm of the number of live sequences."""
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
    """Seconds of a step by its draft length, float [LONGEST + 1 + others]: medians over rounds, lines between lengths.

    Args:
        lengths: the draft lengths that were timed, ascending, 0 the first and LONGEST the last.
        times_RM: float, seconds, for each round those of the lengths, and then others that are taken as they are.
    """
    times_RM = np.maximum(times_RM, 1e-9)  # a coarse clock may say 0
    of_round_R1 = times_RM.mean(1, keepdims=True)  # what else the machine does slows whole rounds
    times_M = np.median(times_RM / of_round_R1, axis=0) * np.median(of_round_R1)
    return np.append(np.interp(range(LONGEST + 1), lengths, times_M[: len(lengths)]), times_M[len(lengths) :])


def plausible(seconds: np.ndarray) -> np.ndarray:
    """What a calibration measured, float [lives, entries], without what cannot be: a longer draft that takes less than
    a shorter one, or a lookup that finds nothing less than no lookup.
    """
    rising = np.maximum.accumulate(seconds[:, : LONGEST + 1], axis=1)
    return np.hstack([rising, np.maximum(seconds[:, LONGEST + 1 :], rising[:, :1])])
