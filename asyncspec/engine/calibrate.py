"""Measures how long an engine's steps take, on rows without sequences, before there are any sequences.

The chooser of draft lengths is made from these times, see speculation/draft_length.py. Real steps correct them.

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
TIMED_K = (0, 1, 2, 3, 5, 7, 10, LONGEST)  # every k that is considered but 4, which is interpolated
# Assumed mean length of a response, before any is known: the limit / LIMIT_OVER_USUAL, but at most USUAL_TOKENS.
USUAL_TOKENS, LIMIT_OVER_USUAL = 64, 16
# To measure what attended positions cost, rows are made longer by the limit / LIMIT_OVER_FARTHER, but by at least
# FARTHER and at most FARTHEST positions.
FARTHER, LIMIT_OVER_FARTHER, FARTHEST = 96, 4, 256
CALIBRATION_S = 4.0  # for the whole calibration, at most
# For each number of live rows, whichever takes longer: a disturbance may last for many short steps.
ROUNDS, LEAST_S = 6, 0.4


class Calibrator:
    def __init__(self, engine: TorchEngine) -> None:
        """
        Args:
            engine: an engine with a drafter and without sequences.
        """
        self.engine, self.tokens, self.rows = engine, engine.tokens, engine.rows
        self._packs, self._looks_up = engine.backend.packs, engine.drafter.looks_up
        self._farther = min(max(FARTHER, engine.max_response_tokens // LIMIT_OVER_FARTHER), FARTHEST)

    def chooser(self) -> AutoLength | LookupLength:
        """Time steps of several sizes and return the chooser made from these times.

        Each number of live rows gets at most its share of what is left of CALIBRATION_S. A slow engine is measured
        with fewer rounds. When no time is left, the times of more live rows are extrapolated in proportion to their
        number.
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
                for step in steps * TIMES:  # capture graphs before measuring
                    self.time_step(live, *step)
                ends += time.perf_counter() - began
            rounds = self._rounds(live, steps, (ends - time.perf_counter()) / (len(lives) - i), least=not table)
            self._log(live, rounds)
            table.append(
                calibration(TIMED_K, np.array(rounds)) if rounds else table[-1] * (live / lives[len(table) - 1])
            )
        times = np.array(table)
        seconds, far = times[:, : LONGEST + 2], np.column_stack([times[:, -1], attended]) if self._packs else None
        if self._looks_up:
            return LookupLength(lives, seconds, self._packs, far)
        return AutoLength(lives, seconds, np.array(verified), far)

    def _log(self, live: int, rounds: list[list[float]]) -> None:
        """Note the timed steps in the engine's log, as rounds in which no token was gained."""
        self.lay_out(live, 0)
        positions = float(self.tokens.length[:live].sum())
        for times in rounds:
            for k, seconds in zip(TIMED_K, times):
                self.engine.log.add(live, k, seconds, 0.0, positions)

    def _rounds(self, live: int, steps: list[tuple], seconds: float, least: bool) -> list[list[float]]:
        """Measure the steps round by round; return the seconds of each step, one list per round.

        Args:
            seconds: for how long to measure, at most.
            least: measure one round even if there is no time for it.
        """
        rounds: list[list[float]] = []
        began = time.perf_counter()
        while ((passed := time.perf_counter() - began) < seconds and (len(rounds) < ROUNDS or passed < LEAST_S)) or (
            least and not rounds
        ):
            way = slice(None, None, 1 if len(rounds) % 2 else -1)  # every other round runs backwards
            rounds.append([self.time_step(live, *step) for step in steps[way]][way])
        return rounds

    def usual_lengths(self, count: int) -> np.ndarray:
        """Return the assumed lengths of `count` responses, descending: exponential, with a mean far below the limit."""
        mean = min(USUAL_TOKENS, self.engine.max_response_tokens / LIMIT_OVER_USUAL)
        return -mean * np.log((np.arange(count) + 0.5) / count)

    def usually_verified(self, live: int, draft_length: int) -> np.ndarray:
        """Return how many proposals of each row are usually verified, int64 [live].

        That is all of them, unless the back end packs: then only those before a row's end. The first rows have fewest.
        """
        if self._looks_up or not self._packs:
            return np.full(live, draft_length)
        verified_BN = np.minimum(draft_length, self.usual_lengths(16 * live)[::-1]).reshape(live, 16)
        return verified_BN.mean(1).round().astype(int)

    def lay_out(self, live: int, farther: int, before: int = 0) -> float:
        """Give rows without sequences their usual lengths, plus `farther`, minus `before`, and group them.

        Returns:
            Positions that a token attends to, as `Slots.attended`.
        """
        # the longest first, so that grouping exchanges no rows
        length_B = self.engine.max_prompt_tokens // 8 + 2 + torch.from_numpy(self.usual_lengths(live)).long()
        self.tokens.length_S[:live] = (length_B + farther - before).clamp(2, self.tokens.positions - LONGEST - 1)
        self.tokens.refresh(live)
        self.engine.arrange(live, 1)
        return self.tokens.attended(live)

    @torch.inference_mode()
    def time_step(self, live: int, draft_length: int, verified_B: np.ndarray, farther: int = 0) -> float:
        """Return the seconds of a step that accepts every proposal it verifies.

        Args:
            verified_B: int64, how many proposals of each row are verified.
            farther: as for `lay_out`.
        """
        engine = self.engine
        engine.drafter.enter(0, live)
        self.rows.limit_S[:live] = self.tokens.positions
        self.rows.uniform_SPR[:live] = 0.0  # accepts every proposal
        # In the first step the draft processes whole rows; in the second, which is timed, only as many tokens as a
        # step usually emits.
        for before in (1 + draft_length * 2 // 3, 0):
            self.lay_out(live, farther, before)
            began = engine.backend.clock()
            engine.arrange(live, draft_length + 1)
            engine.advance(live, draft_length, verified_B)
            seconds = engine.backend.clock() - began
        return seconds
