"""Choose the draft length k of each engine step, 0 included, that emits the most tokens per second.

    rate(k) = tokens(k) / seconds(k)

Tokens are learned from verifications (emitted.py). Seconds come from a calibration, which comparisons of steps correct
(step_times.py). A small budget pays for trying other lengths (explorer.py). The choice depends on past steps only, so
it cannot change the distribution of the samples. See docs/explanation/draft-length.md.

Shape suffixes: B live rows, S slots, K draft length, N steps, R rows of several steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from asyncspec.config import LONGEST_DRAFT as LONGEST
from asyncspec.speculation.calibration import Calibrated, Calibration
from asyncspec.speculation.emitted import Emitted, Survival
from asyncspec.speculation.explorer import Explorer
from asyncspec.speculation.step_times import BLOCK, StepTimes

# docs/decisions/0003-draft-length-ablation.md says what it costs to remove each constant of this module and its
# neighbors.
# The lengths to choose from. Among many similar lengths, noise would pick the best. With only five, the worst cell
# loses.
LENGTHS = (0, 1, 2, 3, 4, 5, 7, 10, LONGEST)
# A choice holds for this many seconds, or for a block of steps if that takes longer. Choosing after every block costs
# 1 %.
HOLD_S = 0.3

Attended = Callable[[int], float] | None  # rows -> positions that a token attends to, on average over the first rows


class Observation(NamedTuple):
    """A finished step, reported by the engine before the next choice."""

    live: int
    draft_length: int  # the value that `choose` returned
    seconds: float  # duration of the whole step
    kept_B: np.ndarray  # int64, accepted proposals of each row that were emitted before its end
    # int64, how many proposals of each row were verified: those before its end, or those a lookup found; None: all
    found_B: np.ndarray | None = None
    usual: bool = True  # False: the step did extra work (such as catching up), so its time says nothing
    # bool, rows that lack features of some positions; their acceptance says little; None: no such rows
    missed_B: np.ndarray | None = None
    span: float | None = None  # positions a token attended to, on average over rows; None: as in the calibration


class Chooser(ABC):
    """Chooses the draft length of each step."""

    longest: int
    keeps = True  # whether the engine should keep features for the draft even while nothing is proposed
    watches = False  # whether the engine should report the step of the last choice to `observe`
    learn: Callable[[np.ndarray, np.ndarray], None] | None = None  # see `LookupLength.learn`

    @abstractmethod
    def choose(self, live: int, missed_S: np.ndarray | None = None, attended: Attended = None) -> int:
        """Return the draft length k of the next step.

        Args:
            live: number of live sequences.
            missed_S: bool, live rows first: whether a row lacks features because `keeps` was False. None: no row does.
            attended: function from a number of rows to the positions a token attends to, on average over those rows.
                None: as many as in the calibration.
        """

    def observe(self, step: Observation) -> None:
        """Learn from the last step. The engine calls this before the next choice, if `watches` is True."""


class FixedLength(Chooser):
    """Chooses the same k for every step."""

    def __init__(self, draft_length: int) -> None:
        self.longest = draft_length

    def choose(self, live: int, missed_S: np.ndarray | None = None, attended: Attended = None) -> int:
        return self.longest


class AutoLength(Chooser):
    """Chooses the k with the highest expected rate, for drafters that always have proposals."""

    longest = LONGEST

    def __init__(
        self,
        lives: Sequence[int],
        seconds: np.ndarray,
        read: np.ndarray | None = None,
        farther: np.ndarray | None = None,
    ) -> None:
        """See `Calibration`."""
        self.calibration = Calibration(lives, seconds, read, farther)
        self.keeps = self.watches = True
        # _read: the share of rows whose proposal j is verified; proposals beyond a row's end are not
        self._emits, self._read = Emitted(), Survival(LONGEST)
        self._times, self._explorer = StepTimes(), Explorer()
        self._calibrated: dict[int, Calibrated] = {}  # by bucket
        self._holds: dict[int, int] = {}  # by bucket, how many holds there have been
        self._span: float | None = None  # positions that a token attends to now; None: as in the calibration
        self._bucket = self._best = self._choice = 0
        self._steps = self._passed = 0  # how many steps the current choice holds for, and how many have passed
        self._seen: list[Observation] = []  # observed steps of the current choice; they are learned from together

    def choose(self, live: int, missed_S: np.ndarray | None = None, attended: Attended = None) -> int:
        if self._passed == self._steps or self._times.bucket(live) != self._bucket:
            self._choose(live, missed_S, attended)
        self._passed += 1
        self.watches = self._passed <= BLOCK or self._passed > self._steps - BLOCK
        return self._choice

    def observe(self, step: Observation) -> None:
        if self.watches:
            self._seen.append(step)

    def _choose(self, live: int, missed_S: np.ndarray | None, attended: Attended) -> None:
        tried = self._choice != self._best
        if self._seen:
            self._learn_from(self._seen)
            seconds = self._passed * float(np.mean([step.seconds for step in self._seen]))
            self._explorer.paid(seconds, self._holds.get(self._bucket, 0))
            self._seen.clear()
        self._bucket, self._span, self._passed = self._times.bucket(live), attended and attended(live), 0
        cost_K = self._costs(live)
        rate_K = self._rates(cost_K)
        self._best = self._choice = best = int(rate_K.argmax())
        may_try = self._explorer.owed_s == 0
        self.keeps = bool(best) or may_try or self._pays_alone()
        whole = missed_S is None or 2 * np.count_nonzero(missed_S[:live]) <= live
        holds = self._holds.get(self._bucket, 0)
        if may_try and whole and holds and not tried:
            self._choice = self._explorer.other(LENGTHS, best)
            self._steps = BLOCK
            self._explorer.charge(BLOCK * cost_K[self._choice], 1 - rate_K[self._choice] / rate_K[best])
        else:
            self._holds[self._bucket] = holds + 1
            self._steps = max(BLOCK, min(BLOCK * (holds + 1), int(HOLD_S / cost_K[best])))

    def _learn_from(self, steps: Sequence[Observation]) -> None:
        """Learn from steps that all had one draft length."""
        self._learn_tokens(steps)
        usual = [step for step in steps if step.usual]
        if usual:
            k = usual[0].draft_length
            expected_N = self._calibrated_seconds(usual)
            self._times.observe(self._bucket, k, (np.array([step.seconds for step in usual]) / expected_N).tolist())

    def _learn_tokens(self, steps: Sequence[Observation]) -> None:
        k = steps[0].draft_length
        if not k:
            return
        whole = [step.kept_B if step.missed_B is None else step.kept_B[~step.missed_B] for step in steps]
        read = [np.full(step.live, k) if step.found_B is None else step.found_B for step in steps]
        self._emits.add(np.concatenate(whole), k)
        self._read.add(np.concatenate(read), k)

    def _calibrated_seconds(self, steps: Sequence[Observation]) -> np.ndarray:
        """Return the seconds that the calibration predicts for these steps, float [N]."""
        k = steps[0].draft_length
        read_N = np.array([k if step.found_B is None else step.found_B.mean() for step in steps])
        return self._at(steps[0].live).seconds(k, read_N, spans(steps))

    def _pays_alone(self) -> bool:
        """Whether speculation would pay with a single live sequence.

        If not, features are kept only when a try is due: keeping them costs about 2 % of a step.
        """
        return bool(self._rates(self._costs(1)).argmax())

    def _rates(self, cost_K: np.ndarray) -> np.ndarray:
        """Return the expected tokens per second of a row, float [LONGEST + 1]; 0 for lengths not in LENGTHS."""
        rate_K = np.zeros(LONGEST + 1)
        rate_K[list(LENGTHS)] = (self._tokens() / cost_K)[list(LENGTHS)]
        return rate_K

    def _tokens(self) -> np.ndarray:
        """Return the expected tokens of a row in a step, float [LONGEST + 1]."""
        return self._emits.tokens()

    def _costs(self, live: int) -> np.ndarray:
        """Return the expected seconds of a step, float [LONGEST + 1]."""
        read_K = np.append(0.0, self._read.beyond().cumsum())
        return self._at(live).seconds(np.arange(LONGEST + 1), read_K, self._span) * self._times.corrections(
            self._times.bucket(live)
        )

    def _at(self, live: int) -> Calibrated:
        bucket = self._times.bucket(live)
        if bucket not in self._calibrated:
            self._calibrated[bucket] = self.calibration.at(live)
        return self._calibrated[bucket]


def spans(steps: Sequence[Observation]) -> np.ndarray | None:
    """Return how many positions a token attended to in each step, float [N]; None: as in the calibration."""
    return None if steps[0].span is None else np.array([step.span for step in steps])
