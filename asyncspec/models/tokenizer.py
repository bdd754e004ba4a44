"""Text to tokens and back, from a checkpoint's tokenizer.json; and the tokenizer of the shipped policy."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models

from asyncspec.models import CheckpointError

PAD, EOS = "<pad>", "<eos>"
ALPHABET = "0123456789+-*/=,#.:;?()<> _abcdefghijklmnopqrstuvwxyz'\"!%&@|"


def load(directory: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; the policy's directory must hold its tokenizer")
    return Tokenizer.from_file(str(path))


def make_character_tokenizer() -> Tokenizer:
    """One token a character: byte-pair encoding without merges, so that any tokenizers-based stack reads it."""
    vocab = {token: i for i, token in enumerate([PAD, EOS, *ALPHABET])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, EOS])
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "pad_token": PAD}, indent=2) + "\n"
    )
