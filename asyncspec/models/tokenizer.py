"""Turns text into tokens and back, with a checkpoint's tokenizer.json."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from asyncspec.models import CheckpointError


def load(directory: Path) -> Tokenizer:
    """Load the tokenizer of a Hugging Face directory."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; the policy's directory must hold its tokenizer")
    return Tokenizer.from_file(str(path))
