"""How far to speculate: for each engine step the draft length k, 0 included, that emits the most tokens a second.

    rate(B, k) = B * (1 + a_1 + a_1 a_2 + ... + a_1..a_k) / seconds(B, k)

B sequences are live; a_j is the share of rows whose j-th proposal is accepted when all before it were, learned online over a
sliding window; seconds are measured (a calibration fills the table, every step corrects it). Both look only at what is past,
never at the proposals of the step to come, so the choice cannot bend the distribution.

Trying a length that is not held for the best is paid from a budget of one hundredth of the engine's time, so a draft that has
become good again is found out, and a useless one costs next to nothing.

Shape suffixes: B live rows.
"""

from __future__ import annotations

import math
from typing import Sequence

import numpy as np

from asyncspec.config import LONGEST_DRAFT as LONGEST

EXPLORE_SHARE = 0.01
WINDOW = 4096  # row verifications over which acceptance is remembered
PRIOR_ROWS, PRIOR_RATE = 8.0, 0.7
KINDS = 16


class FixedLength:
    """Always the same k."""

    def __init__(self, draft_length: int) -> None:
        self.longest = draft_length

    def choose(self, live: int) -> int:
        return self.longest

    def trim(self, live: int, count_B: np.ndarray, kind_B: np.ndarray) -> int:
        """The draft length to verify, given how many proposals a lookup has found for each row."""
        return int(count_B.max())

    def observe(self, live: int, draft_length: int, seconds: float, kept_B: np.ndarray, proposed: tuple | None = None) -> None:
        pass


class Acceptance:
    """a_j for j = 1..LONGEST, learned over a sliding window."""

    def __init__(self) -> None:
        self.tried, self.kept = np.full(LONGEST, PRIOR_ROWS), np.full(LONGEST, PRIOR_ROWS * PRIOR_RATE)

    def add(self, kept_B: np.ndarray, draft_length: int) -> None:
        """Rows that kept so many of `draft_length` proposals."""
        at_least = np.cumsum(np.bincount(kept_B, minlength=draft_length + 1)[::-1])[::-1]
        forget = max(0.0, 1 - len(kept_B) / WINDOW)
        self.tried[:draft_length] = self.tried[:draft_length] * forget + at_least[:draft_length]
        self.kept[:draft_length] = self.kept[:draft_length] * forget + at_least[1 : draft_length + 1]

    def emitted(self) -> np.ndarray:
        """Expected tokens of one verification for k = 0..LONGEST."""
        return np.concatenate([[1.0], 1 + np.cumprod(self.kept / self.tried).cumsum()])


class AutoLength:
    longest = LONGEST

    def __init__(self, lives: Sequence[int], seconds: np.ndarray) -> None:
        """
        Args:
            lives: numbers of live sequences the calibration measured, ascending.
            seconds: float [len(lives), LONGEST + 1], a step's time at each of them for each draft length.
        """
        self._log_lives, self._measured = np.log2(np.asarray(lives, dtype=float)), np.asarray(seconds, dtype=float)
        self._table: dict[int, np.ndarray] = {}  # expected seconds for each k, by bucket of live sequences
        self._drift: dict[int, float] = {}
        self.acceptance = Acceptance()
        self.by_kind = [Acceptance() for _ in range(KINDS)]
        self.budget_s, self._turn, self._exploring = 0.0, 0, False

    def choose(self, live: int) -> int:
        rates = self._rates(live)
        best = int(rates.argmax())
        self._exploring = False
        # Neighbours of the best, in turn: one longer, one shorter, and from 0 also a jump over lengths that do not pay alone.
        others = [k for k in (best + 1, best - 1, best + 2) if 0 <= k <= LONGEST]
        self._turn += 1
        other = others[self._turn % len(others)]
        loss = self._seconds(live)[other] * (1 - rates[other] / rates[best])
        if self.budget_s > loss:
            self._exploring = True
            return other
        return best

    def trim(self, live: int, count_B: np.ndarray, kind_B: np.ndarray) -> int:
        """The draft length to verify, given what a lookup has found: how many proposals each row has, and of what kind."""
        longest = int(count_B.max())
        if self._exploring or not longest:
            return longest
        seconds = self._seconds(live)
        tokens = np.full(longest + 1, float(len(count_B)))
        for kind in np.unique(kind_B):
            of_kind = count_B[kind_B == kind]
            gain = np.diff(self.by_kind[min(kind, KINDS - 1)].emitted())[:longest]
            has = (of_kind[:, None] > np.arange(longest)).sum(0)
            tokens[1:] += np.cumsum(gain * has)
        return int((tokens / seconds[: longest + 1]).argmax())

    def observe(self, live: int, draft_length: int, seconds: float, kept_B: np.ndarray, proposed: tuple | None = None) -> None:
        """Learn from a step.

        Args:
            draft_length: the k that `choose` gave.
            seconds: of the whole step; NaN if it did work that is not part of every such step.
            kept_B: int64, accepted proposals of each row.
            proposed: count_B and kind_B of a lookup's proposals that were verified.
        """
        if draft_length:
            if proposed is None:
                self.acceptance.add(kept_B, draft_length)
            else:
                # A row without a proposal counts as a rejection: `choose` decides before it is known who will have one.
                self.acceptance.add(kept_B, draft_length)
                for kind in np.unique(proposed[1]):
                    mine = proposed[1] == kind
                    for count in np.unique(proposed[0][mine]):
                        if count:
                            self.by_kind[min(kind, KINDS - 1)].add(kept_B[mine & (proposed[0] == count)], int(count))
        if math.isnan(seconds):
            return
        rates = self._rates(live)
        if self._exploring:
            self.budget_s -= max(0.0, seconds - (len(kept_B) + kept_B.sum()) / rates.max())
        self.budget_s = min(self.budget_s + EXPLORE_SHARE * seconds, 0.25)
        bucket = _bucket(live)
        expected = self._seconds(live)[draft_length]
        ratio = min(2.0, max(0.5, seconds / expected))
        # Most of what changes (longer sequences, a busy machine) changes all lengths alike; the rest is this length's own.
        self._drift[bucket] = self._drift.get(bucket, 1.0) * ratio**0.1
        self._table[bucket][draft_length] *= ratio**0.03

    def _seconds(self, live: int) -> np.ndarray:
        bucket = _bucket(live)
        if bucket not in self._table:
            at = math.log2(live)
            self._table[bucket] = np.array([np.interp(at, self._log_lives, column) for column in self._measured.T])
            self._drift[bucket] = float(np.mean(list(self._drift.values()))) if self._drift else 1.0
        return self._table[bucket] * self._drift[bucket]

    def _rates(self, live: int) -> np.ndarray:
        return live * self.acceptance.emitted() / self._seconds(live)


def _bucket(live: int) -> int:
    """Half powers of two: live sequences that cost about the same."""
    return round(2 * math.log2(live))
