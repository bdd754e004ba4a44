"""How far lookups are to speculate: `draft_length.AutoLength` for proposals that may not be found, and that looking
back can promise.

Shape suffixes: those of draft_length.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncspec.config import LONGEST_DRAFT as LONGEST
from asyncspec.speculation.draft_length import AutoLength

HINDSIGHT_PRIOR = 32.0  # proposals kept that what looking back promises counts for beside what verifications kept
HINDSIGHT_WINDOW = 4096  # tokens of rollouts that were looked back at
# row verifications, or steps, over which acceptance of lookups is remembered: it rises with the past
LOOKUP_WINDOW, LOOKUP_STEPS = 1536, 96


class LookupLength(AutoLength):
    """For lookups, which may have found nothing.

    What a k would bring is known in hindsight, also while nothing is looked up: the drafter tells what it would have
    proposed in some of the finished rollouts, and from that follows how many verifications each k would have taken.
    Where lookups are made, what they keep corrects it.
    """

    def __init__(
        self, lives: Sequence[int], seconds: np.ndarray, packs: bool, farther: np.ndarray | None = None
    ) -> None:
        """
        Args:
            seconds: float [len(lives), LONGEST + 2], by how many proposals of each row are verified; the last: looked,
                and found nothing.
            packs: whether of each row no more are read than were found; otherwise as many as were found of any.
            farther: as for `AutoLength`.
        """
        super().__init__(lives, seconds, None, farther)
        self._packs = packs
        # what was calibrated, by bucket; the table has by what each k's steps take more, or less
        self._entries: dict[int, list[float]] = {}
        # verifications of each k that would have had so many proposals
        self._tokens, self._found_KM = 0.0, np.zeros((LONGEST + 1, LONGEST + 1))
        self._to_find: dict[int, tuple[np.ndarray, ...]] = {}  # by bucket: what steps of each k find, see `_finds`
        # share of verifications of each k that would keep so many proposals or more
        self._promise_KJ = np.zeros((LONGEST + 1, LONGEST))
        self._expected_KJ = np.zeros((LONGEST + 1, LONGEST))  # the same, of those that would keep one fewer
        # Rows that kept so many, and for each k those that kept one fewer and so were asked; forgotten over a window.
        self._kept_J, self._of_KJ = np.zeros(LONGEST), np.zeros((LONGEST + 1, LONGEST))

    def learn(self, count_R: np.ndarray, kept_R: np.ndarray) -> None:
        """Look back at a response.

        Args:
            count_R: int64, how many proposals would have been found before each of its tokens, up to LONGEST.
            kept_R: int64, how many of them agree with what followed.
        """
        forget = max(0.5, 1 - len(count_R) / HINDSIGHT_WINDOW)
        self._tokens = self._tokens * forget + len(count_R)
        verified: list[int] = []  # where the verifications of each k would begin, one k after the other
        ends = [0]
        for k in range(1, LONGEST + 1):
            jump, at = (np.minimum(kept_R, k) + 1).tolist(), 0
            while at < len(jump):
                verified.append(at)
                at += jump[at]
            ends.append(len(verified))
        k_V = np.repeat(range(1, LONGEST + 1), np.diff(ends))
        kept_KJ = self._promise_KJ * self._found_KM.sum(1, keepdims=True) * forget + _at_least(
            _table(k_V, kept_R[verified])
        )
        self._found_KM = self._found_KM * forget + _table(k_V, count_R[verified])
        self._promise_KJ = kept_KJ / np.maximum(self._found_KM.sum(1, keepdims=True), 1e-9)
        self._to_find.clear()
        promise_KJ = self._promise_KJ
        before_KJ = np.concatenate([np.ones((LONGEST + 1, 1)), promise_KJ[:, :-1]], 1)
        self._expected_KJ = np.divide(promise_KJ, before_KJ, out=np.zeros_like(promise_KJ), where=before_KJ > 0)

    def _pays_alone(self) -> bool:
        return True  # there are no features

    def _emitted(self) -> list[float]:
        # Looking back compares the lengths over the same text, each from where its own verifications would end: what
        # was kept while one of them was
        # held tells less of the others. But it promises too much where rollouts copy from others that ended while they
        # ran, most of all of long
        # copies. So for each position it is corrected by what verifications kept; one that none has come to as the one
        # before it.
        share, share_J = 1.0, []
        for kept, hoped in zip(self._kept_J.tolist(), (self._of_KJ * self._expected_KJ).sum(0).tolist()):
            share = (HINDSIGHT_PRIOR * share + kept) / (HINDSIGHT_PRIOR + hoped)
            share_J.append(share)
        return (1 + np.minimum(self._expected_KJ * share_J, 1.0).cumprod(1).sum(1)).tolist()

    def _costs(self, live: int) -> list[float]:
        bucket = self._bucket(live)
        share_EK, read_EK, widest_EK = self._finds(bucket, live)
        lookups_K = (share_EK * self._step_s(bucket, read_EK, widest_EK, self._span)).sum(0)
        seconds = [self._step_s(bucket, -1, 0, self._span), *lookups_K.tolist()]
        return [s * self._drift[bucket] * more for s, more in zip(seconds, self._table[bucket])]

    def _finds(self, bucket: int, live: int) -> tuple[np.ndarray, ...]:
        """Kinds E of steps of k = 1..LONGEST: what share of them it is, how many proposals of a row are read in it on
        average, and of the row of which most are; float [E, K].
        """
        if not self._tokens:
            k_1K = np.arange(1.0, LONGEST + 1)[None]
            return np.ones_like(k_1K), k_1K, k_1K
        if bucket not in self._to_find:
            found_KM = self._found_KM[1:] / self._found_KM[1:].sum(1, keepdims=True)
            upto_KM = np.minimum(found_KM.cumsum(1), 1.0) ** live  # how often no row has found more
            if self._packs:  # none of any row, or some
                none_K = upto_KM[:, 0]
                any_K, zeros_K = np.maximum(1 - none_K, 1e-9), np.zeros(LONGEST)
                read_K, widest_K = found_KM @ np.arange(LONGEST + 1.0), (1 - upto_KM).sum(1)
                self._to_find[bucket] = tuple(
                    np.stack(pair)
                    for pair in ((none_K, 1 - none_K), (zeros_K, read_K / any_K), (zeros_K, widest_K / any_K))
                )
            else:  # as many of each row as of the one that has found most
                most_EK = np.repeat(np.arange(LONGEST + 1.0)[:, None], LONGEST, 1)
                self._to_find[bucket] = np.diff(upto_KM, axis=1, prepend=0.0).T, most_EK, most_EK
        return self._to_find[bucket]

    def _step_s(self, bucket: int, read, widest, span):
        """Seconds of a step as calibrated, or of several.

        Args:
            read: how many proposals of a row are verified, on average; 0: looked, and found none; -1: did not look.
            widest: of the row with most. All rows attend as if they had as many.
            span: see `observe`.
        """
        row, (each, usual) = self._entries[bucket], self._far[bucket]
        calibrated = np.interp(read, range(-1, LONGEST + 1), [row[0], row[-1], *row[1:-1]])
        attending = (widest + 1) * (usual if span is None else span) - (np.maximum(read, 0) + 1) * usual
        return np.maximum(0.1 * calibrated, calibrated + each * row[LONGEST] * attending)

    def _bucket(self, live: int) -> int:
        bucket = super()._bucket(live)
        if bucket not in self._entries:
            self._entries[bucket], self._table[bucket] = self._table[bucket], [1.0] * (LONGEST + 1)
            self._doubt[bucket] = np.eye(LONGEST + 1)
        return bucket

    def _learn_from(self, draft_length, seconds, kept_NB, found_NB, usual, run_NB, span) -> None:
        k, rows = draft_length[0], sum(len(kept_B) for kept_B in kept_NB)
        window = max(LOOKUP_WINDOW, LOOKUP_STEPS * len(kept_NB[0]))
        forget = max(0.5, 1 - rows * self._passed / len(seconds) / window)
        # Of positions that are not tried, too: what they kept when the past was shorter says little of what is promised
        # now.
        self._kept_J *= forget
        self._of_KJ *= forget
        if k:
            kept_J = _at_least(np.bincount(np.concatenate(kept_NB), minlength=LONGEST + 1))
            self._kept_J += kept_J
            self._of_KJ[k, :k] += np.append(rows, kept_J[:-1])[:k]
        self._spent(k, seconds)
        read_N, widest_N = np.full(len(seconds), -1), np.zeros(len(seconds))
        if k:
            widest_N = np.array([found_B.max() for found_B in found_NB])
            read_N = np.array([found_B.sum() / len(found_B) for found_B in found_NB]) if self._packs else widest_N
        over_N = np.array(seconds) / self._step_s(
            self._bucket(self._live), read_N, widest_N, None if span[0] is None else np.array(span)
        )
        if any(usual):
            self._took(k, over_N[list(usual)].tolist())


def _table(k_V: np.ndarray, count_V: np.ndarray) -> np.ndarray:
    """float [LONGEST + 1, LONGEST + 1]: for each k how often there were so many, k at most."""
    return (
        np.bincount(k_V * (LONGEST + 1) + np.minimum(count_V, k_V), minlength=(LONGEST + 1) ** 2)
        .reshape(LONGEST + 1, -1)
        .astype(float)
    )


def _at_least(count_M: np.ndarray) -> np.ndarray:
    """Of how often there were 0..LONGEST, how often there were 1, 2, ... or more; along the last axis."""
    return count_M[..., :0:-1].cumsum(-1)[..., ::-1]
