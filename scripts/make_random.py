#!/usr/bin/env python3
"""Make a policy of any size with random weights, and an EAGLE-3 draft for it, with the shipped tokenizer.

It serves to measure what weights of that size cost. It learns nothing useful.

    scripts/make_random.py DIRECTORY                     50 MB in float32, the default sizes
    scripts/make_random.py DIRECTORY --like qwen3-0.6b   the sizes of Qwen3-0.6B: 2.4 GB in float32
    scripts/make_random.py DIRECTORY --like qwen2.5-0.5b   those of Qwen2.5-0.5B: 2.0 GB in float32
    asyncspec train model.path=DIRECTORY speculation.draft_path=DIRECTORY/eagle3 data.reward=asyncspec.tasks.sums:parity

Of other families it makes small policies, without a draft; `sevens` is a reward that random weights can learn from.

    scripts/make_random.py DIRECTORY --family qwen3_moe
    asyncspec train model.path=DIRECTORY speculation.method=ngram data.reward=asyncspec.tasks.sums:sevens
    scripts/make_random.py DIRECTORY --family gemma3_text
    asyncspec train model.path=DIRECTORY model.backend=transformers engine.kind=vllm speculation.method=ngram \
        data.reward=asyncspec.tasks.sums:sevens
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from asyncspec.config import Config, resolve_path
from asyncspec.drafts import draft
from asyncspec.models import policy
from asyncspec.models.shape import PolicyShape

SHIPPED = resolve_path(Config().model.path)
SMALL = {"dim": 256, "n_layers": 16, "n_heads": 4, "n_kv_heads": 2, "head_dim": 64, "hidden_dim": 768}
LIKE = {
    "50mb": {**SMALL, "max_positions": 2048},
    # From the model's config.json. The shipped tokenizer knows few of these tokens; the others decode to nothing.
    "qwen3-0.6b": {
        "dim": 1024,
        "n_layers": 28,
        "n_heads": 16,
        "n_kv_heads": 8,
        "head_dim": 128,
        "hidden_dim": 3072,
        "vocab_size": 151936,
        "max_positions": 40960,
        "rope_theta": 1e6,
        "norm_eps": 1e-6,
        "tied": True,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "dim": 896,
        "n_layers": 24,
        "n_heads": 14,
        "n_kv_heads": 2,
        "head_dim": 64,
        "hidden_dim": 4864,
        "vocab_size": 151936,
        "max_positions": 32768,
        "rope_theta": 1e6,
        "norm_eps": 1e-6,
        "tied": True,
    },
}


# Policies of four layers. With a window, it is shorter than most prompts with their responses.
SMALL_FAMILY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}
FAMILIES = {
    "gemma3_text": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "mistral": {"sliding_window": 16},
    "qwen2": {"hidden_size": 128, "intermediate_size": 256},  # its heads take what the width gives them
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
}


def write_family(kind: str, directory: Path) -> int:
    """Write a random policy of a family as transformers makes it, with the shipped tokenizer; return its parameters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    own = PolicyShape.from_hf(SHIPPED)
    tokens = {"vocab_size": own.vocab_size, "eos_token_id": own.eos_token_id, "pad_token_id": own.pad_token_id}
    config = AutoConfig.for_model(kind, **{**SMALL_FAMILY, **FAMILIES[kind], **tokens, "bos_token_id": None})
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (SHIPPED / name).is_file():
            shutil.copy(SHIPPED / name, directory)
    return model.num_parameters()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed of the weights (default: 0)")
    parser.add_argument("--like", choices=LIKE, default="50mb", help="use the sizes of this model (default: 50mb)")
    parser.add_argument("--family", choices=FAMILIES, help="make a small policy of this family instead")
    for name in SMALL:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help="size (default: from --like)")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    if args.family:
        print(f"{4e-6 * write_family(args.family, args.directory):.1f} MB in float32: {args.directory}")
        return
    given = {name: getattr(args, name) for name in SMALL if getattr(args, name) is not None}
    shape = replace(PolicyShape.from_hf(SHIPPED), **LIKE[args.like] | given)
    model = policy.build(shape)
    model.init_states()
    policy.save(model, shape, args.directory, SHIPPED)
    draft.new("eagle3", shape, model).save(args.directory / "eagle3")
    print(f"{4e-6 * sum(p.numel() for p in model.parameters()):.1f} MB in float32: {args.directory}")


if __name__ == "__main__":
    main()
