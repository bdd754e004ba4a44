#!/usr/bin/env python3
"""A policy of random weights and of any size, with the shipped tokenizer: to measure what weights of that size cost. It learns nothing useful.

    scripts/make_random.py DIRECTORY                     50 MB in float32, the default sizes
    asyncspec train model.path=DIRECTORY speculation.method=none data.reward=scripts.make_random:parity
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from asyncspec.config import Config, resolve_path
from asyncspec.models import policy
from asyncspec.models.shape import PolicyShape

SIZES = {"dim": 256, "n_layers": 16, "n_heads": 4, "n_kv_heads": 2, "head_dim": 64, "hidden_dim": 768}


def parity(prompt: str, response: str, answer: str) -> float:
    """A reward that random weights earn every other time, so that there is something to train."""
    return float(len(response) % 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the weights (default: 0)")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size, metavar="N", help=f"(default: {size})")
    args = parser.parse_args()
    shipped = resolve_path(Config().model.path)
    shape = replace(PolicyShape.from_hf(shipped), **{name: getattr(args, name) for name in SIZES})
    torch.manual_seed(args.seed)
    model = policy.build(shape)
    model.init_states()
    policy.save(model, shape, args.directory, shipped)
    print(f"{4e-6 * sum(p.numel() for p in model.parameters()):.1f} MB in float32: {args.directory}")


if __name__ == "__main__":
    main()
