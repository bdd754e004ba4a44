"""How far to speculate: for each engine step the draft length k, 0 included, that emits the most tokens a second.

    rate(k) = tokens(k) / seconds(k)

Tokens are learned from verifications (emitted.py), seconds from a calibration that every comparison of steps corrects
(step_times.py), and other lengths are tried from a small budget (explorer.py). Only what is past is looked at, so the
choice cannot bend the distribution. See docs/explanation/draft-length.md.

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

# What removing a constant costs, here and beside it: docs/decisions/0003-draft-length-ablation.md
# Lengths that are considered: of many alike the luckiest would seem the best. With five of them the worst cell loses.
LENGTHS = (0, 1, 2, 3, 4, 5, 7, 10, LONGEST)
# A choice holds for so long, or for a block of steps if that is longer. Choosing after each block costs a hundredth.
HOLD_S = 0.3

Attended = Callable[[int], float] | None  # positions that a token attends to, on average over so many rows


class Observation(NamedTuple):
    """A step, as an engine tells of it before the next choice."""

    live: int
    draft_length: int  # that `choose` gave
    seconds: float  # of the whole step
    kept_B: np.ndarray  # int64, accepted proposals of each row, no more than it emitted before its end
    # int64, how many proposals of each row were read: those before its end, or those a lookup found; None: all
    found_B: np.ndarray | None = None
    usual: bool = True  # False: the step did work that is not part of every such step, so its time tells nothing
    missed_B: np.ndarray | None = None  # bool, rows without all features, whose proposals tell little; None: none
    span: float | None = None  # positions a token attended to, on average over rows; None: as in the calibration


class Chooser(ABC):
    """Chooses the draft length of each step."""

    longest: int
    keeps = True  # whether features for the draft are to be kept though nothing is proposed
    watches = False  # whether the step that was chosen for last is to be observed
    learn: Callable[[np.ndarray, np.ndarray], None] | None = None  # see `LookupLength.learn`

    @abstractmethod
    def choose(self, live: int, missed_S: np.ndarray | None = None, attended: Attended = None) -> int:
        """The k of the next step.

        Args:
            missed_S: bool, rows of which not all features were kept, since `keeps` was False, the live ones first;
                None: none.
            attended: gives for a number of rows how many positions a token attends to, on average over them; None: as
                many as in the calibration.
        """

    def observe(self, step: Observation) -> None:
        """Learn from a step, before the next choice."""


class FixedLength(Chooser):
    """Always the same k."""

    def __init__(self, draft_length: int) -> None:
        self.longest = draft_length

    def choose(self, live: int, missed_S: np.ndarray | None = None, attended: Attended = None) -> int:
        return self.longest


class AutoLength(Chooser):
    """The k of the highest expected rate, for drafters that always have proposals."""

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
        # the second: proposals of which none is read any more, as the row would end
        self._emits, self._read = Emitted(), Survival(LONGEST)
        self._times, self._explorer = StepTimes(), Explorer()
        self._calibrated: dict[int, Calibrated] = {}  # by bucket
        self._holds: dict[int, int] = {}  # by bucket, how many choices have held
        self._span: float | None = None  # positions that a token attends to now; None: as in the calibration
        self._bucket = self._best = self._choice = 0
        self._steps = self._passed = 0  # that the choice holds for, and those of them that passed
        self._seen: list[Observation] = []  # steps of the choice that holds, to be learned from together

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
        """Learn from steps of one draft length."""
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
        """Seconds of these steps as the calibration has it, float [N]."""
        k = steps[0].draft_length
        read_N = np.array([k if step.found_B is None else step.found_B.mean() for step in steps])
        return self._at(steps[0].live).seconds(k, read_N, spans(steps))

    def _pays_alone(self) -> bool:
        """Whether speculation would pay once a single sequence is left. Otherwise features, which cost about a fiftieth
        of a step, are kept only when something is to be tried.
        """
        return bool(self._rates(self._costs(1)).argmax())

    def _rates(self, cost_K: np.ndarray) -> np.ndarray:
        """Expected tokens a second of each row; 0 for lengths that are not considered. float [LONGEST + 1]."""
        rate_K = np.zeros(LONGEST + 1)
        rate_K[list(LENGTHS)] = (self._tokens() / cost_K)[list(LENGTHS)]
        return rate_K

    def _tokens(self) -> np.ndarray:
        """Expected tokens of a row in a step, float [LONGEST + 1]."""
        return self._emits.tokens()

    def _costs(self, live: int) -> np.ndarray:
        """Expected seconds of a step, float [LONGEST + 1]."""
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
    """How many positions a token attended to in each step, float [N]; None: as in the calibration."""
    return None if steps[0].span is None else np.array([step.span for step in steps])
