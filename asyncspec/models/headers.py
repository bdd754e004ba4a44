"""What the files of a Hugging Face directory say about themselves: JSON objects, and the headers of safetensors files.

Imports no torch and reads no tensor, so a directory is checked in milliseconds, before anything starts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from asyncspec.errors import first_line
from asyncspec.models import CheckpointError

# Names of dtypes in safetensors. Others are quantized, and mean nothing without their scales.
FLOATS = ("F64", "F32", "F16", "BF16")
WHOLE_NUMBERS = ("I64", "I32")
_LONGEST_HEADER = 100_000_000  # bytes, as in safetensors


class Tensor(NamedTuple):
    """A tensor of a safetensors file, without its values."""

    file: str
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        CheckpointError: the file is missing or unreadable, or holds no object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CheckpointError(f"{file}: {reason}; expected a JSON object") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: expected a JSON object")
    return content


def tensor_files(directory: Path) -> list[str]:
    """Return the names of the files that hold a directory's tensors: model.safetensors, or the shards that
    model.safetensors.index.json lists.

    Raises:
        CheckpointError: the index is malformed, a file is missing, or both kinds of files are there.
    """
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if not index.is_file():
        if not single.is_file():
            others = sorted(path.name for pattern in ("*.bin", "*.gguf", "*.pth") for path in directory.glob(pattern))
            raise CheckpointError(
                f"{single}: no such file; expected the weights as safetensors"
                + (f", not {others[0]}; transformers' save_pretrained writes them" if others else "")
            )
        return [single.name]
    names = sorted(set(_weight_map(index).values()))
    if single.is_file() and single.name not in names:
        if there := [name for name in names if (directory / name).is_file()]:
            raise CheckpointError(
                f"{directory}: holds {single.name} and also {there[0]}, which the index names; expected one of them"
            )
        return [single.name]
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise CheckpointError(
            f"{index}: names {missing[0]!r}, which is not in the directory ({len(missing)} files are missing)"
        )
    return names


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = read_json(index).get("weight_map")
    except CheckpointError:
        found = None
    if not isinstance(found, dict) or not found or not all(isinstance(name, str) for name in found.values()):
        raise CheckpointError(f"{index}: expected an object whose weight_map names each tensor's file")
    return found


def read_headers(directory: Path) -> dict[str, Tensor]:
    """Return the tensors of a directory by name.

    Raises:
        CheckpointError: a file is missing, torn or malformed, two files hold the same tensor, or the index names a
            tensor that is not there.
    """
    found: dict[str, Tensor] = {}
    for name in tensor_files(directory):
        held = _header(directory / name)
        if twice := sorted(set(held) & set(found)):
            raise CheckpointError(
                f"{directory}: tensor {twice[0]} is in {found[twice[0]].file} and in {name}; expected it in one of them"
            )
        found |= held
    index = directory / "model.safetensors.index.json"
    if len(tensor_files(directory)) > 1 and (lost := sorted(set(_weight_map(index)) - set(found))):
        raise CheckpointError(f"{index}: names tensor {lost[0]}, which is in none of its files ({len(lost)} in all)")
    return found


def _header(file: Path) -> dict[str, Tensor]:
    try:
        with open(file, "rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            held = file.stat().st_size
            if not 2 <= size <= min(held, _LONGEST_HEADER):
                raise ValueError("not a safetensors file")
            header = json.loads(stream.read(size))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        found = {
            name: Tensor(file.name, entry["dtype"], tuple(map(int, entry["shape"]))) for name, entry in entries.items()
        }
        expected = 8 + size + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise CheckpointError(f"{file}: expected a safetensors file, perhaps it is torn or a pointer to it") from None
    if held != expected:
        raise CheckpointError(
            f"{file}: has {held} bytes, expected {expected}; it is torn, so copy or download it again"
        )
    try:
        with safe_open(file, "np"):  # it reads the header only, and checks more of it
            return found
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: {first_line(error)}; expected a safetensors file") from None


def parameters(directory: Path) -> int:
    """Return the number of elements of all tensors in a directory.

    Raises:
        CheckpointError: see `read_headers`.
    """
    return sum(tensor.elements for tensor in read_headers(directory).values())


def compare(
    directory: Path,
    found: Mapping[str, Tensor],
    expected: Mapping[str, tuple[int, ...]],
    ignored: Iterable[str] = (),
    whole_numbers: Iterable[str] = (),
) -> None:
    """Check that a directory holds the expected tensors, and no other.

    Args:
        found: from `read_headers`.
        expected: name -> shape.
        ignored: further tensors that may be there.
        whole_numbers: tensors that hold whole numbers, where the others hold floating-point numbers.

    Raises:
        CheckpointError: a tensor is missing or unknown, or has another shape or a dtype that cannot be read.
    """
    if missing := sorted(set(expected) - set(found)):
        raise CheckpointError(f"{directory}: tensor {missing[0]} is missing ({len(missing)} in all)")
    if unknown := sorted(set(found) - set(expected) - set(ignored)):
        raise CheckpointError(
            f"{directory}: tensor {unknown[0]} has no place in the model that config.json describes "
            f"({len(unknown)} in all)"
        )
    for name, shape in expected.items():
        if found[name].shape != shape:
            raise CheckpointError(
                f"{directory}: tensor {name} has shape {list(found[name].shape)}, config.json asks for {list(shape)}"
            )
        dtypes = WHOLE_NUMBERS if name in whole_numbers else FLOATS
        if found[name].dtype not in dtypes:
            raise CheckpointError(
                f"{directory}: tensor {name} is of dtype {found[name].dtype}; expected one of {', '.join(dtypes)}"
            )
