"""The files of a Hugging Face directory: config.json and safetensors, whole or in shards."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from asyncspec.files import write_json
from asyncspec.models import CheckpointError


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of model.safetensors, or of the shards that model.safetensors.index.json lists."""
    tensors: dict[str, torch.Tensor] = {}
    for name in _shards(directory):
        try:
            tensors.update(load_file(directory / name))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{directory / name}: {error}") from None
    return tensors


def _shards(directory: Path) -> list[str]:
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"]
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        if not all(isinstance(name, str) for name in names):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{index}: expected an object whose weight_map names each tensor's file") from None
    if missing := sorted(name for name in names if not (directory / name).is_file()):
        raise CheckpointError(
            f"{index}: names {missing[0]!r}, which is not in the directory ({len(missing)} files are missing)"
        )
    return sorted(names)


def write_checkpoint(directory: Path, config: dict, tensors: dict[str, torch.Tensor]) -> None:
    """Write config.json and model.safetensors, each replaced as a whole: a reader never sees half a file."""
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / "model.safetensors.partial"
    save_file(
        {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}, partial, metadata={"format": "pt"}
    )
    partial.chmod(0o644)  # safetensors makes it readable only by its owner
    partial.replace(directory / "model.safetensors")
    write_json(directory / "config.json", config)
