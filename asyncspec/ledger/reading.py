"""Reads a module's tensors out of a checkpoint part by part, so a reader needs memory for one part of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from asyncspec.ledger import checkpoint

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
        Damaged: a file has changed, see `checkpoint.load`.
        OSError: the checkpoint does not hold them, or a file cannot be read.
        Exception: it was not written by asyncspec; of what type depends on torch.
    """
    warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")  # it warns about a single process
    part: dict[str, torch.Tensor] = {}
    waiting = list(tensors.items())
    for index, (name, tensor) in enumerate(waiting, start=1):
        part[name] = torch.empty(tensor.shape)
        if index == len(waiting) or sum(each.nbytes for each in part.values()) >= part_bytes:
            checkpoint.load(path, {owner: {"parameters": part}})
            yield part
            part = {}
