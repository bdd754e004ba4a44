#!/usr/bin/env python3
"""Measure what an engine step costs by live rows and draft length.

Every proposal is accepted by force, so these are costs, not token rates. The policy is the shipped one, or one with
random weights of other sizes. Rows are as long as those of short responses. For comparison the script also prints the
time that reading a dense policy's weights once takes.

    scripts/step_costs.py deployment.device=cuda
    scripts/step_costs.py --like qwen3-0.6b deployment.device=cuda model.dtype=bfloat16
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from asyncspec import config as configuration
from asyncspec.bench.engine import read_rate, weight_bytes
from asyncspec.console import terminal
from asyncspec.drafters.make import drafter_for, drafter_maker
from asyncspec.drafts import draft as drafts
from asyncspec.engine.calibrate import Calibrator
from asyncspec.engine.torch_engine import TorchEngine
from asyncspec.launch.roles import devices
from asyncspec.loading import use_threads
from asyncspec.models import policy
from asyncspec.models.shape import PolicyShape
from scripts.make_random import LIKE, SHIPPED

LIVE, LENGTHS = (1, 4, 16, 64), (0, 1, 3, 7, 15)
WARM, TIMED = 5, 15  # steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--like",
        choices=LIKE,
        help="use random weights of these sizes for policy and draft (default: the shipped policy and draft)",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="field=value",
        help="fields that count: deployment.device, engine.threads, model, sampling.max_response_tokens; for example "
        "deployment.device=cuda",
    )
    args = parser.parse_args()
    try:
        c = configuration.load("tiny", args.overrides)
        device, dtype = devices(c.deployment.device, ["generator"])[0], getattr(torch, c.model.dtype)
    except configuration.ConfigError as error:
        parser.error(str(error))
    use_threads(c.engine.threads)
    if args.like:
        torch.manual_seed(c.seed)
        shape = replace(PolicyShape.from_hf(SHIPPED), **LIKE[args.like])
        model = policy.build(shape).to(device)
        model.init_states()
        maker = drafter_for(drafts.new("eagle3", shape, model))
    else:
        model, shape = policy.load(configuration.resolve_path(c.model.path))
        maker = drafter_maker("eagle3", configuration.resolve_path(c.draft_directory), shape)
    began = time.perf_counter()
    engine = TorchEngine(
        shape,
        maker,
        slots=max(LIVE),
        max_prompt_tokens=c.engine.max_prompt_tokens,
        max_response_tokens=c.sampling.max_response_tokens,
        draft_length=max(LENGTHS),
        device=device,
        dtype=dtype,
    )
    engine.load_policy(dict(model.named_parameters()), 0)
    print(f"engine made in {time.perf_counter() - began:.1f} s")
    weights = weight_bytes(shape, dtype)
    floor = weights / read_rate(device)
    table = Table(
        title=f"milliseconds per step; reading {weights / 1e6:.0f} MB of weights takes {1e3 * floor:.3f}",
        title_justify="left",
    )
    for column in ("live", *(f"k={k}" for k in LENGTHS), "floor over k=0"):
        table.add_column(column, justify="right")
    calibrator = Calibrator(engine)
    for live in LIVE:
        medians = []
        for k in LENGTHS:
            took = [calibrator.time_step(live, k, np.full(live, k)) for _ in range(WARM + TIMED)]
            medians.append(statistics.median(took[WARM:]))
        table.add_row(str(live), *(f"{1e3 * seconds:.2f}" for seconds in medians), f"{floor / medians[0]:.3f}")
    terminal().print(table)


if __name__ == "__main__":
    main()
