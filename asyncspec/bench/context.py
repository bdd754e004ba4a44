"""bench context: the memory of the trainer's ranks over long sequences, with and without context parallelism.

A pass forward and backward over one sequence of N tokens, as ranks that share its tokens. The policy is random, with
two layers, and so small that activations are nearly all of the memory. Peaks are of the process with the largest one,
besides what it held before the pass, sampled a hundred times a second. Activations are recomputed in the variants named
so. On one machine the ranks share its cores, so seconds tell how evenly the work is spread and not how fast it gets.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from asyncspec.bench.harness import Benchmark, Samples, median, ratio
from asyncspec.bench.trainer import group_of, memory_of
from asyncspec.config import load as load_config
from asyncspec.config import resolve_path
from asyncspec.models import policy
from asyncspec.models.parallel import Ranks
from asyncspec.models.shape import PolicyShape
from asyncspec.rl.accumulate import GradientAccumulator

LENGTHS = (8192, 16384, 32768, 65536)
PROMPT, SAMPLED_S = 64, 0.01
SIZES = {"dim": 128, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "head_dim": 64, "hidden_dim": 384}
# name -> (ranks, recompute)
WAYS = {"1 rank": (1, False), "2 ranks": (2, False), "1 rank, recomputed": (1, True), "2 ranks, recomputed": (2, True)}


def held() -> int:
    """Return the bytes of this process in memory, or swapped out."""
    return memory_of("VmRSS") + memory_of("VmSwap")


class Peak:
    """Samples what this process holds, in a thread, while its context is open."""

    def __init__(self) -> None:
        self.bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLED_S):
            self.bytes = max(self.bytes, held())


def work(rank: int, ranks: int, recompute: bool, length: int, port: int, results) -> None:
    """Take part in a pass; put this rank's peak in bytes and its seconds into `results`."""
    torch.set_num_threads(1)
    config = load_config("tiny")
    trainer = replace(config.trainer, tokens_per_pass=1 << 30)
    shape = replace(PolicyShape.from_hf(resolve_path(config.model.path)), max_positions=length + PROMPT, **SIZES)
    torch.manual_seed(0)
    model = policy.build(shape)
    model.init_states()
    group = Ranks("context", rank, ranks, context_parallel=ranks)
    group.join("127.0.0.1", port, "cpu", 60, 600)
    group.shard(model, trained=True, recompute=recompute)
    accumulator = GradientAccumulator(model, replace(config, trainer=trainer), group)
    for tokens in (PROMPT, length):  # the first pass loads kernels
        made = group_of(np.random.default_rng(0), 0, PROMPT, np.array([tokens - PROMPT + 1]), shape.vocab_size)
        made[0].rewards[:] = [1.0]
        before, start = held(), time.perf_counter()
        with Peak() as peak:
            for (passes,) in [*accumulator.add(*made, np.ones(1, np.float32)), *accumulator.flush()]:
                accumulator.run(passes)
        seconds = time.perf_counter() - start
        accumulator.clear()
    results.put((peak.bytes - before, seconds))
    if group.sharded:
        dist.barrier()
        dist.destroy_process_group()


class ContextBenchmark(Benchmark):
    name = "context"
    repeats = 1
    variants = tuple(f"{length} {way}" for length in LENGTHS for way in WAYS)
    columns = ("peak_mib", "pass_s")

    def measure(self, variant: str, repetition: int) -> dict[str, float]:
        length, _, way = variant.partition(" ")
        ranks, recompute = WAYS[way]
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        # By default glibc keeps freed tensors of less than 32 MiB in its heap, so memory would not follow the length.
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(work, args=(ranks, recompute, int(length), store.port, results), nprocs=ranks)
        found = [results.get() for _ in range(ranks)]
        return {"peak_mib": max(peak for peak, _ in found) / 2**20, "pass_s": max(seconds for _, seconds in found)}

    def headline(self, samples: Samples) -> dict[str, float]:
        longest = LENGTHS[-1]
        return {
            "peak_memory_ratio": ratio(samples, "peak_mib", f"{longest} 2 ranks", f"{longest} 1 rank"),
            "peak_memory_ratio_recomputed": ratio(
                samples, "peak_mib", f"{longest} 2 ranks, recomputed", f"{longest} 1 rank, recomputed"
            ),
            "pass_s_ratio": ratio(samples, "pass_s", f"{longest} 2 ranks", f"{longest} 1 rank"),
        }

    def plot(self, axes, samples: Samples) -> None:
        for way in WAYS:
            peaks = [median(samples, f"{length} {way}", "peak_mib") for length in LENGTHS]
            axes.plot(LENGTHS, peaks, marker="o", label=way)
        axes.set_xlabel("tokens of a sequence")
        axes.set_ylabel("peak memory of a rank's pass, MiB")
        axes.set_ylim(0)
        axes.legend()


def make(overrides: Sequence[str], out: Path) -> ContextBenchmark:
    return ContextBenchmark()
