"""Choose the draft length of lookups: an `AutoLength` for proposals that may not be found but that hindsight predicts.

Shape suffixes: N steps, R tokens of responses, V verifications, K draft length from 1, J position of a proposal, M
number of proposals found or kept, from 0, E kinds of steps; [LONGEST + 1, ...] where K counts from 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncspec.config import LONGEST_DRAFT as LONGEST
from asyncspec.speculation.draft_length import AutoLength, Observation, spans
from asyncspec.speculation.emitted import PRIOR_ROWS, remembered


class LookupLength(AutoLength):
    """Chooses k for lookups, which may find nothing.

    The drafter looks back at some of the finished rollouts and reports what it would have proposed in them. That shows
    how many verifications each k would have taken, even while nothing is looked up. The proposals that real lookups
    keep correct this estimate.
    """

    def __init__(
        self, lives: Sequence[int], seconds: np.ndarray, packs: bool, farther: np.ndarray | None = None
    ) -> None:
        """
        Args:
            lives: numbers of live sequences, ascending.
            seconds: float [len(lives), LONGEST + 2], seconds of a step by the number of proposals verified per row. The
                last entry: a lookup was made and found nothing.
            packs: True if each row verifies only the proposals found for it. False if every row verifies as many as
                were found for the row with most.
            farther: see `Calibration`.
        """
        super().__init__(lives, seconds, None, farther)
        self.packs = packs
        # Hindsight: for each k, how many verifications would have found, and would have kept, M proposals.
        self._found_KM, self._kept_KM = (np.zeros((LONGEST + 1, LONGEST + 1)) for _ in range(2))
        # Hindsight: for each k, the share that would keep proposal j, among verifications that would keep all before.
        self._expected_KJ = np.zeros((LONGEST + 1, LONGEST))
        # Real lookups: rows that kept proposal j; and for each k the rows that kept all proposals before j.
        self._kept_J, self._of_KJ = np.zeros(LONGEST), np.zeros((LONGEST + 1, LONGEST))
        self._kinds: dict[int, tuple[np.ndarray, ...]] = {}  # by bucket, see `_kinds_of_steps`

    def learn(self, count_R: np.ndarray, kept_R: np.ndarray) -> None:
        """Learn from what a lookup would have proposed in a finished response.

        Args:
            count_R: int64, how many proposals would have been found before each token of the response, at most LONGEST.
            kept_R: int64, how many of them agree with the tokens that followed.
        """
        verified: list[int] = []  # tokens at which verifications would have begun: those of k = 1, then of k = 2, ...
        ends = [0]
        for k in range(1, LONGEST + 1):
            jump, at = (np.minimum(kept_R, k) + 1).tolist(), 0
            while at < len(jump):
                verified.append(at)
                at += jump[at]
            ends.append(len(verified))
        k_V, left = np.repeat(range(1, LONGEST + 1), np.diff(ends)), remembered(len(count_R))
        self._found_KM = self._found_KM * left + _table(k_V, count_R[verified])
        self._kept_KM = self._kept_KM * left + _table(k_V, kept_R[verified])
        came_KM = self._kept_KM[:, ::-1].cumsum(1)[:, ::-1]  # verifications that kept M or more
        before_KJ, kept_KJ = came_KM[:, :-1], came_KM[:, 1:]
        self._expected_KJ = np.divide(kept_KJ, before_KJ, out=np.zeros_like(kept_KJ), where=before_KJ > 0)
        self._kinds.clear()

    def _pays_alone(self) -> bool:
        return True  # a lookup has no features to keep

    def _tokens(self) -> np.ndarray:
        # Hindsight compares the lengths on the same text. But it promises too much where rollouts repeat others that
        # ended while they ran. So the acceptance of each position is corrected by what real verifications kept. A
        # position that none has reached gets the correction of the position before it.
        share, share_J = 1.0, []
        for kept, hoped in zip(self._kept_J.tolist(), (self._of_KJ * self._expected_KJ).sum(0).tolist()):
            share = (PRIOR_ROWS * share + kept) / (PRIOR_ROWS + hoped)
            share_J.append(share)
        return 1 + np.minimum(self._expected_KJ * share_J, 1.0).cumprod(1).sum(1)

    def _costs(self, live: int) -> np.ndarray:
        share_EK, read_EK, widest_EK = self._kinds_of_steps(live)
        lookups_K = (share_EK * self._seconds(live, read_EK, widest_EK, self._span)).sum(0)
        cost_K = np.append(self._seconds(live, -1, 0, self._span), lookups_K)
        return cost_K * self._times.corrections(self._times.bucket(live))

    def _kinds_of_steps(self, live: int) -> tuple[np.ndarray, ...]:
        """Return the kinds of steps that k = 1..LONGEST leads to, three times float [E, K].

        They are the share of each kind, how many proposals of a row are verified in it on average, and how many of the
        row with most.
        """
        bucket = self._times.bucket(live)
        if not self._found_KM.any():
            k_1K = np.arange(1.0, LONGEST + 1)[None]
            return np.ones_like(k_1K), k_1K, k_1K
        if bucket not in self._kinds:
            found_KM = self._found_KM[1:] / self._found_KM[1:].sum(1, keepdims=True)
            upto_KM = np.minimum(found_KM.cumsum(1), 1.0) ** live  # probability that no row found more than M
            if self.packs:  # two kinds: no row found any proposal, or some row did
                none_K = upto_KM[:, 0]
                any_K, zeros_K = np.maximum(1 - none_K, 1e-9), np.zeros(LONGEST)
                read_K, widest_K = found_KM @ np.arange(LONGEST + 1.0), (1 - upto_KM).sum(1)
                pairs = (none_K, 1 - none_K), (zeros_K, read_K / any_K), (zeros_K, widest_K / any_K)
                self._kinds[bucket] = tuple(np.stack(pair) for pair in pairs)
            else:  # one kind for each maximum: every row verifies as many as were found for the row with most
                most_EK = np.repeat(np.arange(LONGEST + 1.0)[:, None], LONGEST, 1)
                self._kinds[bucket] = np.diff(upto_KM, axis=1, prepend=0.0).T, most_EK, most_EK
        return self._kinds[bucket]

    def _seconds(self, live: int, read, widest, span):
        """Return the calibrated seconds of a step. Arguments but `live` may be arrays.

        Args:
            read: how many proposals of a row are verified, on average. 0: a lookup found none; -1: no lookup was made.
            widest: how many of the row with most. All rows attend as if they had as many.
            span: see `Observation`.
        """
        at = self._at(live)
        calibrated = np.interp(read, range(-1, LONGEST + 1), at.second_E[[0, -1, *range(1, LONGEST + 1)]])
        attending = (widest + 1) * (at.span if span is None else span) - (np.maximum(read, 0) + 1) * at.span
        return np.maximum(0.1 * calibrated, calibrated + at.position_s * attending)

    def _learn_tokens(self, steps: Sequence[Observation]) -> None:
        k, rows = steps[0].draft_length, steps[0].live
        # Positions that are not tried forget, too: what they kept when fewer rollouts had finished says little about
        # now.
        left = remembered(rows * self._passed)
        self._kept_J *= left
        self._of_KJ *= left
        if k:
            kept_M = np.bincount(np.concatenate([step.kept_B for step in steps]), minlength=LONGEST + 1)
            came_M = kept_M[::-1].cumsum()[::-1]
            self._kept_J += came_M[1:]
            self._of_KJ[k, :k] += came_M[:k]

    def _calibrated_seconds(self, steps: Sequence[Observation]) -> np.ndarray:
        found = [step.found_B for step in steps if step.found_B is not None]
        if not steps[0].draft_length:
            read_N, widest_N = np.full(len(steps), -1), np.zeros(len(steps))
        else:
            widest_N = np.array([found_B.max() for found_B in found])
            read_N = np.array([found_B.mean() for found_B in found]) if self.packs else widest_N
        return self._seconds(steps[0].live, read_N, widest_N, spans(steps))


def _table(k_V: np.ndarray, count_V: np.ndarray) -> np.ndarray:
    """Count how often each number occurs for each k, with numbers clipped to k; float [LONGEST + 1, LONGEST + 1]."""
    flat = np.bincount(k_V * (LONGEST + 1) + np.minimum(count_V, k_V), minlength=(LONGEST + 1) ** 2)
    return flat.reshape(LONGEST + 1, -1).astype(float)
