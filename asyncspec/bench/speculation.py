"""bench speculation: the engine with and without its draft, one thread, on the shipped policy.

Two questions: the default job's rollouts (its own length distribution, 16 prompts x 8 samples through the default slots),
and a fixed number of sequences kept in flight, where batches of different size show where speculation pays.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Sequence

from asyncspec import config as configuration
from asyncspec.bench.harness import Samples, median, ratio

DRAFT_LENGTHS = (0, 1, 2, 3, 5)
LIVE = (1, 4, 16, 64)


class SpeculationBenchmark:
    repeats = 5
    columns = ("generation_s", "tokens_per_s", "acceptance_length", "step_ms")

    def __init__(self, overrides: Sequence[str], out: Path) -> None:
        import torch

        from asyncspec.models import policy, tokenizer
        from asyncspec.rl import tasks
        from asyncspec.speculation.make import drafter_maker

        self.config = c = configuration.load("tiny", overrides)
        torch.set_num_threads(c.engine.threads)
        path = configuration.resolve_path(c.model.path)
        self.model, self.shape = policy.load(path)
        self.make_drafter = drafter_maker(c.speculation.method, configuration.resolve_path(c.draft_directory), self.shape)
        encoder = tokenizer.load(path)
        self.prompts = [encoder.encode(p.prompt).ids for p in tasks.sums(c.seed + 77, 1024)]
        self.variants = [f"job k={k}" for k in DRAFT_LENGTHS] + [f"{n} live k={k}" for n in LIVE for k in (0, 3)]

    def measure(self, variant: str, repetition: int) -> dict[str, float]:
        from asyncspec.engine.base import Request
        from asyncspec.engine.torch_engine import TorchEngine

        c, k = self.config, int(variant.rsplit("=", 1)[1])
        job = variant.startswith("job")
        slots = c.engine.slots if job else int(variant.split()[0])
        samples = c.rl.group_size if job else 1
        # Enough prompts that a fixed number of live sequences stays fixed for most of the run.
        prompts = c.rl.groups_per_step if job else max(12, 3 * slots)
        engine = TorchEngine(
            self.shape, self.make_drafter if k else None, slots=slots, max_prompt_tokens=c.engine.max_prompt_tokens,
            max_response_tokens=c.sampling.max_response_tokens, draft_length=k, temperature=c.sampling.temperature,
            top_p=c.sampling.top_p, top_k=c.sampling.top_k)
        engine.load_policy(dict(self.model.named_parameters()), 0)
        for index in range(prompts):
            prompt = self.prompts[(repetition * prompts + index) % len(self.prompts)]
            seeds = [repetition * 10**6 + index * 100 + s for s in range(samples)]
            engine.submit(Request(index, prompt, seeds, c.sampling.max_response_tokens))
        done, steps, start = [], 0, time.perf_counter()
        while engine.live or engine.waiting:
            done += engine.poll()
            steps += 1
        seconds = time.perf_counter() - start
        tokens, verifications = sum(len(d.tokens) for d in done), sum(d.verifications for d in done)
        return {"generation_s": seconds, "tokens": tokens, "tokens_per_s": tokens / seconds, "step_ms": 1e3 * seconds / steps,
                "acceptance_length": (tokens - len(done)) / max(1, verifications)}

    def headline(self, samples: Samples) -> dict[str, float]:
        # Tokens differ a little between variants (other random numbers are used), so rates are compared, not times.
        result = {"generation_speedup_k3": ratio(samples, "tokens_per_s", "job k=3", "job k=0"),
                  "acceptance_length_k3": median(samples, "job k=3", "acceptance_length"),
                  "tokens_per_s_k0": median(samples, "job k=0", "tokens_per_s"),
                  "tokens_per_s_k3": median(samples, "job k=3", "tokens_per_s")}
        for live in LIVE:
            result[f"generation_speedup_{live}_live_k3"] = ratio(samples, "tokens_per_s", f"{live} live k=3", f"{live} live k=0")
        return result

    def plot(self, axes, samples: Samples) -> None:
        labels = [f"job k={k}" for k in DRAFT_LENGTHS if k] + [f"{n} live k=3" for n in LIVE]
        speedups = [ratio(samples, "tokens_per_s", label, label.rsplit("=", 1)[0] + "=0") for label in labels]
        axes.bar(labels, speedups)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_ylabel("tokens/s over no speculation")
        axes.tick_params(axis="x", rotation=30)


def make(overrides: Sequence[str], out: Path) -> SpeculationBenchmark:
    return SpeculationBenchmark(overrides, out)
