"""Writes adapters as the two files that peft and vLLM load: adapter_config.json and adapter_model.safetensors.

torchtitan has one matrix for queries, keys and values, so they share its A. In the files each has a copy of it, and the
rows of B that are its own.

Shape suffixes: as in lora.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from asyncspec.models import lora, policy
from asyncspec.models.shape import Lora, PolicyShape

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def write(
    directory: Path,
    adapters: Mapping[str, torch.Tensor],
    of: Lora,
    shape: PolicyShape,
    dtype: torch.dtype,
    base: str,
    revision: str = "",
) -> None:
    """Write a directory with the two files.

    Args:
        adapters: named as in `lora.trained`.
        base: the policy that they were trained for, a directory, or OWNER/NAME on a hub.
        revision: its commit there.

    Raises:
        OSError: a file cannot be written.
    """
    tensors: dict[str, torch.Tensor] = {}
    whole = policy.skeleton(shape, 1)
    for name, a_RI, b_OR in lora.matrices(adapters):
        for theirs, rows in _rows(whole, name).items():
            stem = _PREFIX + theirs.removesuffix(".weight")
            tensors[f"{stem}.lora_A.weight"] = a_RI.detach().to("cpu", dtype, copy=True).contiguous()
            tensors[f"{stem}.lora_B.weight"] = b_OR.detach()[rows].to("cpu", dtype).contiguous()
    modules = sorted({name.split(".")[-3] for name in tensors})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision or None,
        "r": of.rank,
        "lora_alpha": of.alpha,
        "lora_dropout": 0.0,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, directory / TENSORS, metadata={"format": "pt"})


def _rows(whole, name: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a file that a matrix becomes, and which of its rows each of them has, in order."""
    outputs, inputs = whole.get_parameter(name).shape
    numbered = torch.arange(outputs).unsqueeze(1).expand(outputs, inputs).contiguous()
    return {theirs: tensor[:, 0] for theirs, tensor in policy.to_hf(whole, {name: numbered}).items()}
