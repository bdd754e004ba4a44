"""Expected tokens of a verification for every draft length, learned from verifications with some of the lengths.

Shape suffixes: B rows of a verification, K draft length, N positions in a draft.
"""

from __future__ import annotations

import numpy as np

from asyncspec.config import LONGEST_DRAFT as LONGEST

# How many row verifications, or tokens of hindsight, are remembered. A smaller window would cost nothing. An unlimited
# one would hide changes.
WINDOW = 2048
# Weight of the prior acceptance of a position, in rows, against the rows that reached it. One row would do nearly as
# well.
PRIOR_ROWS = 16.0
# Weight of the estimate by position, in rows, against the rows verified with the length itself. It is finite because a
# length can fall into step with the text, which only its own rows reveal. The replay does not see that: it draws rows
# at random.
LENT_ROWS = 1024.0


def remembered(rows: int) -> float:
    """Return the share of old counts that is kept when this many new rows arrive."""
    return max(0.5, 1 - rows / WINDOW)


class Survival:
    """The share of rows that get beyond each of several positions, learned over a sliding window."""

    def __init__(self, places: int) -> None:
        self._came_N, self._passed_N = np.zeros(places), np.zeros(places)

    def add(self, passed_B: np.ndarray, tried: int) -> None:
        """Count rows. Each got beyond `passed_B` of the first `tried` positions."""
        passed_N = len(passed_B) - np.bincount(passed_B, minlength=tried + 1)[:tried].cumsum()
        left = remembered(len(passed_B))
        for sum_N, more_N in (self._came_N, np.append(len(passed_B), passed_N[:-1])), (self._passed_N, passed_N):
            sum_N[:tried] = sum_N[:tried] * left + more_N

    def beyond(self) -> np.ndarray:
        """Return the share of rows that get beyond each position, float [places].

        Until many rows have reached a position, its passing rate is taken to be that of the position before it; for the
        first position it is taken to be 1.
        """
        share, result = 1.0, []
        for came, passed in zip(self._came_N.tolist(), self._passed_N.tolist()):
            share = (PRIOR_ROWS * share + passed) / (PRIOR_ROWS + came)
            result.append(share)
        return np.cumprod(result)


class Emitted:
    """Expected tokens of a verification for every k.

    Acceptance by position gives an estimate for all lengths: 1 + a_1 + a_1 a_2 + ... + a_1..a_k. a_j is the share of
    rows that keep proposal j, among those that kept all before it. The tokens that a length itself emitted count as
    well, because a length can fall into step with the text: then the tokens it cannot propose are the hard ones.
    """

    def __init__(self) -> None:
        self._positions = Survival(LONGEST)
        self._rows_K, self._tokens_K = np.zeros(LONGEST + 1), np.zeros(LONGEST + 1)  # rows verified with k, and tokens

    def add(self, kept_B: np.ndarray, draft_length: int) -> None:
        """Learn from verifications of `draft_length` proposals. kept_B: int64, proposals that each row kept."""
        self._positions.add(kept_B, draft_length)
        for sum_K, more in (self._rows_K, len(kept_B)), (self._tokens_K, len(kept_B) + int(kept_B.sum())):
            sum_K *= remembered(len(kept_B))
            sum_K[draft_length] += more

    def tokens(self) -> np.ndarray:
        """Return the expected tokens of a row for k = 0..LONGEST, float [LONGEST + 1]."""
        by_position_K = np.append(1.0, 1 + self._positions.beyond().cumsum())
        return (by_position_K * LENT_ROWS + self._tokens_K) / (LENT_ROWS + self._rows_K)
