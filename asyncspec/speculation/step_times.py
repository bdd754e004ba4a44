"""Correct the calibrated time of a step, for each number of live sequences and each draft length.

What slows a step (longer sequences, a busy machine) mostly slows all lengths alike. So only comparisons count: two
blocks of steps with different lengths, one right after the other. A try is compared with the hold before it, and the
next hold with the try, so a steady trend cancels.

Shape suffixes: K draft length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from asyncspec.config import LONGEST_DRAFT as LONGEST

# Steps in a block; medians of blocks are compared. The calibration counts as one block. Without comparisons one cell
# loses 0.2 of its score.
BLOCK = 8
# Each step adds this share of the calibration's variance to the variance of every length. Over seconds this makes no
# difference; without it corrections would freeze over hours.
FORGETTING = 0.003


class _Block(NamedTuple):
    bucket: int
    draft_length: int
    level: float  # logarithm of measured over calibrated seconds
    steps: int


class StepTimes:
    """Corrections of calibrated step times: for each length, the mean and variance of the logarithm of a factor.

    Each comparison moves both of its lengths, the less certain one more (a Kalman filter without covariances).
    """

    def __init__(self) -> None:
        self._log: dict[int, np.ndarray] = {}  # by bucket, [K]: logarithm of the correction
        self._variance: dict[int, np.ndarray] = {}  # by bucket, [K]: its variance, in units of the calibration's
        self._last: _Block | None = None

    @staticmethod
    def bucket(live: int) -> int:
        """Return the number of the half power of two nearest to `live`. Within a bucket, steps cost about the same."""
        return round(2 * math.log2(live))

    def corrections(self, bucket: int) -> np.ndarray:
        """Return the factors by which to multiply calibrated times, float [LONGEST + 1]."""
        return np.exp(self._of(bucket)[0])

    def observe(self, bucket: int, draft_length: int, ratio: Sequence[float]) -> None:
        """Learn from successive steps of one length. ratio: measured over calibrated seconds, one for each step."""
        first, last = ratio[:BLOCK], ratio[-BLOCK:]
        before, now = self._last, _Block(bucket, draft_length, _level(first), len(first))
        if before is not None and before.bucket == bucket and before.draft_length != draft_length:
            self._compare(before, now)
        self._last = _Block(bucket, draft_length, _level(last), len(last))

    def _compare(self, before: _Block, now: _Block) -> None:
        log_K, variance_K = self._of(now.bucket)
        a, b = now.draft_length, before.draft_length
        variance_K += FORGETTING * (now.steps + before.steps)
        error = (now.level - log_K[a]) - (before.level - log_K[b])
        error = min(math.log(2.0), max(-math.log(2.0), error))
        gain_K = variance_K / (variance_K[a] + variance_K[b] + BLOCK * (1 / now.steps + 1 / before.steps))
        log_K[a] += gain_K[a] * error
        log_K[b] -= gain_K[b] * error
        for k in (a, b):
            variance_K[k] *= 1 - gain_K[k]

    def _of(self, bucket: int) -> tuple[np.ndarray, np.ndarray]:
        if bucket not in self._log:
            self._log[bucket], self._variance[bucket] = np.zeros(LONGEST + 1), np.ones(LONGEST + 1)
        return self._log[bucket], self._variance[bucket]


def _level(ratio: Sequence[float]) -> float:
    """Return the logarithm of the median."""
    return math.log(max(sorted(ratio)[(len(ratio) - 1) // 2], 1e-9))  # a coarse clock may report 0
