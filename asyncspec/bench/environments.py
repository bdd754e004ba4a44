"""bench environments: tools that take their time do not idle the engine.

Episodes of three sums are played with the default job's policy and draft: the engine samples, the environment's tool
sleeps and gives the next sum. A variant is compared with the same episodes forced: what the tool would have said is
appended at once, in the generator's own process. Only tokens that the policy sampled count. The forced episodes are
measured before and after, so that a machine that changes its speed slows both alike.

With tools that sleep the generator has more episodes open than slots: as many as the tools hold back. `in_flight` says
how many. In `hang` the tools return at once, but one episode in fifty waits for a tool that never returns.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from asyncspec.actors.engine_holder import request_of
from asyncspec.actors.episodes import Episodes
from asyncspec.bench.harness import Benchmark, Samples, spread
from asyncspec.bench.loads import Loads
from asyncspec.bench.sleeping_tools import HANGS, TURNS
from asyncspec.clock import now
from asyncspec.environments.pool import Answer, Environments
from asyncspec.environments.rendering import Renderer
from asyncspec.models import tokenizer
from asyncspec.speculation.draft_length import FixedLength
from asyncspec.tasks.sums import sums
from asyncspec.timing.spans import Recorder
from asyncspec.wire import messages as m

SLOTS, LENGTH = 16, 3
SLEEPS = {"0s": 0.0, "0_1s": 0.1, "2s": 2.0, "hang": 0.0}
IN_FLIGHT = {"0s": 64, "0_1s": 96, "2s": 768, "hang": 64}
FACTORIES = {"0s": "at_once", "0_1s": "after_0_1s", "2s": "after_2s", "hang": "at_once"}
WINDOW_S, WARM_S, HANG_S = 12.0, 2.0, 3.0


class EnvironmentsBenchmark(Benchmark):
    name = "environments"
    repeats = 5
    variants = tuple(SLEEPS)
    columns = ("over_forced", "tokens_per_s", "forced_tokens_per_s", "in_flight", "idle", "failed")

    def __init__(self, overrides: Sequence[str], out: Path) -> None:
        self.loads = Loads(overrides)

    def measure(self, variant: str, repetition: int) -> dict[str, float]:
        forced = [self._played("forced", repetition, WINDOW_S / 2)]
        found = self._played(variant, repetition, WINDOW_S)
        forced.append(self._played("forced", repetition, WINDOW_S / 2))
        usual = float(np.mean([each["tokens_per_s"] for each in forced]))
        return {**found, "over_forced": found["tokens_per_s"] / usual, "forced_tokens_per_s": usual}

    def _played(self, variant: str, repetition: int, window_s: float) -> dict[str, float]:
        """Play episodes for a while; return what the engine did in the last `window_s` seconds."""
        most = IN_FLIGHT.get(variant, 2 * SLOTS)
        player = _Player(self.loads, variant, most, repetition)
        with closing(player):
            player.play(WARM_S + 1.5 * TURNS * SLEEPS.get(variant, 0.0) + (2 * HANG_S if variant == "hang" else 0.0))
            return player.play(window_s)

    def headline(self, samples: Samples) -> dict[str, float]:
        found: dict[str, float] = {}
        for variant in self.variants:
            low, middle, high = spread([sample["over_forced"] for sample in samples[variant]])
            found[f"throughput_{variant}"] = middle
            found |= {f"throughput_{variant}_first_quartile": low, f"throughput_{variant}_third_quartile": high}
        return found

    def plot(self, axes, samples: Samples) -> None:
        for place, variant in enumerate(self.variants):
            found = [sample["over_forced"] for sample in samples[variant]]
            axes.plot([place] * len(found), found, "o")
        axes.axhline(1.0, color="#888888", linewidth=0.8)
        labels = ["0 s", "0.1 s", "2 s", "0 s, and one episode\nin 50 hangs"]
        axes.set_xticks(range(len(labels)), labels)
        axes.set_xlabel("a tool's time")
        axes.set_ylabel("policy tokens a second, over forced transcripts")
        axes.set_ylim(bottom=0)


class _Forced:
    """Stands where environments do, and answers at once in this process."""

    failed = 0

    def __init__(self) -> None:
        self._rows: dict[Any, list] = {}
        self._answers: deque[Answer] = deque()

    def begin(self, key, row) -> None:
        self._rows[key] = [0, row]
        self._answers.append(Answer(key, now(), now(), "reset"))

    def step(self, key, message) -> None:
        self._rows[key][0] += 1
        turn, row = self._rows[key]
        over = turn > len(row["problems"])
        said = [] if over else [{"role": "user", "content": row["problems"][turn - 1]}]
        self._answers.append(Answer(key, now(), now(), "step", said, over, 0.0, tool="sums"))

    def end(self, key) -> None:
        self._rows.pop(key, None)

    def poll(self) -> list[Answer]:
        found = list(self._answers)
        self._answers.clear()
        return found

    def close(self) -> None:
        pass


class _Player:
    """An engine with episodes, played as a generator plays them."""

    def __init__(self, loads: Loads, variant: str, in_flight: int, repetition: int) -> None:
        name = f"asyncspec.bench.sleeping_tools:{FACTORIES.get(variant, 'at_once')}"
        config = loads.with_fields([f"environment.episodes={in_flight}", f"environment.name={name}"])
        self.engine = loads.made("eagle3", SLOTS, LENGTH, kept=in_flight)
        self.engine.use(FixedLength(LENGTH))
        self.environments: Environments | _Forced = _Forced()
        if variant != "forced":
            limit = HANG_S if variant == "hang" else 60.0
            self.environments = Environments(
                name, turn_s=limit, episode_s=600.0, most_failures=1.0, start_s=60.0, workers=2
            )
            self.environments.load()
        self.episodes = Episodes(
            config,
            Renderer(loads.tokenizer, None),
            self.environments,
            lambda turn: self.engine.submit(request_of(turn)),
            self.engine.forget,
            Recorder(False),
        )
        self.tokenizer, self.hangs = loads.tokenizer, HANGS if variant == "hang" else 0.0
        self.first = in_flight
        self._rng = np.random.default_rng([repetition, 1])
        self._problems = [problem.prompt for problem in sums(1000 + repetition, 4096)]
        self._next = 0

    def play(self, seconds: float) -> dict[str, float]:
        engine, done, idle, before = self.engine, 0, 0.0, self.engine.rows.begun_tokens
        began, open_, polls = time.perf_counter(), 0, 0
        while (at := time.perf_counter()) - began < seconds:
            while engine.waiting < engine.slots and self.episodes.has_room:
                self._begin()
            if engine.live or engine.waiting:
                for completion in engine.poll():
                    done += len(completion.tokens)
                    self.episodes.sampled(completion)
            else:
                time.sleep(0.001)
                idle += time.perf_counter() - at
            for _ in self.episodes.tend():
                pass
            open_, polls = open_ + self.episodes.open, polls + 1
        took = time.perf_counter() - began
        return {
            "tokens_per_s": (done + engine.rows.begun_tokens - before) / took,
            "in_flight": open_ / polls,
            "idle": idle / took,
            "failed": float(self.environments.failed),
        }

    def _begin(self) -> None:
        number, self._next = self._next, self._next + 1
        at = number * TURNS
        prompt, *later = (self._problems[(at + turn) % len(self._problems)] for turn in range(TURNS))
        # Of the first ones some are shorter. Otherwise all would be at their first turn together, then at their second.
        later = later[: int(self._rng.integers(TURNS))] if number < self.first else later
        row = json.dumps({"problems": later, "hangs": bool(self._rng.random() < self.hangs)})
        tokens = tokenizer.encode_prompt(self.tokenizer, prompt)
        ticket = m.Ticket(number, 0, 0, prompt, "", tokens, [number], 0.0, row)
        self.episodes.begin(ticket, now())

    def close(self) -> None:
        self.environments.close()


def make(overrides: Sequence[str], out: Path) -> EnvironmentsBenchmark:
    return EnvironmentsBenchmark(overrides, out)
