"""Measure the trainer's passes alone, on one GPU: model FLOPs utilization and peak memory, packed and padded.

    python3 scripts/measure_trainer.py POLICY [--device cuda] [--peak-tflops 989] [--scale 1]

POLICY is a directory, for example of scripts/make_random.py. The policy computes in bfloat16, with float32 weights and
gradients. FLOPs of a pass: 6 for each parameter that multiplies and token, the head's for response tokens alone, and
12 for each head's number of a query and a key that it sees. What is computed a second time does not count.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from asyncspec.bench.trainer import Load, group_of, padded_path
from asyncspec.config import load as load_config
from asyncspec.models import policy
from asyncspec.models.parallel import Ranks
from asyncspec.rl.accumulate import GradientAccumulator
from asyncspec.rl.batch import Part

PROMPT = 512
CASES = {  # name -> (tokens of each response of a group, recompute)
    "16 of 1,024": ([1024] * 16, False),
    "4 of 4,096": ([4096] * 4, False),
    "1 of 16,384": ([16384], False),
    "2 of 16,384, recomputed": ([16384] * 2, True),
    "16 of 100 to 1,800": (np.linspace(100, 1800, 16).astype(int).tolist(), False),
}


def flops(model, shape, lengths: list[int]) -> float:
    """Return the FLOPs of a packed pass over one prompt and its responses."""
    head = shape.vocab_size * shape.dim
    trunk = sum(p.numel() for p in model.parameters()) - head * (1 if shape.tied else 2)
    rows = PROMPT + sum(length - 1 for length in lengths)
    seen = PROMPT * (PROMPT + 1) / 2 + sum(n * PROMPT + n * (n + 1) / 2 for n in (length - 1 for length in lengths))
    return 6 * trunk * rows + 6 * head * sum(lengths) + 12 * shape.n_layers * shape.n_heads * shape.head_dim * seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="dense bfloat16; an H100's or H200's: 989")
    parser.add_argument("--scale", type=int, default=1, help="divide all lengths by this")
    given = parser.parse_args()
    config, rng = load_config("tiny"), np.random.default_rng(0)
    device = f"{given.device}:0" if given.device == "cuda" else given.device
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for recompute, compiled in ((False, False), (True, False), (False, True)):
        torch.manual_seed(0)
        model, shape = policy.load(given.policy, device, PROMPT + 16384)
        size = shape, sum(p.numel() for p in model.parameters())
        ranks = Ranks("trainer", 0, 1, 1, "bfloat16")
        ranks.join("127.0.0.1", store.port, device, 60, 60)
        ranks.shard(model, trained=True, recompute=recompute, compiled=compiled)
        accumulator = GradientAccumulator(model, config, ranks)
        for name, (full, recomputed) in CASES.items():
            if recomputed is not recompute:
                continue
            lengths = [max(2, length // given.scale) for length in full]
            group, arrays = group_of(rng, 0, PROMPT, np.array(lengths), shape.vocab_size)
            part = Part(group.ticket.prompt_tokens, dict(arrays))
            part.arrays["advantages"] = np.ones(len(lengths), np.float32)
            load = Load(model, [(group, arrays)], 1 << 30)
            for path, act in (
                ("packed", partial(accumulator.run, [part])),
                ("padded", partial(padded_path, load, config)),
            ):
                said = f"{name}, {path}{', compiled' * compiled}"
                print(f"{said}: {measured(act, model, given, flops(model, shape, lengths), sum(lengths))}")
        del model, accumulator
        dist.destroy_process_group()
        print(f"policy of {size[1] / 1e6:.0f} M parameters, {size[0].n_layers} layers")


def measured(act, model, given, work: float, tokens: int) -> str:
    """Return the median time of three passes after one, what follows from it, and the peak of memory."""
    cuda, times = given.device == "cuda", []
    try:
        for _ in range(4):
            model.zero_grad()
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            act()
            if cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return "out of memory"
    seconds = float(np.median(times[1:]))
    peak = f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if cuda else ""
    share = work / seconds / given.peak_tflops / 1e12
    return f"{seconds:.3f} s, {tokens / seconds:,.0f} response tokens a second, utilization {share:.1%}{peak}"


if __name__ == "__main__":
    main()
