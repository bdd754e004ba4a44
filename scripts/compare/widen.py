"""An equal policy, or EAGLE-3 draft, with heads twice as wide: vLLM's attention on CPUs knows none narrower than 32.

Each half of a head is padded with zeros. RMSNorm then divides by a root mean square smaller by sqrt(2), attention by a root
of the width greater by sqrt(2): the norm of keys is scaled back, that of queries needs no change; without norms (the draft) the
queries are scaled. The RoPE base is squared, so that
the frequencies of the dimensions that are not zero stay what they were.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def widened(source: Path, target: Path) -> None:
    """Write the policy in `source` to `target`, with heads twice as wide."""
    config = json.loads((source / "config.json").read_text())
    old, normed = config["head_dim"], "qwen3" in config["model_type"]
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        kind = name.split(".")[-2]
        if kind in ("q_norm", "k_norm"):
            tensor = _padded(tensor, old, 0) * (1.0 if kind == "q_norm" else 2**-0.5)
        elif kind in ("q_proj", "k_proj", "v_proj"):
            tensor = _padded(tensor, old, 0) * (2**0.5 if kind == "q_proj" and not normed else 1.0)
        elif kind == "o_proj":
            tensor = _padded(tensor, old, 1)
        tensors[name] = tensor.contiguous()
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    config |= {"head_dim": 2 * old, "rope_theta": theta**2, "rope_parameters": {"rope_type": "default", "rope_theta": theta**2}}
    target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (source / name).is_file():
            shutil.copy(source / name, target / name)


def _padded(tensor: torch.Tensor, head_dim: int, dim: int) -> torch.Tensor:
    """Zeros behind each half of each head along `dim`."""
    halves = tensor.unflatten(dim, (-1, head_dim // 2))
    return torch.cat([halves, torch.zeros_like(halves)], dim + 1).flatten(dim, dim + 1)
