"""Writes what a run has learned for others: the policy as a Hugging Face directory, or its adapters as peft's files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from asyncspec.config import Config, hub, resolve_path
from asyncspec.models import frozen, lora_files, policy
from asyncspec.models.shape import PolicyShape

ADAPTER = "adapter"  # the directory of the adapters beside the policy that they were added to


def write(config: Config, directory: Path, parts: Iterable[Mapping[str, torch.Tensor]], dtype: str, mtp=None) -> None:
    """Write a directory.

    Args:
        config: of the run.
        parts: all trained parameters, in parts, named as in `lora.trained`.
        dtype: of the weights that are written.
        mtp: see `policy.save`.

    Raises:
        CheckpointError: a file of the model that the run began with is damaged.
        OSError: a file cannot be written.
    """
    source, of = resolve_path(config.model.path), config.lora
    shape, kind = PolicyShape.from_hf(source, config.model.backend), getattr(torch, dtype)
    if of is None:
        policy.save(None, shape, directory, source, mtp, kind, parts)
        return
    adapters = {name: tensor for part in parts for name, tensor in part.items()}
    if config.checkpoint.export_merged:
        policy.save(None, shape, directory, source, mtp, kind, frozen.merged(source, adapters, of))
        directory = directory / ADAPTER
    name = hub.pinned(config.model.path)
    base = (str(source.absolute()), "") if name is None else (name.repository, name.revision)
    lora_files.write(directory, adapters, of, shape, kind, *base)
