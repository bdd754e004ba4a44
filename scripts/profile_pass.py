#!/usr/bin/env python3
"""Profile one forward pass of the engine on the shipped policy, operation by operation. This takes ten seconds.

scripts/profile_pass.py 16 8        16 rows of 8 tokens each: a verification of 7 proposals per row
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch.profiler import ProfilerActivity, profile

from asyncspec.bench.loads import Loads

PASSES = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=int, help="live sequences")
    parser.add_argument("tokens", type=int, help="tokens of each row: 1 + draft length")
    parser.add_argument("--length", type=int, default=60, help="positions before these tokens (default: 60)")
    parser.add_argument("overrides", nargs="*", metavar="field=value", help="for example engine.threads=2")
    args = parser.parse_args()
    loads = Loads(args.overrides)
    engine, shape = loads.engine("none", args.rows), loads.shape
    token_BL = torch.randint(2, shape.vocab_size, (args.rows, args.tokens))
    position_BL = args.length + torch.arange(args.tokens).expand(args.rows, -1)
    spans = [(args.rows, args.length + args.tokens)]
    with torch.inference_mode():

        def one_pass():
            started = time.perf_counter()
            engine.decode.hidden_states(0, token_BL, position_BL, spans)
            return time.perf_counter() - started

        seconds = statistics.median([one_pass() for _ in range(PASSES)][PASSES // 5 :])
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            for _ in range(PASSES):
                one_pass()
    operations = sorted(profiled.key_averages(), key=lambda op: -op.self_cpu_time_total)
    total = sum(op.self_cpu_time_total for op in operations)
    calls = sum(op.count for op in operations) // PASSES
    matrices = sum(
        p.numel() for n, p in engine.model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n
    )
    flops = 2 * args.rows * args.tokens * matrices
    print(
        f"{args.rows} rows of {args.tokens} tokens: {1e3 * seconds:.2f} ms, {calls} operations, nested ones included, "
        f"{flops / 1e6:.0f} MFLOP in matrix products"
    )
    for op in operations[:14]:
        print(f"{op.key:32} {op.count // PASSES:5} calls  {op.self_cpu_time_total / total:6.1%}")


if __name__ == "__main__":
    main()
