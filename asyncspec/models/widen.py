"""Widens the heads of a policy or EAGLE-3 draft, whose outputs stay the same, for kernels without narrow heads.

Each half of a head is padded with zeros to `factor` times its width. RMSNorm then divides by a root mean square that
is smaller by sqrt(factor), and attention divides by the root of a width that is larger by factor. So the norm of the
keys is scaled back, and the norm of the queries needs no change. Without norms (the draft) the queries are scaled. The
RoPE base is raised to the power `factor`, so that the frequencies of the nonzero dimensions stay the same.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from asyncspec.files import write_json
from asyncspec.models.hf_files import read_tensors, write_checkpoint


def widened(source: Path, target: Path, factor: int) -> None:
    """Write the policy or draft in `source` to `target`, with heads `factor` times as wide.

    Raises:
        CheckpointError: a file in `source` cannot be read.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or config.pop("rope_scaling", None) or {"rope_type": "default"}
    theta = float(config.get("rope_theta") or rope["rope_theta"]) ** factor
    wider = {"head_dim": factor * head_dim, "rope_theta": theta, "rope_parameters": {**rope, "rope_theta": theta}}
    write_checkpoint(target, config | wider, widened_tensors(read_tensors(source), head_dim, factor))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (source / name).is_file():
            shutil.copy(source / name, target / name)


def as_llama(directory: Path) -> None:
    """Have the config.json of a Qwen2 describe a Llama with biases of queries, keys and values, in the fields that vLLM
    reads. vLLM lets the heads of a Llama have any width.
    """
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    named = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "qkv_bias": True}
    write_json(directory / "config.json", config | named)


def widened_tensors(tensors: Mapping[str, torch.Tensor], head_dim: int, factor: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a policy or draft, named as in its file, with heads `factor` times as wide."""
    if factor == 1:
        return dict(tensors)
    normed = any(name.endswith("k_norm.weight") for name in tensors)
    result = {}
    for name, tensor in tensors.items():
        kind = name.split(".")[-2] if "." in name else name
        if kind in ("q_norm", "k_norm"):
            tensor = _padded(tensor, head_dim, factor, 0) * (1.0 if kind == "q_norm" else factor**-0.5)
        elif kind in ("q_proj", "k_proj", "v_proj"):
            tensor = _padded(tensor, head_dim, factor, 0) * (factor**0.5 if kind == "q_proj" and not normed else 1.0)
        elif kind == "o_proj":
            tensor = _padded(tensor, head_dim, factor, 1)
        result[name] = tensor.contiguous()
    return result


def _padded(tensor: torch.Tensor, head_dim: int, factor: int, dim: int) -> torch.Tensor:
    """Append zeros to each half of each head along `dim`."""
    halves = tensor.unflatten(dim, (-1, head_dim // 2))
    zeros = torch.zeros_like(halves)
    return torch.cat([halves, *(factor - 1) * [zeros]], dim + 1).flatten(dim, dim + 1)
