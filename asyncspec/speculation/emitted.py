"""Expected tokens of a verification for every draft length, learned from verifications of some.

Shape suffixes: B rows of a verification, K draft length, N places in a draft.
"""

from __future__ import annotations

import numpy as np

from asyncspec.config import LONGEST_DRAFT as LONGEST

# Row verifications, or tokens looked back at, that are remembered. A quarter costs nothing; no end would hide changes.
WINDOW = 2048
# Rows that what is expected of a place counts for, beside the rows that came there. One row would do nearly as well.
PRIOR_ROWS = 16.0
# Rows that what other lengths tell of one counts for, beside the rows verified with it. Without it a length that falls
# into step with the text is never found out; the replay, which draws rows at random, does not see that.
LENT_ROWS = 1024.0


def remembered(rows: int) -> float:
    """Share of what was learned that so many new rows leave."""
    return max(0.5, 1 - rows / WINDOW)


class Survival:
    """Share of rows that go on beyond each of several places, learned over a sliding window."""

    def __init__(self, places: int) -> None:
        self._came_N, self._passed_N = np.zeros(places), np.zeros(places)

    def add(self, passed_B: np.ndarray, tried: int) -> None:
        """Count rows that each went beyond so many of the first `tried` places."""
        passed_N = len(passed_B) - np.bincount(passed_B, minlength=tried + 1)[:tried].cumsum()
        left = remembered(len(passed_B))
        for sum_N, more_N in (self._came_N, np.append(len(passed_B), passed_N[:-1])), (self._passed_N, passed_N):
            sum_N[:tried] = sum_N[:tried] * left + more_N

    def beyond(self) -> np.ndarray:
        """Share of rows that go beyond each place, float [places].

        Until many rows have come to a place, it is taken to let as many pass as the place before it; the first, all.
        """
        share, result = 1.0, []
        for came, passed in zip(self._came_N.tolist(), self._passed_N.tolist()):
            share = (PRIOR_ROWS * share + passed) / (PRIOR_ROWS + came)
            result.append(share)
        return np.cumprod(result)


class Emitted:
    """Expected tokens of a verification for every k.

    Acceptance by position tells of all lengths: 1 + a_1 + a_1 a_2 + ... + a_1..a_k. a_j is the share of rows that keep
    proposal j among those that kept all before it. What a length emitted itself counts beside that, since a length can
    fall into step with the text: then the tokens it cannot propose are the hard ones.
    """

    def __init__(self) -> None:
        self._positions = Survival(LONGEST)
        self._rows_K, self._tokens_K = np.zeros(LONGEST + 1), np.zeros(LONGEST + 1)  # verified with k; emitted then

    def add(self, kept_B: np.ndarray, draft_length: int) -> None:
        """Learn from verifications of `draft_length` proposals. kept_B: int64, proposals kept."""
        self._positions.add(kept_B, draft_length)
        for sum_K, more in (self._rows_K, len(kept_B)), (self._tokens_K, len(kept_B) + int(kept_B.sum())):
            sum_K *= remembered(len(kept_B))
            sum_K[draft_length] += more

    def tokens(self) -> np.ndarray:
        """Tokens of a row for k = 0..LONGEST, float [LONGEST + 1]."""
        by_position_K = np.append(1.0, 1 + self._positions.beyond().cumsum())
        return (by_position_K * LENT_ROWS + self._tokens_K) / (LENT_ROWS + self._rows_K)
