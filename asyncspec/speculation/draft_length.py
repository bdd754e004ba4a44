"""How far to speculate: for each engine step the draft length k, 0 included, that emits the most tokens a second.

    rate(B, k) = B * emitted(k) / seconds(B, k)

B sequences are live; seconds are measured (a calibration fills the table, every step corrects it). What a row emits is
learned online: while one k is held, of all others, too, over the same text (`Emitted`). Rows that end emit less, and of
them less is read, which is learned as well. Of lookups, what looking back at finished rollouts promises, corrected by
what was kept. Only what is past is looked at, so the choice cannot bend the distribution.

Trying a length that is not held for the best is paid from a budget of four thousandths of the engine's time, or one
where it is far from the best, and more while a number of live sequences is new. So a draft that has become good again
is found out, and a useless one costs next to nothing.

Shape suffixes: B live rows, R tokens of responses, V verifications, K draft length, J position of a proposal, N place
in a run, M proposals found, E entries of the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from asyncspec.config import LONGEST_DRAFT as LONGEST
from asyncspec.speculation.calibration import plausible

LENGTHS = (0, 1, 2, 3, 4, 5, 7, 10, LONGEST)  # that are considered: of many alike the luckiest would seem the best
EXPLORE_SHARE, FAR_SHARE = 0.004, 0.001  # the second where nothing comes near to no speculation
# so many times more while a number of live sequences is new; a quarter of that after so many choices held there
EARLY_TIMES, EARLY_HOLDS = 7, 16
BUDGET_S, BUDGET_STEPS = 0.1, 2  # the most that is saved up: so long, or so many steps
FIRST_BUDGET_S = 0.02  # given at the start, where the calibration is all that is known
WINDOW = 4096  # row verifications over which acceptance is remembered
RESTING_WINDOW = 256  # the same where proposals are only tried now and then: a draft may have become good since
TOLD_ROWS = 1024.0  # that what other lengths tell of one counts for beside the rows that were verified with it
RUN = 4 * (LONGEST + 1)  # places of a run that are told apart
# rows that a place counts for like those before it; the share rejected where nothing is known
PRIOR_ROWS, REJECTED_PRIOR = 8.0, 0.3
ALL_K = np.arange(LONGEST + 1)
# For each k, behind how many tokens of a run its verifications begin.
BEGINS_KN = np.array([np.arange(RUN) % (k + 1) == 0 for k in range(LONGEST + 1)], dtype=float)
# A try of one step beside another length, or one that is held, is charged with so much of a step besides what it loses
# itself: the steps after it
# emit less than usual, too, because fixed lengths fall into step with what repeats in the text, the hard token being
# the one that the target
# samples itself.
LEAST_CHARGE, LEAST_CHARGE_HELD = 0.2, 0.05
CALIBRATED_STEPS = 8.0  # that a calibration counts for in what an entry takes
# of a calibration's variance, which each step adds to that of every entry: what a step takes changes
FORGETTING = 0.003
# where what is held takes so many times as long after a try as before it, the try's time counts half; the less steady,
# the less
STEADY = 1.1
DOUBT = 0.07  # by what share a length may be better than expected for each standard deviation of a calibration
ONE_SIDED = 2.0  # steps that a comparison counts for with what was held before it alone
# share by which a try may differ from what is expected, for the same; by how much it differs more tells less and less
OUTLYING = 0.1
NONE_TURNS = 8  # tries, of which one is of no speculation
SETTLED = 4  # choices held with about as many sequences live, before anything is tried beside them
# A choice holds for so many steps while about as many sequences are live, because choosing and learning cost what a
# dozen operations
# cost; once it is not new for HOLD_S, or HOLD_MOST steps (without speculation twice as many) if that is less, of which
# every other HOLD are observed.
# One without speculation holds for HOLD_NONE steps at least, once it is not new or where nothing comes near to it, and
# one step in HOLD of that is
# observed.
HOLD, HOLD_NONE, HOLD_MOST, HOLD_S, NEAR = 8, 32, 128, 0.3, 0.9


class FixedLength:
    """Always the same k."""

    keeps, watches = True, False

    def __init__(self, draft_length: int) -> None:
        self.longest = draft_length

    def choose(
        self, live: int, missed_S: np.ndarray | None = None, attended: Callable[[int], float] | None = None
    ) -> int:
        return self.longest

    def observe(
        self,
        live: int,
        draft_length: int,
        seconds: float,
        kept_B: np.ndarray,
        run_B: np.ndarray,
        found_B: np.ndarray | None = None,
        usual: bool = True,
        missed_B: np.ndarray | None = None,
        span: float | None = None,
    ) -> None:
        pass


class Survival:
    """What share ends at each of some places, of those that come there, learned over a sliding window."""

    def __init__(self, places: int, prior: float) -> None:
        self.prior, self.came_N, self.ended_N = prior, np.zeros(places), np.zeros(places)

    def add(self, first_B: np.ndarray, last_B: np.ndarray, ended_B: np.ndarray, window: int) -> None:
        """So many came to the places from first_B on and before last_B, counted from 0, and ended in the last of them
        or did not end.
        """
        places, forget = len(self.came_N), max(0.5, 1 - len(first_B) / window)
        passing_N = np.bincount(np.minimum(first_B, places), minlength=places + 1) - np.bincount(
            np.minimum(last_B, places), minlength=places + 1
        )
        came_N = passing_N.cumsum()[:-1]
        ended_N = np.bincount(np.minimum(last_B[ended_B], places + 1), minlength=places + 2)[1:-1]
        forget_N = np.where(came_N > 0, forget, 1.0)  # where none came nothing is learned, and nothing forgotten
        self.came_N, self.ended_N = self.came_N * forget_N + came_N, self.ended_N * forget_N + ended_N

    def beyond(self) -> np.ndarray:
        """What share goes beyond each place, float [places]. Until many have come to a place, it is taken for like the
        one before it, or like all before it if fewer go beyond those.
        """
        share, came_before, ended_before, result, left = self.prior, PRIOR_ROWS, PRIOR_ROWS * self.prior, [], 1.0
        for came, ended in zip(self.came_N.tolist(), self.ended_N.tolist()):
            share = (PRIOR_ROWS * max(share, ended_before / came_before) + ended) / (PRIOR_ROWS + came)
            came_before, ended_before, left = came_before + came, ended_before + ended, left * (1 - share)
            result.append(left)
        return np.array(result)


class Emitted:
    """Expected tokens of a verification for every k, from verifications of some.

    There are two ways to tell, which agree on a k that alone was held. By positions: 1 + a_1 + a_1 a_2 + ... +
    a_1..a_k, with a_j the share of rows that keep the j-th proposal, of those that kept all before it. By runs, which
    are what a row emits from one rejection to the next: a run of n tokens takes ceil(n / (k + 1)) verifications. Both
    say too little of a shorter draft: by positions it begins as often behind a hard token as the longer one, by runs it
    is rejected wherever that was, though its proposals have seen more. So they say too much of a longer one. Of a
    strong draft runs come close, because tokens are hard wherever a draft begins; of a weak one positions do. Neither
    sees that a length can fall into step with the text, so that the tokens it cannot propose are the hard ones: what
    each length emitted itself is remembered, too.
    """

    def __init__(self) -> None:
        self._positions, self._runs = Survival(LONGEST, REJECTED_PRIOR), Survival(RUN, REJECTED_PRIOR)
        # verified with each k in the window, and what they emitted
        self._rows_K, self._tokens_K = np.zeros(LONGEST + 1), np.zeros(LONGEST + 1)

    def add(self, run_B: np.ndarray, kept_B: np.ndarray, draft_length: int, window: int) -> None:
        """Learn from verifications of `draft_length` proposals.

        Args:
            run_B: int64, how many tokens of a run came before.
            kept_B: int64, how many proposals were kept.
        """
        ended_B, none_B = kept_B < draft_length, np.zeros_like(kept_B)
        self._positions.add(none_B, kept_B + ended_B, ended_B, window)
        # What the target sampled behind a draft that was kept whole belongs to the run that goes on.
        self._runs.add(np.maximum(run_B - 1, 0), run_B + kept_B + ended_B, ended_B, window)
        for sum_K, more in (self._rows_K, len(run_B)), (self._tokens_K, len(run_B) + int(kept_B.sum())):
            sum_K *= max(0.5, 1 - len(run_B) / window)
            sum_K[draft_length] += more

    def tokens(self) -> np.ndarray:
        """float [LONGEST + 1], for k = 0..LONGEST."""
        by_position_K = np.append(1.0, 1 + self._positions.beyond().cumsum())
        beyond_N = self._runs.beyond()
        before_N, last = np.append(1.0, beyond_N[:-1]), beyond_N[-LONGEST - 2 :]
        # over whole verifications of any length
        going_on = (last[-1] / last[0]) ** (1 / (LONGEST + 1)) if last[0] > 0 else 0.0
        rest = last[-1] / max(1 - going_on, 0.01)  # tokens of runs that are longer than is told apart
        by_run_K = (before_N.sum() + rest) / (BEGINS_KN @ before_N + rest / np.arange(1, LONGEST + 2))
        if not self._rows_K.any():
            return by_position_K
        # share of rows that had a shorter draft; of as long a one, half
        shorter_K = (self._rows_K.cumsum() - self._rows_K / 2) / self._rows_K.sum()
        told_K = np.maximum(by_position_K, by_run_K) * (1 - shorter_K) + np.minimum(by_position_K, by_run_K) * shorter_K
        return (told_K * TOLD_ROWS + self._tokens_K) / (TOLD_ROWS + self._rows_K)


class AutoLength:
    """The k whose expected tokens and time promise most; for drafters that always have proposals."""

    longest = LONGEST

    def __init__(
        self,
        lives: Sequence[int],
        seconds: np.ndarray,
        read: np.ndarray | None = None,
        farther: np.ndarray | None = None,
    ) -> None:
        """
        Args:
            lives: numbers of live sequences the calibration measured, ascending.
            seconds: float [len(lives), LONGEST + 2], a step's time at each of them for each draft length; the last: of
                the longest, of which more was read, or less.
            read: float, of the same shape, how many proposals of each row were read meanwhile; None: all, and for the
                last half of them.
            farther: float [len(lives), 3], the longest draft's time with rows farther on; how many positions each token
                attended to there, and how many elsewhere; None: these cost nothing.
        """
        # the second: proposals of which none is read any more, as the row would end
        self._emits, self._read = Emitted(), Survival(LONGEST, 0.0)
        self.keeps = True  # whether features for the draft are to be kept though nothing is proposed
        self.watches = True  # whether the step that was chosen for last is to be observed
        self._log_lives, self._measured = (
            np.log2(np.asarray(lives, dtype=float)),
            plausible(np.asarray(seconds, dtype=float)),
        )
        self._measured_read = np.tile([*range(LONGEST + 1), LONGEST / 2], (len(lives), 1)) if read is None else read
        if farther is None:
            self._measured_far = np.zeros((len(lives), 2))
        # what a position more takes, of each token of a row, over the longest draft's time; and how many there usually
        # were
        else:
            more, by = (
                farther[:, 0] - self._measured[:, LONGEST],
                np.maximum(farther[:, 1] - farther[:, 2], 1) * (LONGEST + 1),
            )
            self._measured_far = np.stack([np.maximum(more, 0) / by / self._measured[:, LONGEST], farther[:, 2]], 1)
        # positions that a token attends to now, counted for a row on average; None: as usual
        self._span: float | None = None
        self._table: dict[int, list[float]] = {}  # a step's time for each entry, by bucket of live sequences
        self._usual: dict[int, list[float]] = {}  # how many proposals of each row are read in that time
        self._far: dict[int, list[float]] = {}  # as measured
        self._drift: dict[int, float] = {}
        self._holds: dict[int, int] = {}  # from which the drift was learned
        self._level, self._level_steps = 1.0, 1  # of the last hold: its time over the table's, and from how many steps
        self._pace = 1.0  # its time over the expected
        self._before = (-1, 0)  # its bucket and entry
        # covariance [entries, entries] of the errors of a row's logarithms over a calibration's variance
        self._doubt: dict[int, np.ndarray] = {}
        # entries whose times wait for the next hold: bucket, entry, seconds, steps, the entry that was held
        self._tried: list[tuple] = []
        self._best_rate = 0.0  # tokens a second for each row, expected of the best choice for the step to come
        self.budget_s, self._most_s, self._turn, self._exploring = FIRST_BUDGET_S, BUDGET_S, 0, False
        self._best = self._choice = self._live = self._held = 0
        self._share = EXPLORE_SHARE
        self._seen: list[tuple] = []  # steps of the choice that holds, to be learned from together
        self._passed = 0  # steps since the budget was kept last

    def choose(
        self, live: int, missed_S: np.ndarray | None = None, attended: Callable[[int], float] | None = None
    ) -> int:
        """
        Args:
            missed_S: bool, rows of which not all features were kept, since `keeps` was False, the live ones first;
                None: none.
            attended: tells of so many rows how many positions a token attends to, on average over them; None: as many
                as in the calibration.
        """
        if self._held and (live == self._live or self._bucket(live) == self._bucket(self._live)):
            self._held -= 1
            self._passed += 1
            self.watches = self._exploring or (
                self._held % (2 * HOLD) < HOLD if self._choice else self._held % HOLD == HOLD - 1
            )
            return self._choice
        self.watches = True
        if self._seen:
            self._learn_from(*zip(*self._seen))
            self._seen.clear()
        self._passed, self._span = 1, attended and attended(live)
        self._live, self._held, self._share, self.keeps = live, HOLD - 1, EXPLORE_SHARE, True
        costs = self._costs(live)
        rates = self._rates(costs)
        self._best_rate = max(rates)
        self._best = best = rates.index(self._best_rate)
        # First the one that may be best by most, for all that is known; if none may, in turn the neighbours of the
        # best: one longer, one shorter, and a
        # jump over a length that does not pay alone; now and then no speculation, which is never to be lost to. What
        # comes near is held.
        bucket = self._bucket(live)
        hoped = [rate * (1 + DOUBT * deviation) for rate, deviation in zip(rates, self._deviations(bucket, best))]
        likely = max(hoped) > self._best_rate  # the best's own deviation is nothing
        at = LENGTHS.index(best)
        neighbours = [LENGTHS[i] for i in (at + 1, at - 1, at + 2) if 0 <= i < len(LENGTHS)]
        other = hoped.index(max(hoped)) if likely else neighbours[self._turn % len(neighbours)]
        if best and self._turn % NONE_TURNS == NONE_TURNS - 1:
            other = 0
        steps, loss = HOLD if rates[other] > NEAR * self._best_rate else 1, 1 - rates[other] / self._best_rate
        affordable = self.budget_s >= min(self._most_s, costs[other] * (_least_charge(best, steps) + steps * loss))
        settled = self._holds[bucket] >= SETTLED
        self._exploring = (
            affordable
            and settled
            and not self._exploring
            and (missed_S is None or 2 * np.count_nonzero(missed_S[:live]) <= live)
        )
        self._choice = other if self._exploring else best
        if self._exploring:
            self._turn += 1
            self._held = steps - 1
            self._tried.clear()  # of a try after which the best was never seen whole: a lookup may find less
        else:
            far = best == 0 and max(rates[1:]) < NEAR * self._best_rate
            if far:
                self._share = FAR_SHARE
                self.keeps = affordable or self._pays_alone()
            if far or self._holds[bucket] >= EARLY_HOLDS:
                # Features are kept only for a try, which is not to wait for long.
                most = HOLD_NONE if far and affordable else HOLD_MOST if best else 2 * HOLD_MOST
                self._held = max(HOLD if best else HOLD_NONE, min(most, int(HOLD_S / costs[best]))) - 1
                if best:  # the first and the last are observed
                    self._held = self._held // (2 * HOLD) * 2 * HOLD + HOLD - 1
        return self._choice

    def observe(
        self,
        live: int,
        draft_length: int,
        seconds: float,
        kept_B: np.ndarray,
        run_B: np.ndarray,
        found_B: np.ndarray | None = None,
        usual: bool = True,
        missed_B: np.ndarray | None = None,
        span: float | None = None,
    ) -> None:
        """Learn from a step, before the next choice; not if it does not watch.

        Args:
            draft_length: the k that `choose` gave.
            seconds: of the whole step.
            kept_B: int64, accepted proposals of each row, no more than it emitted before its end.
            run_B: int64, tokens that each row had emitted since its last rejection, while proposals were made.
            found_B: int64, how many proposals of each row are read: those before its end, or of lookups those that were
                found; None: all.
            usual: False if the step did work that is not part of every such step; its time then says nothing of others.
            missed_B: as for `choose`, of the live rows. What is tried is judged by the others.
            span: how many positions a token attended to, on average over rows; None: as many as in the calibration.
        """
        if not self.watches:
            return
        if self._exploring and missed_B is not None and missed_B.any():
            kept_B, run_B = kept_B[~missed_B], run_B[~missed_B]
        self._seen.append((draft_length, seconds, kept_B, found_B, usual, run_B, span))

    def _pays_alone(self) -> bool:
        """Whether speculation would pay once a single sequence is left. Otherwise features are kept only when something
        is to be tried: that costs about a fiftieth of a step.
        """
        rates = self._rates(self._costs(1))
        return max(rates) > rates[0]

    def _rates(self, costs: Sequence[float]) -> list[float]:
        """Expected tokens a second for each row, for k = 0..LONGEST; 0 for lengths that are not considered."""
        return [
            emitted / cost if k in LENGTHS else 0.0 for k, (emitted, cost) in enumerate(zip(self._emitted(), costs))
        ]

    def _emitted(self) -> list[float]:
        """Expected tokens of a row for k = 0..LONGEST."""
        return self._emits.tokens().tolist()

    def _costs(self, live: int) -> list[float]:
        """Expected seconds of a step for k = 0..LONGEST."""
        return (
            self._seconds(live) * self._share_read(live, ALL_K, np.append(0.0, self._read.beyond().cumsum()))
        ).tolist()

    def _share_read(self, live: int, k, read):
        """What a step takes that reads so many of each row's k proposals, on average, over what the table says; of
        several steps or lengths. All are drafted.
        """
        bucket = self._bucket(live)
        row_E, usual_E = np.array(self._table[bucket]), np.array(self._usual[bucket])
        each = max(0.0, (row_E[LONGEST] - row_E[-1]) / (usual_E[LONGEST] - usual_E[-1] or LONGEST))
        return 1 - np.minimum(0.9, each * (usual_E[k] - read) / row_E[k])

    def _share_attended(self, live: int, k, span):
        """The same of steps whose tokens attend to so many positions, on average over rows."""
        bucket = self._bucket(live)
        row_E, (each, usual) = np.array(self._table[bucket]), self._far[bucket]
        return np.maximum(0.1, 1 + each * row_E[LONGEST] * (k + 1) * (span - usual) / row_E[k])

    def _learn_from(self, draft_length, seconds, kept_NB, found_NB, usual, run_NB, span) -> None:
        """Steps of one draft length."""
        k = draft_length[0]
        if k:
            window = WINDOW if self._best else RESTING_WINDOW
            self._emits.add(np.concatenate(run_NB), np.concatenate(kept_NB), k, window)
            all_B = np.full(max(map(len, kept_NB)), k)
            found_R = np.concatenate(
                [all_B[: len(kept_B)] if found_B is None else found_B for kept_B, found_B in zip(kept_NB, found_NB)]
            )
            self._read.add(np.zeros_like(found_R), np.minimum(found_R + 1, k), found_R < k, window)
        self._spent(k, seconds)
        read_N = np.array([k if found_B is None else found_B.sum() / len(found_B) for found_B in found_NB])
        as_table_N = np.array(seconds) / self._share_read(self._live, k, read_N)
        if span[0] is not None:
            as_table_N /= self._share_attended(self._live, k, np.array(span))
        if any(usual):
            self._took(k, as_table_N[list(usual)].tolist())

    def _spent(self, k: int, seconds: Sequence[float]) -> None:
        """Keep the budget."""
        if self._exploring:
            # The tokens to be expected: those that came are mostly chance, and only losses are charged.
            worth = self._pace * self._emitted()[k] / self._best_rate
            self.budget_s -= _least_charge(self._best, len(seconds)) * seconds[0] + max(
                0.0, sum(seconds) - len(seconds) * worth
            )
        self._most_s = max(BUDGET_S, BUDGET_STEPS * seconds[0])
        share = self._share
        if share > FAR_SHARE:
            share *= 1 + EARLY_TIMES * (EARLY_HOLDS / (EARLY_HOLDS + self._holds[self._bucket(self._live)])) ** 2
        self.budget_s = min(
            max(self.budget_s, -self._most_s) + share * self._passed * sum(seconds) / len(seconds), self._most_s
        )

    def _took(self, entry: int, seconds: Sequence[float]) -> None:
        """Learn the time of a step. Most of what changes (longer sequences, a busy machine) changes all alike.

        So what is held tells of all entries, and what is tried of how it compares with what was held just before and
        just after; where the choice changes, what is held now of how it compares with what was held before, which is
        less sure. Were what is held to tell of itself, too, it would get the better of those that are measured seldom.
        """
        bucket, median = self._bucket(self._live), _median(seconds)
        if entry == self._best:
            before, self._before = self._before, (bucket, entry)
            # a change of mind compares the two
            if before[0] == bucket and before[1] != entry and self._holds[bucket] >= SETTLED:
                self._correct(bucket, entry, _median(seconds[:HOLD]), ONE_SIDED, self._level, before[1])
            level, level_steps = _median(seconds[:HOLD]) / self._table[bucket][entry], min(HOLD, len(seconds))
            unsteady = (math.log(level / self._level) / math.log(STEADY)) ** 2
            for of, tried, took, steps, beside in self._tried:
                # levels are of each bucket's own, and of what was held before it and after
                if of == bucket and beside == entry:
                    # as few as the level of their mean is known from
                    steps = 1 / (1 / steps + (1 / self._level_steps + 1 / level_steps) / 4)
                    self._correct(bucket, tried, took, steps / (1 + unsteady), (self._level * level) ** 0.5, beside)
            self._tried.clear()
            self._level, self._level_steps = _median(seconds[-HOLD:]) / self._table[bucket][entry], level_steps
            self._pace = self._level / self._drift[bucket]
            self._holds[bucket] += 1 if entry else len(seconds)  # one without speculation may last as long as several
            _move(self._drift, bucket, median / self._table[bucket][entry], 1 - 0.9 ** len(seconds))
        elif self._exploring:
            self._tried.append((bucket, entry, median, len(seconds), self._best))
        else:
            self._correct(bucket, entry, median, len(seconds), self._drift[bucket], self._best)

    def _correct(self, bucket: int, entry: int, median: float, steps: float, level: float, beside: int) -> None:
        """Learn from so many steps what an entry takes where the entry beside it takes `level` times what the table
        says: a Kalman filter (Kalman, 1960).

        What differs from the table may be the entry's error as well as that of the entry beside, over which all others
        are then wrong, too: what is held is held because it seemed fast, and more often than not it seemed too fast.
        """
        row, doubt_EE = self._table[bucket], self._doubt[bucket]
        doubt_EE[np.diag_indices(len(row))] += FORGETTING * steps
        between_E = doubt_EE[entry] - doubt_EE[beside]
        variance = between_E[entry] - between_E[beside] + CALIBRATED_STEPS / steps
        wrong = math.log(min(2.0, max(0.5, median / level / row[entry])))
        # something else may have slowed it (after Huber, 1964)
        variance *= max(1.0, abs(wrong) / (OUTLYING * variance**0.5))
        gain_E = between_E / variance
        doubt_EE -= np.outer(gain_E, between_E)
        self._table[bucket] = [s * math.exp(wrong * gain) for s, gain in zip(row, (gain_E - gain_E[beside]).tolist())]

    def _deviations(self, bucket: int, beside: int) -> list[float]:
        """Standard deviation of an entry's time over its neighbor's, in the times of a calibration."""
        doubt_EE = self._doubt[bucket]
        return np.sqrt(np.maximum(0.0, np.diag(doubt_EE) + doubt_EE[beside, beside] - 2 * doubt_EE[beside])).tolist()

    def _seconds(self, live: int) -> np.ndarray:
        bucket = self._bucket(live)
        seconds_K = np.array(self._table[bucket][: LONGEST + 1]) * self._drift[bucket]
        return seconds_K if self._span is None else seconds_K * self._share_attended(live, ALL_K, self._span)

    def _bucket(self, live: int) -> int:
        """Half powers of two: live sequences that cost about the same."""
        bucket = round(2 * math.log2(live))
        if bucket not in self._table:
            at = math.log2(live)
            self._table[bucket], self._usual[bucket], self._far[bucket] = (
                [float(np.interp(at, self._log_lives, column)) for column in measured.T]
                for measured in (self._measured, self._measured_read, self._measured_far)
            )
            self._holds[bucket], self._doubt[bucket] = 0, np.eye(len(self._table[bucket]))
            self._drift[bucket] = sum(self._drift.values()) / len(self._drift) if self._drift else 1.0
        return bucket


def _least_charge(best: int, steps: int) -> float:
    """Of a step, for a try of so many beside `best`."""
    return 0.0 if not best else LEAST_CHARGE if steps == 1 else LEAST_CHARGE_HELD


def _median(seconds: Sequence[float]) -> float:
    return max(sorted(seconds)[(len(seconds) - 1) // 2], 1e-9)  # a coarse clock may say 0


def _move(values, key, to: float, weight: float) -> None:
    """Move a positive value by a share of the way, of not more than a factor of two."""
    values[key] *= min(2.0, max(0.5, to / values[key])) ** weight
