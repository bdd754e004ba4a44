#!/usr/bin/env python3
"""Measure what each part of the automatic draft length is worth, by replaying recorded engine steps without it.

First the script records the duration and the kept proposals of engine steps, for every drafter and several numbers of
live sequences, with each draft length in turn. Then it replays a chooser on a virtual clock. The clock's noise is the
recorded noise in the recorded order. A cell's score is tokens per second over those of the best fixed length, k = 0
included. The chooser's own time counts. Half of the replays begin with a calibration that is wrong by an eighth.

    scripts/replay_draft_length.py                  all parts
    scripts/replay_draft_length.py --only explorer  parts whose names contain this word

Shape suffixes: B live rows, N recorded steps.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from asyncspec.bench.loads import METHODS, Loads
from asyncspec.console import terminal
from asyncspec.speculation import calibration, draft_length, emitted, explorer, lookup_length, step_times
from asyncspec.speculation.draft_length import LENGTHS, LONGEST, AutoLength, FixedLength, Observation
from asyncspec.speculation.lookup_length import LookupLength

LIVE = (1, 2, 4, 16, 64)
TURN, SETTLING = 16, 3  # recorded steps of a length before the next one's turn; the first of them, which are left out
RECORDED_S, ROUNDS = 4.0, 3  # record each cell for at least this many seconds and rounds
STEPS, WARM, SEEDS, READY = 1000, 400, 3, 300  # steps replayed; not scored; repetitions; steps prepared per length
WRONG = 0.12  # standard deviation of the logarithm of a wrong calibration's factors
FEATURES = 0.02  # keeping features takes this share of a step without speculation

# Name of a part: its modules and attributes, and the values that switch it off.
PARTS = {
    "as it is": (),
    "step_times.FORGETTING": ((step_times, "FORGETTING", 0.0),),
    "step_times: no corrections": ((step_times.StepTimes, "_compare", lambda *_: None),),
    "calibration.plausible": ((calibration, "plausible", lambda seconds: seconds),),
    "emitted.WINDOW = 1024": ((emitted, "WINDOW", 1024),),
    "emitted.PRIOR_ROWS": ((emitted, "PRIOR_ROWS", 1.0), (lookup_length, "PRIOR_ROWS", 1.0)),
    "emitted.LENT_ROWS": ((emitted, "LENT_ROWS", 1e12),),
    "explorer.SHARE, nothing tried": ((explorer, "SHARE", 0.0),),
    "explorer.SHARE, twice": ((explorer, "SHARE", 0.008),),
    "explorer.EARLY_HOLDS": ((explorer, "EARLY_HOLDS", 1),),
    "explorer.NONE_TURNS": ((explorer, "NONE_TURNS", 10**9),),
    "draft_length.HOLD_S": ((draft_length, "HOLD_S", 0.0),),
    "draft_length.LENGTHS, five": ((draft_length, "LENGTHS", (0, 1, 3, 7, LONGEST)),),
}


class Turns(FixedLength):
    """Chooses each length in turn, in a new random order each round, and records the steps."""

    watches = True

    def __init__(self, seed: int) -> None:
        super().__init__(LONGEST)
        self.rng, self.order, self.left, self.rounds = np.random.default_rng(seed), [], 0, 0
        self.steps: list[Observation] = []
        self.learned: list[tuple] = []  # arguments of `learn`, for responses that a lookup looked back at
        self.seconds = 0.0

    def choose(self, live, missed_S=None, attended=None):
        if not self.left:
            if not self.order:
                self.order, self.rounds = self.rng.permutation(LENGTHS).tolist(), self.rounds + 1
            self.now, self.left = self.order.pop(), TURN
        self.left -= 1
        return self.now

    def learn(self, count_R, kept_R):
        self.learned.append((count_R, kept_R))

    def observe(self, step):
        self.seconds += step.seconds
        if self.left < TURN - SETTLING:
            self.steps.append(step._replace(missed_B=None))


def record(loads: Loads, method: str, live: int) -> dict:
    engine = loads.engine(method, live, "auto")
    auto, turns, done, prompts = engine.chooser, Turns(live), [], 0
    learned = turns.learned
    engine.use(turns)
    while turns.seconds < RECORDED_S or turns.rounds <= ROUNDS:
        while engine.waiting < 2 * live:
            loads.submit(engine, prompts, loads.config.rl.group_size, 1)
            prompts += 1
        done += engine.poll()
    lives, seconds, read, farther = auto.calibration
    made = (lives, seconds, auto.packs, farther) if engine.drafter.looks_up else auto.calibration
    tokens = float(np.mean([len(c.tokens) for c in done]))
    return {
        "method": method,
        "live": live,
        "made": tuple(made),
        "steps": turns.steps,
        "learned": learned,
        "features": bool(engine.aux_layers),
        "tokens": tokens,
    }


class Cell:
    """The recording of a drafter with a number of live sequences."""

    def __init__(self, recorded: dict, alike: list[dict]) -> None:
        """
        Args:
            recorded: the cell's recording.
            alike: recordings of this drafter with any number of live sequences. The acceptance of their rows is pooled.
        """
        self.method, self.live, self.made = recorded["method"], recorded["live"], recorded["made"]
        self.features, self.rollout_tokens = recorded["features"], recorded["tokens"]
        self.lookup, self.learned = bool(recorded["learned"]), max(alike, key=lambda r: r["live"])["learned"]
        steps = recorded["steps"]
        self.span = steps[0].span
        self._fit([self._cost_terms(s.draft_length, s.found_B) for s in steps], np.array([s.seconds for s in steps]))
        rng, self.ready, seconds, tokens = np.random.default_rng(0), {}, [], []
        for k in LENGTHS:
            pool = [s for r in alike for s in r["steps"] if s.draft_length == k]
            kept_R = np.concatenate([s.kept_B for s in pool]).astype(np.int64)
            found = [np.full(s.live, k) if s.found_B is None else s.found_B for s in pool]
            rows, found_R = rng.integers(0, len(kept_R), (READY, self.live)), np.concatenate(found)
            self.ready[k] = [(kept_R[at], found_R[at], self._seconds(k, found_R[at])) for at in rows]
            seconds.append(np.mean([step[2] for step in self.ready[k]]))
            tokens.append(1 + kept_R.mean())
        # Fit one cubic to all lengths but 0. Otherwise the luckiest recording would be the best length.
        of_k = np.log1p(LENGTHS[1:])
        smooth = np.append(1.0, np.maximum(np.polyval(np.polyfit(of_k, tokens[1:], 3), of_k), 1.0))
        self.seconds = dict(zip(LENGTHS, seconds))
        self.tokens = dict(zip(LENGTHS, self.live * smooth))
        none = self.tokens[0] / self.seconds[0] / (1 - FEATURES * self.features)
        self.best_rate = max(none, *(self.tokens[k] / self.seconds[k] for k in LENGTHS))

    def _cost_terms(self, k: int, found_B: np.ndarray | None) -> list[float]:
        """Return the terms that a step's time is linear in."""
        if self.lookup:
            found_B = np.zeros(1) if found_B is None or not k else found_B
            return [k == 0, k > 0, found_B.max() > 0, found_B.mean(), found_B.max()]
        return [k == 0, k > 0, k, k * k, 0.0 if found_B is None else found_B.mean() - k]

    def _fit(self, terms, seconds_N: np.ndarray) -> None:
        """Fit a step's time by least squares of relative errors, without outliers.

        The ratios of recorded to fitted times become the noise, in their order.
        """
        terms_NC, keep_N = np.array(terms, dtype=float), np.ones(len(seconds_N), dtype=bool)
        for _ in range(8):
            scaled_NC = terms_NC / seconds_N[:, None]
            self.cost_C = np.linalg.lstsq(scaled_NC[keep_N], np.ones(keep_N.sum()), rcond=None)[0]
            self.least = 0.5 * seconds_N.min()
            noise_N = seconds_N / np.maximum(terms_NC @ self.cost_C, self.least)
            off_N = abs(np.log(noise_N / np.median(noise_N)))
            keep_N = off_N < np.quantile(off_N, 0.93)
        self.noise = (noise_N / np.exp(np.log(noise_N).mean())).tolist()

    def _seconds(self, k: int, found_B: np.ndarray) -> float:
        return max(float(np.dot(self._cost_terms(k, found_B), self.cost_C)), self.least)

    def score(self, seed: int, wrong: float) -> float:
        """Return tokens per second over those of the best length.

        Args:
            wrong: standard deviation of the logarithm of the factors by which the calibration is wrong.
        """
        rng = np.random.default_rng(seed)
        lives, seconds, *rest = self.made
        seconds = seconds * rng.lognormal(0, wrong, (1, seconds.shape[1]))
        chooser = (LookupLength if self.lookup else AutoLength)(lives, seconds, *rest)
        missed_B, since, emitted_, told = np.zeros(self.live, dtype=bool), 0, 0, 0
        at, tokens, spent = int(rng.integers(len(self.noise))), 0.0, 0.0
        for number in range(STEPS):
            began = time.thread_time()
            k = chooser.choose(self.live, missed_B, None if self.span is None else lambda _: self.span)
            kept_B, found_B, took = self.ready[k][rng.integers(READY)]
            usual = self.lookup or not k or since <= LONGEST + 1  # else the draft first processes what it has missed
            since, keeps = 0 if k else since + 1, k > 0 or chooser.keeps
            missed_B |= self.features and not keeps
            if chooser.watches:
                step = Observation(
                    live=self.live,
                    draft_length=k,
                    seconds=took * self.noise[(at + number) % len(self.noise)],
                    kept_B=kept_B,
                    found_B=found_B if k else None,
                    usual=usual,
                    missed_B=missed_B.copy(),
                    span=self.span,
                )
                chooser.observe(step)
            emitted_ += self.live + int(kept_B.sum())
            if self.learned and emitted_ > 32 * self.rollout_tokens * told:  # one rollout in 32: see drafters/lookup.py
                chooser.learn(*(each.astype(np.int64) for each in self.learned[told % len(self.learned)]))
                told += 1
            own = time.thread_time() - began
            ended_B = rng.random(self.live) < (1 + kept_B) / self.rollout_tokens
            missed_B[ended_B] = self.features and not keeps
            if number >= WARM:
                tokens += self.tokens[k]
                spent += own + self.seconds[k] * (1 if keeps or not self.features else 1 - FEATURES)
        return tokens / spent / self.best_rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="replay parts whose names contain this word")
    args = parser.parse_args()
    loads = Loads([])
    recordings = [record(loads, method, live) for method in METHODS for live in LIVE]
    cells = [Cell(r, [other for other in recordings if other["method"] == r["method"]]) for r in recordings]
    table = Table(title=f"{len(cells)} cells, tokens/s over those of the best fixed length", title_justify="left")
    for column in ("switched off", "worst", "cell", "median", "mean", "wrong calibration: worst", "median", "mean"):
        table.add_column(column)
    for name, changes in PARTS.items():
        if args.only not in name:
            continue
        patches = [patch.object(*change) for change in changes]
        for each in patches:
            each.start()
        row = [name]
        for wrong in (0.0, WRONG):
            scores = [np.mean([cell.score(seed, wrong) for seed in range(SEEDS)]) for cell in cells]
            worst = cells[int(np.argmin(scores))]
            row += [f"{min(scores):.3f}", *([] if wrong else [f"{worst.method} {worst.live}"])]
            row += [f"{np.median(scores):.3f}", f"{np.mean(scores):.4f}"]
        for each in patches:
            each.stop()
        table.add_row(*row)
        print(*row, file=sys.stderr, flush=True)
    terminal().print(table)


if __name__ == "__main__":
    main()
