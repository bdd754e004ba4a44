"""bench rewards: slow rewards do not hold up generation.

Groups of the default job are generated and rewarded as a generator does it: after each step of the engine, finished
groups go to the reward's processes, and the groups whose rewards are known leave. One engine has a reward that returns
at once. The other has one that sleeps for three seconds over each group. Both generate the same prompts with the same
seeds, by turns, so that other load on the machine slows both alike. An engine's time is that of its own turns, until
its last token; rewards that are missing then are not waited for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from asyncspec.bench.harness import Benchmark, Samples, spread
from asyncspec.bench.loads import Loads
from asyncspec.tasks.rewarder import Rewarder

SLOTS, GROUPS, IN_FLIGHT, TURNS = 16, 96, 16, 16
SLEEP_S = 3.0
START_S = 120.0


def at_once(completions: list, **_) -> list[float]:
    return [1.0] * len(completions)


def after_3s(completions: list, **_) -> list[float]:
    time.sleep(SLEEP_S)
    return [1.0] * len(completions)


class RewardsBenchmark(Benchmark):
    name = "rewards"
    repeats = 5
    variants = ("after_3s over at_once",)
    columns = ("over", "tokens_per_s", "tokens_per_s_at_once", "left", "longest_poll_ms")

    def __init__(self, overrides: Sequence[str], out: Path) -> None:
        self.loads = Loads(overrides)

    def measure(self, variant: str, repetition: int) -> dict[str, float]:
        names = ("after_3s", "at_once")
        # One of two engines is a percent or two faster than the other, so they swap rewards.
        pair = [
            _Generation(self.loads, name, repetition, (repetition + instance) % 2)
            for instance, name in enumerate(names)
        ]
        try:
            for turn in range(1, TURNS + 1):
                for generation in pair if (turn + repetition) % 2 else pair[::-1]:
                    generation.run(1 - turn / TURNS)
        finally:
            for generation in pair:
                generation.rewarder.close()
        slow, fast = pair
        return {
            "over": slow.tokens_per_s / fast.tokens_per_s,
            "tokens_per_s": slow.tokens_per_s,
            "tokens_per_s_at_once": fast.tokens_per_s,
            "left": float(slow.rewarder.waiting),
            "longest_poll_ms": 1e3 * slow.longest_poll_s,
        }

    def headline(self, samples: Samples) -> dict[str, float]:
        low, middle, high = spread([sample["over"] for sample in samples[self.variants[0]]])
        return {
            "throughput_ratio_3s": middle,
            "throughput_ratio_3s_first_quartile": low,
            "throughput_ratio_3s_third_quartile": high,
        }

    def plot(self, axes, samples: Samples) -> None:
        for place, key in enumerate(("tokens_per_s_at_once", "tokens_per_s")):
            found = [sample[key] for sample in samples[self.variants[0]]]
            axes.plot([place] * len(found), found, "o")
        axes.set_xticks(range(2), ["a reward that returns at once", "one that sleeps for 3 s"])
        axes.set_ylabel("sampled tokens a second")
        axes.set_ylim(bottom=0)


class _Generation:
    """An engine, the rewards of its groups, and what it has done in its turns."""

    def __init__(self, loads: Loads, reward: str, repetition: int, instance: int) -> None:
        self.engine = loads.engine("eagle3", SLOTS, 3, instance)
        self.rewarder = Rewarder(f"asyncspec.bench.rewards:{reward}", 60, 0.0, START_S, workers=IN_FLIGHT)
        self.tokens, self.seconds, self.longest_poll_s = 0, 0.0, 0.0
        self.samples = loads.config.rl.group_size
        self.open = dict.fromkeys(
            range(repetition * GROUPS, (repetition + 1) * GROUPS), self.samples
        )  # rollouts that are left
        self.rewarder.load()
        if reward == "after_3s":  # have all processes started, which a run does once
            for group in range(4 * IN_FLIGHT):
                self.rewarder.submit(group, "", [""], "")
            while self.rewarder.waiting:
                self.rewarder.poll()
                time.sleep(0.01)
        for group in self.open:
            loads.submit(self.engine, group, self.samples, repetition)
        self.all = self.engine.live + self.engine.waiting

    def run(self, rest: float) -> None:
        """Generate until this share of the work is left."""
        began = time.perf_counter()
        while self.engine.live + self.engine.waiting > rest * self.all:
            for completion in self.engine.poll():
                self.tokens += len(completion.tokens)
                self.open[completion.request_id] -= 1
                if not self.open[completion.request_id]:
                    self.rewarder.submit(completion.request_id, "", ["1=1,#1"] * self.samples, "1")
            polled = time.perf_counter()
            self.rewarder.poll()
            self.longest_poll_s = max(self.longest_poll_s, time.perf_counter() - polled)
        self.seconds += time.perf_counter() - began

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def make(overrides: Sequence[str], out: Path) -> RewardsBenchmark:
    return RewardsBenchmark(overrides, out)
