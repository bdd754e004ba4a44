"""Reads a module's tensors out of a checkpoint part by part, so a reader needs memory for one part of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

PART_BYTES = 1 << 28  # a part is longer only for one long tensor


def parts(
    path: Path, owner: str, tensors: Mapping[str, torch.Tensor], part_bytes: int = PART_BYTES
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield parameters that a checkpoint holds, each once, as float32. It does not matter how many ranks wrote it.

    Args:
        path: the checkpoint.
        owner: the entry of the checkpoint that has them under "parameters", see `checkpoint.learned`.
        tensors: the parameters by name, of which only the shapes are used.

    Raises:
        Exception: the checkpoint does not hold them, or a file cannot be read; of what type depends on torch.
    """
    import torch.distributed.checkpoint as dcp

    warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")  # it warns about a single process
    part: dict[str, torch.Tensor] = {}
    waiting = list(tensors.items())
    for index, (name, tensor) in enumerate(waiting, start=1):
        part[name] = torch.empty(tensor.shape)
        if index == len(waiting) or sum(each.nbytes for each in part.values()) >= part_bytes:
            dcp.load({owner: {"parameters": part}}, checkpoint_id=str(path), no_dist=True)
            yield part
            part = {}
