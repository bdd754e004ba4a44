"""bench rewards: slow rewards do not hold up generation.

Groups of the default job are generated and rewarded as a generator does it: after each step of the engine, finished
groups go to the reward's processes, and the groups whose rewards are known leave. One reward returns at once. The other
sleeps for three seconds over each group. A pair has the same prompts and seeds. The window ends with the last token;
rewards that are still missing then are not waited for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from asyncspec.bench.harness import Benchmark, Samples, spread
from asyncspec.bench.loads import Loads
from asyncspec.engine.protocol import Request
from asyncspec.tasks.rewarder import Rewarder

SLOTS, GROUPS, IN_FLIGHT = 16, 96, 16
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
    variants = ("at_once", "after_3s")
    columns = ("tokens_per_s", "seconds", "left", "longest_poll_ms")

    def __init__(self, overrides: Sequence[str], out: Path) -> None:
        self.loads = Loads(overrides)
        self.engine = self.loads.engine("eagle3", SLOTS, 3)

    def measure(self, variant: str, repetition: int) -> dict[str, float]:
        rewarder = Rewarder(f"asyncspec.bench.rewards:{variant}", 60, 0.0, START_S, workers=IN_FLIGHT)
        try:
            rewarder.load()
            if variant == "after_3s":
                self._start_all(rewarder)
            return self._generate(rewarder, repetition)
        finally:
            rewarder.close()

    @staticmethod
    def _start_all(rewarder: Rewarder) -> None:
        """Have all processes started, which a run does once."""
        for group in range(4 * IN_FLIGHT):
            rewarder.submit(group, "", [""], "")
        while rewarder.waiting:
            rewarder.poll()
            time.sleep(0.01)

    def _generate(self, rewarder: Rewarder, repetition: int) -> dict[str, float]:
        config, prompts, engine = self.loads.config, self.loads.prompts, self.engine
        samples, tokens, longest = config.rl.group_size, 0, 0.0
        started, open_groups = time.perf_counter(), dict.fromkeys(range(GROUPS), samples)
        for group in open_groups:
            seeds = [1_000_000 * repetition + 1_000 * group + sample for sample in range(samples)]
            prompt = prompts[(repetition * GROUPS + group) % len(prompts)]
            engine.submit(Request(group, prompt, seeds, config.sampling.max_response_tokens))
        while engine.live or engine.waiting:
            for completion in engine.poll():
                tokens += len(completion.tokens)
                open_groups[completion.request_id] -= 1
                if not open_groups[completion.request_id]:
                    rewarder.submit(completion.request_id, "", ["1=1,#1"] * samples, "1")
            polled = time.perf_counter()
            rewarder.poll()
            longest = max(longest, time.perf_counter() - polled)
        seconds = time.perf_counter() - started
        return {
            "tokens_per_s": tokens / seconds,
            "seconds": seconds,
            "left": float(rewarder.waiting),
            "longest_poll_ms": 1e3 * longest,
        }

    def headline(self, samples: Samples) -> dict[str, float]:
        ratios = [
            slow["tokens_per_s"] / fast["tokens_per_s"] for fast, slow in zip(samples["at_once"], samples["after_3s"])
        ]
        low, middle, high = spread(ratios)
        return {
            "throughput_ratio_3s": middle,
            "throughput_ratio_3s_first_quartile": low,
            "throughput_ratio_3s_third_quartile": high,
        }

    def plot(self, axes, samples: Samples) -> None:
        for place, variant in enumerate(self.variants):
            axes.plot([place] * len(samples[variant]), [s["tokens_per_s"] for s in samples[variant]], "o")
        axes.set_xticks(range(2), ["a reward that returns at once", "one that sleeps for 3 s"])
        axes.set_ylabel("sampled tokens a second")
        axes.set_ylim(bottom=0)


def make(overrides: Sequence[str], out: Path) -> RewardsBenchmark:
    return RewardsBenchmark(overrides, out)
