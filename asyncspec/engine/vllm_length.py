"""Has vLLM change its draft length from step to step.

vLLM's scheduler has a table with a draft length for each batch size. What the table says when a step is scheduled is
proposed at the end of that step and verified in the next one. So after a change the next step still verifies the old
length, and nothing is learned from it. vLLM's draft makes its first pass at k = 0 too, so k = 0 costs more than no
speculation.

The lengths are chosen by speculation/draft_length.py, from the times of a calibration before the first sequence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np

from asyncspec.speculation.calibration import calibration
from asyncspec.speculation.draft_length import LONGEST, AutoLength, Observation

LIVES = (1, 4, 16, 64, 256)
TIMED_K = (0, 1, 2, 3, 5, 7, 10, LONGEST)  # every k that is considered but 4, which is interpolated
SETTLE, ROUNDS = 3, 3  # calls after a change that are not timed, and those that are


class VllmLength:
    """Chooses the draft length of each step of a vLLM engine, and learns from its steps."""

    def __init__(self, table: list[int], slots: int) -> None:
        """
        Args:
            table: the scheduler's draft lengths by batch size. It is changed in place.
            slots: the most sequences in a step.
        """
        self.table, self.slots = table, slots
        self.k = LONGEST  # what the next step proposes
        self._verified = LONGEST  # what the step after the last observed one verifies
        self.chooser: AutoLength | None = None  # None: not calibrated

    def set(self, k: int) -> None:
        """Have the next steps propose k tokens."""
        self.k = k
        self.table[:] = [k] * len(self.table)

    def calibrate(
        self, begin: Callable[[int], None], step: Callable[[], object], end: Callable[[], None], looks_up: bool
    ) -> None:
        """Time steps of several sizes and lengths. All ranks of an engine take the same steps.

        Args:
            begin: adds this many sequences that will not end soon.
            step: does one step, in which all k proposals of each sequence are verified.
            end: removes them.
            looks_up: whether proposals are looked up, which costs next to nothing, and not all of them are found.
        """
        lives, rows = sorted({n for n in LIVES if n < self.slots} | {self.slots}), []
        for live in lives:
            times = np.empty((ROUNDS, len(TIMED_K)))
            for at, k in enumerate(TIMED_K):
                begin(live)
                self.set(k)
                for _ in range(SETTLE):
                    step()
                for each in range(ROUNDS):
                    began = time.perf_counter()
                    step()
                    times[each, at] = time.perf_counter() - began
                end()
            row = calibration(TIMED_K, times)
            # The last entry: the longest draft, of which half is verified. A lookup costs nothing, so this costs as
            # much as a draft of half the length. Otherwise nothing says how much of that is saved: we take half.
            half = np.interp(LONGEST / 2, range(LONGEST + 1), row)
            rows.append([*row, half if looks_up else (row[LONGEST] + half) / 2])
        self.chooser = AutoLength(lives, np.array(rows))
        self.set(0)
        self._verified = 0

    def choose(self, live: int) -> int:
        """Return the length that the next step is to propose, and have it so."""
        self.set(self.chooser.choose(live) if live else 0)
        return self.k

    def observe(
        self,
        seconds: float,
        proposes: int,
        verified: Mapping[str, int],
        new: Mapping[str, int],
        usual: bool,
    ) -> None:
        """Learn from a step.

        Args:
            proposes: the length that was set for it.
            verified: proposals that it verified, for each sequence that had tokens before.
            new: tokens that each sequence got, up to its end.
            usual: whether the step did nothing else, such as reading a prompt.
        """
        settled, self._verified = self._verified == proposes == self.k, proposes
        if not settled or not self.chooser.watches or not verified:
            return
        names = list(verified)
        self.chooser.observe(
            Observation(
                live=len(names),
                draft_length=proposes,
                seconds=seconds,
                kept_B=np.array([max(0, new.get(name, 0) - 1) for name in names]),
                found_B=np.array([verified[name] for name in names]),
                usual=usual,
                missed_B=np.array([name not in new for name in names]),
            )
        )
