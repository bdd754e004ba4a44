"""How far to speculate: for each engine step the draft length k, 0 included, that emits the most tokens a second.

    rate(B, k) = B * (1 + a_1 + a_1 a_2 + ... + a_1..a_k) / seconds(B, k)

B sequences are live; a_j is the share of rows whose j-th proposal is accepted when all before it were, learned online over a
sliding window; seconds are measured (a calibration fills the table, every step corrects it). Both look only at what is past, or
at how many proposals a lookup has found, which the tokens before them decide: so the choice cannot bend the distribution.

Trying a length that is not held for the best is paid from a budget of three thousandths of the engine's time, or one where it is far from the
best, so a draft that has become good again is found out, and a useless one costs next to nothing.

Shape suffixes: B live rows.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Sequence

import numpy as np

from asyncspec.config import LONGEST_DRAFT as LONGEST

EXPLORE_SHARE, FAR_SHARE = 0.003, 0.001  # the second where nothing comes near to no speculation
BUDGET_S, BUDGET_STEPS = 0.1, 2  # the most that is saved up: so long, or so many steps
FIRST_BUDGET_S = 0.02  # given at the start, where the calibration is all that is known
WINDOW = 4096  # row verifications over which acceptance is remembered
RESTING_WINDOW = 256  # the same where proposals are only tried now and then: a draft may have become good since
PRIOR_ROWS, PRIOR_RATE = 8.0, 0.7
KINDS = 16
# A choice holds for so many steps while as many sequences are live, because choosing and learning cost what a dozen operations
# cost; where nothing comes near to no speculation, for so many more. Of a hold without speculation one step in HOLD is learned from.
HOLD, HOLD_LONG, NEAR = 8, 32, 0.9


class FixedLength:
    """Always the same k."""

    def __init__(self, draft_length: int) -> None:
        self.longest = draft_length

    def choose(self, live: int) -> int:
        return self.longest

    def trim(self, live: int, count_B: np.ndarray, kind_B: np.ndarray) -> int:
        """The draft length to verify, given how many proposals a lookup has found for each row."""
        return int(count_B.max())

    def observe(self, live: int, draft_length: int, seconds: float, kept_B: np.ndarray, proposed: tuple | None = None,
                usual: bool = True) -> None:
        pass


class Acceptance:
    """a_j for j = 1..LONGEST, learned over a sliding window. Plain lists: numpy costs more on eight numbers."""

    def __init__(self) -> None:
        self.tried, self.kept = [PRIOR_ROWS] * LONGEST, [PRIOR_ROWS * PRIOR_RATE] * LONGEST

    def add(self, kept_B: np.ndarray, draft_length: int, window: int) -> None:
        """Rows that kept so many of `draft_length` proposals."""
        forget = max(0.5, 1 - len(kept_B) / window)
        at_least = len(kept_B)
        for j, count in enumerate(np.bincount(kept_B, minlength=draft_length).tolist()[:draft_length]):
            if not at_least:  # no row got here: nothing learned, nothing forgotten
                break
            self.tried[j] = self.tried[j] * forget + at_least
            at_least -= count
            self.kept[j] = self.kept[j] * forget + at_least

    def add_alike(self, kept: int, count: int, rows: int) -> None:
        """So many rows that kept `kept` of `count` proposals each."""
        forget = max(0.5, 1 - rows / WINDOW)
        for j in range(min(kept + 1, count)):
            self.tried[j] = self.tried[j] * forget + rows
            self.kept[j] = self.kept[j] * forget + rows * (j < kept)

    def emitted(self) -> list[float]:
        """Expected tokens of one verification for k = 0..LONGEST."""
        total = reach = 1.0
        result = [1.0]
        for tried, kept in zip(self.tried, self.kept):
            reach *= kept / tried
            total += reach
            result.append(total)
        return result


class _Learning:
    """What both controllers learn from: a step's time for each length, by bucket of live sequences; and the budget for trying."""

    longest = LONGEST

    def __init__(self, lives: Sequence[int], seconds: np.ndarray) -> None:
        """
        Args:
            lives: numbers of live sequences the calibration measured, ascending.
            seconds: float [len(lives), LONGEST + 1], a step's time at each of them for each draft length.
        """
        self._log_lives, self._measured = np.log2(np.asarray(lives, dtype=float)), np.asarray(seconds, dtype=float)
        self._table: dict[int, list[float]] = {}
        self._drift: dict[int, float] = {}
        self._best_rate = 0.0  # tokens a second for each row, expected of the best choice for the step to come
        self.budget_s, self._turn, self._exploring = FIRST_BUDGET_S, 0, False
        self._best, self._live, self._held, self._share = 0, 0, 0, EXPLORE_SHARE
        self._seen: list[tuple] = []  # steps of the choice that holds, to be learned from together
        self._passed_s = 0.0  # of steps since the budget was kept last

    def choose(self, live: int) -> int:
        if self._held and live == self._live:
            self._held -= 1
            self._exploring = False
            return self._best
        self._learn()
        self._live, self._held, self._share = live, HOLD - 1, EXPLORE_SHARE
        return self._chosen(live)

    def _rest(self, other_rate: float) -> None:
        """No speculation is the best choice, and this the rate of the next best."""
        if other_rate < NEAR * self._best_rate:
            self._held, self._share = HOLD_LONG - 1, FAR_SHARE

    def observe(self, live: int, draft_length: int, seconds: float, kept_B: np.ndarray, proposed: tuple | None = None,
                usual: bool = True) -> None:
        """Learn from a step, before the next choice.

        Args:
            draft_length: the k that `choose` gave.
            seconds: of the whole step.
            kept_B: int64, accepted proposals of each row.
            proposed: count_B and kind_B of a lookup's proposals that were verified.
            usual: False if the step did work that is not part of every such step; its time then says nothing of others.
        """
        self._passed_s += seconds
        step = (draft_length, seconds, kept_B, proposed, usual)
        if self._exploring:  # by itself: it is charged to the budget
            self._learn_from(*zip(step))
        elif draft_length or self._held % HOLD == HOLD - 1:
            self._seen.append(step)

    def _learn(self) -> None:
        """Learn from the steps seen, all of one draft length."""
        if self._seen:
            self._learn_from(*zip(*self._seen))
            self._seen.clear()

    def _spent(self, seconds: Sequence[float], tokens: float) -> None:
        """Keep the budget: steps that emitted so many tokens for each row."""
        if self._exploring:
            self.budget_s -= max(0.0, seconds[0] - tokens / self._best_rate)
        self.budget_s = min(self.budget_s + self._share * self._passed_s, max(BUDGET_S, BUDGET_STEPS * seconds[0]))
        self._passed_s = 0.0

    def _took(self, entry: int, seconds: Sequence[float]) -> None:
        """Learn the time of a step. Most of what changes (longer sequences, a busy machine) changes all alike; the rest is this entry's own."""
        bucket, count = self._bucket(self._live), len(seconds)
        row, drift = self._table[bucket], self._drift[bucket]
        ratio = min(2.0, max(0.5, sorted(seconds)[(count - 1) // 2] / (row[entry] * drift)))
        self._drift[bucket] = drift * ratio ** (1 - 0.9**count)
        # What is tried seldom learns more from each step.
        row[entry] *= ratio ** (1 - (0.85 if self._exploring else 0.97) ** count)

    def _seconds(self, live: int) -> list[float]:
        bucket = self._bucket(live)
        drift = self._drift[bucket]
        return [s * drift for s in self._table[bucket]]

    def _bucket(self, live: int) -> int:
        """Half powers of two: live sequences that cost about the same."""
        bucket = round(2 * math.log2(live))
        if bucket not in self._table:
            at = math.log2(live)
            row = [float(np.interp(at, self._log_lives, column)) for column in self._measured.T]
            self._table[bucket] = [*row, row[0]]  # the last: nothing verified though proposals were looked up
            self._drift[bucket] = sum(self._drift.values()) / len(self._drift) if self._drift else 1.0
        return bucket


class AutoLength(_Learning):
    """For drafters that always have proposals: the k whose expected tokens and time promise most."""

    def __init__(self, lives: Sequence[int], seconds: np.ndarray) -> None:
        super().__init__(lives, seconds)
        self.acceptance = Acceptance()

    def _chosen(self, live: int) -> int:
        rates = [e / s for e, s in zip(self.acceptance.emitted(), self._seconds(live))]
        self._best_rate = max(rates)
        self._best = best = rates.index(self._best_rate)
        # Neighbours of the best, in turn: one longer, one shorter, and a jump over a length that does not pay alone.
        self._turn += 1
        other = best + (1, -1, 2)[self._turn % 3]
        self._exploring = 0 <= other <= LONGEST and self.budget_s > self._seconds(live)[other] * (1 - rates[other] / self._best_rate)
        if self._exploring:
            return other
        if not best:
            self._rest(max(rates[1:]))
        return best

    def _learn_from(self, draft_length, seconds, kept_NB, proposed, usual) -> None:
        k = draft_length[0]
        if k:
            kept_R = kept_NB[0] if len(kept_NB) == 1 else np.concatenate(kept_NB)
            self.acceptance.add(kept_R, k, WINDOW if self._best else RESTING_WINDOW)
        # The tokens to be expected: those that came are mostly chance, and only losses are charged.
        self._spent(seconds, self.acceptance.emitted()[k] if self._exploring else 1.0)
        if usual := [s for s, as_usual in zip(seconds, usual) if as_usual]:
            self._took(k, usual)


class LookupLength(_Learning):
    """For lookups, which may have found nothing: whether to look at all, and then how much of what was found to verify.

    The first is decided by the rate that looking has had; the second by the acceptance of each kind of proposal.
    """

    WINDOW = 64  # steps over which the rate of looking is remembered

    def __init__(self, lives: Sequence[int], seconds: np.ndarray) -> None:
        super().__init__(lives, seconds)
        self.by_kind = [Acceptance() for _ in range(KINDS)]
        self._looked: dict[int, list[float]] = {}  # by bucket: tokens of a row, seconds, and steps; forgotten over a window

    def _chosen(self, live: int) -> int:
        tokens, spent, steps = self._record(live)
        plain, looking = 1 / self._seconds(live)[0], tokens / spent
        self._best_rate = max(plain, looking)
        self._best = LONGEST if looking >= plain else 0
        other = LONGEST - self._best
        self._exploring = self.budget_s > (self._seconds(live)[0] * (1 - plain / looking) if self._best else spent / steps * (1 - looking / plain))
        if not self._best and not self._exploring:
            self._rest(looking)
        return other if self._exploring else self._best

    def trim(self, live: int, count_B: np.ndarray, kind_B: np.ndarray) -> int:
        """The draft length to verify, given what was found: how many proposals each row has, and of what kind."""
        longest = int(count_B.max())
        if not longest:
            return 0
        # tokens[k]: expected of all rows if up to k proposals of each are verified.
        tokens, expected = [0.0] * (longest + 1), {}
        for (kind, count), rows in Counter(zip(kind_B.tolist(), count_B.tolist())).items():
            if kind not in expected:
                expected[kind] = self.by_kind[min(kind, KINDS - 1)].emitted()
            emitted = expected[kind]
            for k in range(longest + 1):
                tokens[k] += rows * emitted[min(k, count)]
        seconds = self._seconds(live)
        seconds[0] = seconds[-1]
        rates = [t / s for t, s in zip(tokens, seconds)]
        best = rates.index(max(rates))
        self._turn += 1
        other = longest if self._turn % 2 else min(best + 1, longest)
        if other != best and self.budget_s > seconds[other] * (1 - rates[other] / rates[best]):
            self._exploring = True
            return other
        return best

    def _learn_from(self, draft_length, seconds, kept_NB, proposed, usual) -> None:
        tokens, live = 1.0, self._live
        by_entry: dict[int, list[float]] = {}
        for k, spent, kept_B, found, _ in zip(draft_length, seconds, kept_NB, proposed, usual):
            entry = 0
            if k:
                tokens, entry = 1.0 + int(kept_B.sum()) / live, LONGEST + 1
                if found is not None:
                    count_B, kind_B = found
                    entry = int(count_B.max()) or entry
                    for (kind, count, kept), rows in Counter(zip(kind_B.tolist(), count_B.tolist(), kept_B.tolist())).items():
                        self.by_kind[min(kind, KINDS - 1)].add_alike(kept, count, rows)
                record = self._record(live)
                for i, value in enumerate((tokens, spent, 1.0)):
                    record[i] = record[i] * (1 - 1 / self.WINDOW) + value
            by_entry.setdefault(entry, []).append(spent)
        self._spent(seconds, tokens)
        for entry, times in by_entry.items():
            self._took(entry, times)

    def _record(self, live: int) -> list[float]:
        bucket = self._bucket(live)
        if bucket not in self._looked:
            # As good as plain generation and a little better, so that it is tried.
            self._looked[bucket] = [8 * 1.1, 8 * self._seconds(live)[0], 8.0]
        return self._looked[bucket]
