"""Text to tokens and back, by a checkpoint's tokenizer.json."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from asyncspec.models import CheckpointError


def load(directory: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; the policy's directory must hold its tokenizer")
    return Tokenizer.from_file(str(path))
