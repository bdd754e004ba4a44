"""What an engine's steps cost, measured on rows without sequences, before there are any.

From it the chooser of draft lengths is made, see speculation/draft_length.py; every real step corrects it.

Shape suffixes: B live rows, K draft length, N responses.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from asyncspec.engine.graphs import TIMES
from asyncspec.speculation.calibration import calibration
from asyncspec.speculation.draft_length import LONGEST, AutoLength
from asyncspec.speculation.lookup_length import LookupLength

if TYPE_CHECKING:
    from asyncspec.engine.torch_engine import TorchEngine

LIVES = (1, 4, 16, 64, 256)
TIMED_K = (0, 1, 2, 3, 5, 7, 10, LONGEST)  # all that are considered but 4, which lies between its neighbors
# a response's mean length, for all that is known before there are any: the first at most
USUAL_TOKENS, LIMIT_OVER_USUAL = 64, 16
# Positions by which rows are moved to learn what these cost: a share of the limit, but no fewer than the first and no
# more than the last.
FARTHER, LIMIT_OVER_FARTHER, FARTHEST = 96, 4, 256
CALIBRATION_S = 4.0  # at most
# of each number of live rows, whichever takes longer: what disturbs lasts for many short steps
ROUNDS, LEAST_S = 6, 0.4


class Calibrator:
    def __init__(self, engine: TorchEngine) -> None:
        """
        Args:
            engine: with a drafter, and without sequences.
        """
        self.engine, self.tokens, self.rows = engine, engine.tokens, engine.rows
        self._packs, self._looks_up = engine.backend.packs, engine.drafter.looks_up
        self._farther = min(max(FARTHER, engine.max_response_tokens // LIMIT_OVER_FARTHER), FARTHEST)

    def chooser(self) -> AutoLength | LookupLength:
        """Time steps of several sizes.

        Each number of live rows gets at most a share of what is left of CALIBRATION_S. Slow engines are measured less,
        and where nothing is left, extrapolated.
        """
        slots, ends = self.engine.slots, time.perf_counter() + CALIBRATION_S
        lives = sorted({n for n in LIVES if n < slots} | {slots})
        table, verified, attended = [], [], []
        last = 0 if self._looks_up else LONGEST if self._packs else LONGEST // 2
        for i, live in enumerate(lives):
            usually = [self.usually_verified(live, k) for k in TIMED_K]
            steps = [*zip(TIMED_K, usually), (LONGEST, np.full(live, last))]
            means = [verified_B.mean() for verified_B in usually]
            verified.append([*np.interp(range(LONGEST + 1), TIMED_K, means), last])
            if self._packs:
                steps.append((LONGEST, usually[-1], self._farther))
                attended.append([self.lay_out(live, farther) for farther in (self._farther, 0)])
            if self.engine.decode.graphs is not None:
                began = time.perf_counter()
                for step in steps * TIMES:  # they are captured before they are measured
                    self.time_step(live, *step)
                ends += time.perf_counter() - began
            rounds = self._rounds(live, steps, (ends - time.perf_counter()) / (len(lives) - i), least=not table)
            table.append(
                calibration(TIMED_K, np.array(rounds)) if rounds else table[-1] * (live / lives[len(table) - 1])
            )
        times = np.array(table)
        seconds, far = times[:, : LONGEST + 2], np.column_stack([times[:, -1], attended]) if self._packs else None
        if self._looks_up:
            return LookupLength(lives, seconds, self._packs, far)
        return AutoLength(lives, seconds, np.array(verified), far)

    def _rounds(self, live: int, steps: list[tuple], seconds: float, least: bool) -> list[list[float]]:
        """Seconds of each of these steps, round by round, for so long.

        Args:
            least: whether there is to be one round at least.
        """
        rounds: list[list[float]] = []
        began = time.perf_counter()
        while ((passed := time.perf_counter() - began) < seconds and (len(rounds) < ROUNDS or passed < LEAST_S)) or (
            least and not rounds
        ):
            way = slice(None, None, 1 if len(rounds) % 2 else -1)  # there and back
            rounds.append([self.time_step(live, *step) for step in steps[way]][way])
        return rounds

    def usual_lengths(self, count: int) -> np.ndarray:
        """Of so many responses, descending: exponentially distributed, their mean far below the limit."""
        mean = min(USUAL_TOKENS, self.engine.max_response_tokens / LIMIT_OVER_USUAL)
        return -mean * np.log((np.arange(count) + 0.5) / count)

    def usually_verified(self, live: int, draft_length: int) -> np.ndarray:
        """How many of so many proposals are verified, int64 [live]: where only some may be, those before the ends of
        rows, the fewest of the first.
        """
        if self._looks_up or not self._packs:
            return np.full(live, draft_length)
        verified_BN = np.minimum(draft_length, self.usual_lengths(16 * live)[::-1]).reshape(live, 16)
        return verified_BN.mean(1).round().astype(int)

    def lay_out(self, live: int, farther: int, before: int = 0) -> float:
        """Put rows without sequences so many positions farther on than usual, less those before; returns what
        `Slots.attended` does once they are parted.
        """
        # the longest first: they need no exchange
        length_B = self.engine.max_prompt_tokens // 8 + 2 + torch.from_numpy(self.usual_lengths(live)).long()
        self.tokens.length_S[:live] = (length_B + farther - before).clamp(2, self.tokens.positions - LONGEST - 1)
        self.tokens.refresh(live)
        self.engine.arrange(live, 1)
        return self.tokens.attended(live)

    @torch.inference_mode()
    def time_step(self, live: int, draft_length: int, verified_B: np.ndarray, farther: int = 0) -> float:
        """Seconds of a step in which every proposal that is verified is accepted.

        Args:
            verified_B: how many of each row.
            farther: as for `lay_out`.
        """
        engine = self.engine
        engine.drafter.enter(0, live)
        self.rows.limit_S[:live] = self.tokens.positions
        self.rows.uniform_SPR[:live] = 0.0  # which accepts every proposal
        # the draft reads in the first step all, in the second what is usually emitted
        for before in (1 + draft_length * 2 // 3, 0):
            self.lay_out(live, farther, before)
            began = engine.backend.clock()
            engine.arrange(live, draft_length + 1)
            engine.advance(live, draft_length, verified_B)
            seconds = engine.backend.clock() - began
        return seconds
