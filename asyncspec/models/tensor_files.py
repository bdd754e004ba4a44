"""Writes the safetensors files of a Hugging Face directory, tensor by tensor: one file, or shards and their index.

safetensors' own `save_file` takes a file's tensors all at once. Here they come in any order and in parts, so a writer
needs memory for one part, however large the files are. Header and layout are those of
https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import _TYPES

from asyncspec.files import write_json

SHARD_BYTES = 5_000_000_000  # as in transformers
SINGLE, INDEX, SHARDS = "model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"
_PARTIAL = ".partial"
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


def write_tensors(
    directory: Path, tensors: Mapping[str, torch.Tensor], parts: Iterable[Mapping[str, torch.Tensor]]
) -> None:
    """Write tensors, and replace the ones that are there.

    Every new file is complete before an old one goes. A single file replaces a single file at once. Otherwise there is
    a moment with neither an index nor a single file, in which a reader finds no weights. So a reader that starts finds
    all old tensors, all new ones, or none.

    Args:
        tensors: the names, shapes and dtypes; they may be on the meta device.
        parts: the same tensors with their values, each once, in any dtypes.

    Raises:
        OSError: a file cannot be written. The files that are there are unchanged.
    """
    shards = _shards(tensors)
    try:
        _write(directory, shards, tensors, parts)
    except BaseException:
        for file in shards:
            (directory / (file + _PARTIAL)).unlink(missing_ok=True)
        raise
    index = directory / INDEX
    index.unlink(missing_ok=True)
    if SINGLE not in shards:
        (directory / SINGLE).unlink(missing_ok=True)
    for file in shards:
        (directory / (file + _PARTIAL)).replace(directory / file)
    if SINGLE not in shards:
        weight_map = {name: file for file, names in shards.items() for name in names}
        total = sum(tensor.nbytes for tensor in tensors.values())
        write_json(index, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    for file in directory.glob(SHARDS):
        if file.name not in shards:
            file.unlink()


def _shards(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """Return the files to write: name -> its tensors. A file is longer than SHARD_BYTES only for one long tensor."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if size and size + tensor.nbytes > SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += tensor.nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": names for i, names in enumerate(groups, start=1)}


def _write(
    directory: Path,
    shards: Mapping[str, list[str]],
    tensors: Mapping[str, torch.Tensor],
    parts: Iterable[Mapping[str, torch.Tensor]],
) -> None:
    where = {}  # name -> the open file and the tensor's first byte in it
    with ExitStack() as opened:
        for file, names in shards.items():
            stream = opened.enter_context(open(directory / (file + _PARTIAL), "wb"))
            header, firsts = _header({name: tensors[name] for name in names})
            stream.write(header)
            where |= {name: (stream, len(header) + first) for name, first in firsts.items()}
        for part in parts:
            for name, tensor in part.items():
                stream, first = where.pop(name)
                stream.seek(first)
                values = tensor.detach().to("cpu", tensors[name].dtype).contiguous()
                stream.write(values.reshape(-1).view(torch.uint8).numpy())
                del values
        assert not where, f"no values came for {sorted(where)}"


def _header(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, int]]:
    """Return a file's header, and each tensor's first byte after it. Long elements come first, so all are aligned."""
    entries: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    firsts, end = {}, 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        firsts[name], end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [firsts[name], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, firsts
