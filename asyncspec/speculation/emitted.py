"""Expected tokens of a verification for every draft length, learned from verifications of some.

Shape suffixes: B rows of a verification, K draft length, N places in a streak.
"""

from __future__ import annotations

import numpy as np

from asyncspec.config import LONGEST_DRAFT as LONGEST

WINDOW = 4096  # row verifications that are remembered
LENT_ROWS = 1024.0  # rows that other lengths' evidence counts for, beside the rows verified with a length itself
PRIOR_ROWS = 8.0  # rows that a place's evidence is taken to be worth before any row came there
REJECTED_PRIOR = 0.3  # share of rows rejected at a place of which nothing is known
STREAK = 4 * (LONGEST + 1)  # places of a streak that are told apart
# For each k, the places of a streak where its verifications begin.
BEGINS_KN = np.array([np.arange(STREAK) % (k + 1) == 0 for k in range(LONGEST + 1)], dtype=float)


class Survival:
    """Share of rows that go on beyond each of several places, learned over a sliding window."""

    def __init__(self, places: int, prior: float) -> None:
        self.prior, self.came_N, self.ended_N = prior, np.zeros(places), np.zeros(places)

    def add(self, first_B: np.ndarray, last_B: np.ndarray, ended_B: np.ndarray) -> None:
        """Count rows that came to the places first_B .. last_B - 1 and, where ended_B, ended in the last of them."""
        places, forget = len(self.came_N), remembered(len(first_B))
        passing_N = np.bincount(np.minimum(first_B, places), minlength=places + 1) - np.bincount(
            np.minimum(last_B, places), minlength=places + 1
        )
        came_N = passing_N.cumsum()[:-1]
        ended_N = np.bincount(np.minimum(last_B[ended_B], places + 1), minlength=places + 2)[1:-1]
        forget_N = np.where(came_N > 0, forget, 1.0)  # a place to which no row came forgets nothing
        self.came_N, self.ended_N = self.came_N * forget_N + came_N, self.ended_N * forget_N + ended_N

    def beyond(self) -> np.ndarray:
        """Share of rows that go beyond each place, float [places].

        Until many rows have come to a place, it is taken to reject as many as the place before it, or as all places
        before it together if that is more.
        """
        share, came_before, ended_before, result, left = self.prior, PRIOR_ROWS, PRIOR_ROWS * self.prior, [], 1.0
        for came, ended in zip(self.came_N.tolist(), self.ended_N.tolist()):
            share = (PRIOR_ROWS * max(share, ended_before / came_before) + ended) / (PRIOR_ROWS + came)
            came_before, ended_before, left = came_before + came, ended_before + ended, left * (1 - share)
            result.append(left)
        return np.array(result)


class Emitted:
    """Expected tokens of a verification for every k.

    Two estimates use the verifications of all lengths. By position: 1 + a_1 + a_1 a_2 + ... + a_1..a_k, with a_j the
    share of rows that keep proposal j among those that kept all before it. By streak, the tokens that a row emits from
    one rejection to the next: a streak of n tokens takes ceil(n / (k + 1)) verifications of k proposals. Both say too
    little of lengths shorter than the one that was verified, and too much of longer ones. So the greater is believed
    of shorter lengths, the smaller of longer ones. What a length emitted itself counts beside them, since a length can
    fall into step with the text.
    """

    def __init__(self) -> None:
        self._positions, self._streaks = Survival(LONGEST, REJECTED_PRIOR), Survival(STREAK, REJECTED_PRIOR)
        self._rows_K, self._tokens_K = np.zeros(LONGEST + 1), np.zeros(LONGEST + 1)  # verified with k; emitted then

    def add(self, streak_B: np.ndarray, kept_B: np.ndarray, draft_length: int) -> None:
        """Learn from verifications of `draft_length` proposals.

        Args:
            streak_B: int64, tokens emitted since the last rejection.
            kept_B: int64, proposals kept.
        """
        ended_B, none_B = kept_B < draft_length, np.zeros_like(kept_B)
        self._positions.add(none_B, kept_B + ended_B, ended_B)
        # The token that the target samples behind a draft kept whole belongs to the streak that goes on.
        self._streaks.add(np.maximum(streak_B - 1, 0), streak_B + kept_B + ended_B, ended_B)
        for sum_K, more in (self._rows_K, len(kept_B)), (self._tokens_K, len(kept_B) + int(kept_B.sum())):
            sum_K *= remembered(len(kept_B))
            sum_K[draft_length] += more

    def tokens(self) -> np.ndarray:
        """Tokens of a row for k = 0..LONGEST, float [LONGEST + 1]."""
        by_position_K = np.append(1.0, 1 + self._positions.beyond().cumsum())
        if not self._rows_K.any():
            return by_position_K
        by_streak_K = self._by_streak()
        # Share of rows that had a shorter draft; rows with one just as long count half.
        shorter_K = (self._rows_K.cumsum() - self._rows_K / 2) / self._rows_K.sum()
        greater_K, smaller_K = np.maximum(by_position_K, by_streak_K), np.minimum(by_position_K, by_streak_K)
        lent_K = greater_K * (1 - shorter_K) + smaller_K * shorter_K
        return (lent_K * LENT_ROWS + self._tokens_K) / (LENT_ROWS + self._rows_K)

    def _by_streak(self) -> np.ndarray:
        beyond_N = self._streaks.beyond()
        before_N, last = np.append(1.0, beyond_N[:-1]), beyond_N[-LONGEST - 2 :]
        going_on = (last[-1] / last[0]) ** (1 / (LONGEST + 1)) if last[0] > 0 else 0.0
        rest = last[-1] / max(1 - going_on, 0.01)  # tokens of streaks beyond the places told apart
        return (before_N.sum() + rest) / (BEGINS_KN @ before_N + rest / np.arange(1, LONGEST + 2))


def remembered(rows: int) -> float:
    """Share of what is remembered that so many new rows leave."""
    return max(0.5, 1 - rows / WINDOW)
