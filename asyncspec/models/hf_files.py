"""Reads and writes the files of a Hugging Face directory: config.json, safetensors, and the files that go with them."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from asyncspec.files import write_json
from asyncspec.models import CheckpointError
from asyncspec.models.headers import read_headers, read_json, tensor_files
from asyncspec.models.tensor_files import write_tensors

CONFIG = "config.json"
# Files with weights in any format. New weights replace them, so they are not carried over.
_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".onnx",
    ".onnx_data",
    ".h5",
    ".msgpack",
    ".npz",
    ".partial",
)
_INDEX = (".safetensors.index.json", ".bin.index.json")


def read_tensors(directory: Path, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors of model.safetensors, or of the shards that model.safetensors.index.json lists.

    Args:
        names: the tensors to read; None: all.

    Raises:
        CheckpointError: a file is missing or cannot be read.
    """
    tensors: dict[str, torch.Tensor] = {}
    for file in tensor_files(directory):
        try:
            if names is None:
                tensors.update(load_file(directory / file))
                continue
            with safe_open(directory / file, "pt") as opened:
                tensors.update({name: opened.get_tensor(name) for name in opened.keys() if name in names})
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{directory / file}: {error}") from None
    return tensors


def carried(source: Path | None, config: dict[str, Any], dtype: str = "float32") -> dict[str, Any]:
    """Return the fields of config.json for new weights.

    Args:
        source: the directory that the old weights were read from. Its fields are kept, except the dtype.
        config: the fields without a source.
        dtype: dtype of the new weights.
    """
    found = config if source is None else read_json(source / CONFIG)
    return found | {name: dtype for name in ("torch_dtype", "dtype") if name in found}


def write_checkpoint(
    directory: Path,
    config: dict[str, Any],
    tensors: Mapping[str, torch.Tensor],
    source: Path | None = None,
    parts: Iterable[Mapping[str, torch.Tensor]] | None = None,
) -> None:
    """Write weights and config.json, each replaced as a whole: a reader never sees half a file. Then copy the files of
    `source` that hold no weights, for example the tokenizer, the chat template and the license.

    Args:
        tensors: the tensors in the dtypes to write.
        parts: see `tensor_files.write_tensors`; None: `tensors` have their values.

    Raises:
        OSError: a file cannot be written, for example because the disk is full.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(directory, tensors, [tensors] if parts is None else parts)
    write_json(directory / CONFIG, config)
    if source is not None and source.resolve() != directory.resolve():
        _copy_others(source, directory)


def _copy_others(source: Path, target: Path) -> None:
    """Copy the files and folders without weights. A folder with weights belongs to another model and stays behind."""
    for item in sorted(source.iterdir(), key=lambda item: (item.is_dir(), item.name)):  # files first
        if item.name.startswith(".") or item.name == CONFIG:
            continue
        if item.is_dir():
            if not any(_has_weights(file) for file in item.rglob("*")):
                shutil.copytree(
                    item,
                    target / item.name,
                    copy_function=shutil.copyfile,
                    dirs_exist_ok=True,
                    ignore_dangling_symlinks=True,
                )
        elif item.is_file() and not _has_weights(item):
            shutil.copyfile(item, target / item.name)


def _has_weights(file: Path) -> bool:
    return file.name.endswith((*_WEIGHTS, *_INDEX))


def further_tensors(source: Path, written: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the tensors of a directory that training does not change: those that are not among the written ones. Their
    values are read when they are used.
    """
    names = set(read_headers(source)) - set(written)
    return read_tensors(source, names) if names else {}
