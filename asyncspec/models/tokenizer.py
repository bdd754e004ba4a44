"""Turns text into tokens and back, with a checkpoint's tokenizer.json.

The file's rules of how text becomes tokens apply, and nothing else that it may say: no text is cut off, padded, or
split at random. The same text always has the same tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from tokenizers import Encoding, Tokenizer
from tokenizers.decoders import DecodeStream

from asyncspec.errors import first_line
from asyncspec.models import CheckpointError
from asyncspec.models.headers import read_json

# A process that has encoded in parallel may fork later. Unless this is set, the library then warns on the console.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

MOST_HELD = 8  # tokens without a whole character, after which their bytes count as no text; a character has 4 bytes


class Prompt(NamedTuple):
    """A prompt's text and its tokens."""

    text: str
    tokens: list[int]  # what the policy gets
    own: list[int]  # those that come from the text
    appended: list[int]  # those that the tokenizer adds behind the text


def load(directory: Path) -> Tokenizer:
    """Load the tokenizer of a Hugging Face directory.

    Raises:
        CheckpointError: there is no tokenizer.json, or the library cannot use it.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; the policy's directory must hold its tokenizer")
    with _refused(str(path), "the tokenizer.json of a Hugging Face model"):
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if getattr(tokenizer.model, "dropout", None) is not None:
            tokenizer.model.dropout = None
        tokenizer.encode("")  # fails if the post-processor adds a token that it does not define
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for file, token in _added_elsewhere(directory):
        if token not in known:
            raise CheckpointError(
                f"{directory / file}: adds the token {token!r}, which tokenizer.json does not add, so it would be read "
                "as characters; expected both to agree; transformers' save_pretrained writes them so"
            )
    return tokenizer


def _added_elsewhere(directory: Path) -> Iterator[tuple[str, str]]:
    """Yield (file, token) of the tokens that the files beside tokenizer.json add."""
    for file in ("tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"):
        if not (directory / file).is_file():
            continue
        found = read_json(directory / file)
        named: list = list(found) if file == "added_tokens.json" else []
        for field in ("added_tokens_decoder", "extra_special_tokens", "additional_special_tokens"):
            tokens = found.get(field) if file != "added_tokens.json" else None
            named += tokens.values() if isinstance(tokens, dict) else tokens if isinstance(tokens, list) else []
        for token in named:
            yield file, str(token.get("content") if isinstance(token, dict) else token)
        if found.get("added_tokens_decoder"):  # transformers then reads no other file
            return


def encode_prompts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Prompt]:
    """Encode prompts, on all cores.

    The tokenizer may add tokens around the text, as its file says. A beginning that the text has already, for example
    because a chat template wrote it, is not added again.

    Raises:
        CheckpointError: the tokenizer fails for a prompt.
    """
    return [_prompt(text, encoding) for text, encoding in zip(texts, _encode_all(tokenizer, texts, "prompt"))]


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return a prompt's tokens, as `encode_prompts` does."""
    return _prompt(text, _encode(tokenizer, text, "prompt")).tokens


def encode_responses(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of responses. The tokenizer adds nothing around them.

    Raises:
        CheckpointError: the tokenizer fails for a response.
    """
    return [encoding.ids for encoding in _encode_all(tokenizer, texts, "response", around=False)]


def response_text(tokenizer: Tokenizer, tokens: Sequence[int], truncated: bool, special: bool) -> str:
    """Return the text of a response, without the token that ended it, which need not be special.

    Args:
        truncated: whether the length limit ended it instead.
        special: whether to keep special tokens.
    """
    return tokenizer.decode(tokens if truncated else tokens[:-1], skip_special_tokens=not special)


def response_pieces(tokenizer: Tokenizer, tokens: Sequence[int], truncated: bool) -> tuple[str, list[str]]:
    """Return the text of a response, special tokens included, and the text that each token adds, that of the end
    included. The bytes of one character may be in several tokens: the last of them adds it.
    """
    pieces: list[str] = []
    stream, held = DecodeStream(skip_special_tokens=False), []
    for token in tokens:
        held.append(token)
        try:
            piece, stuck = stream.step(tokenizer, token), len(held) == MOST_HELD
        except Exception:  # the library gives up on some bytes that are no text
            piece, stuck = None, True
        if piece is None and stuck:
            piece = tokenizer.decode(held, skip_special_tokens=False)
            stream = DecodeStream(skip_special_tokens=False)
        held = held if piece is None else []
        pieces.append(piece or "")
    return response_text(tokenizer, tokens, truncated, special=True), pieces


def loses(tokenizer: Tokenizer, prompt: Prompt) -> bool:
    """Return whether a prompt's text has characters that its tokens do not contain.

    White space does not count. Neither does what the tokenizer normalizes, such as capital letters.
    """
    if tokenizer.decode(prompt.own, skip_special_tokens=False) == prompt.text:
        return False
    normalizer = tokenizer.normalizer
    text = (prompt.text if normalizer is None else normalizer.normalize_str(prompt.text)).strip()
    encoding, unknown, end = _encode(tokenizer, text, "prompt", around=False), _unknown(tokenizer), 0
    for token, (start, stop) in zip(encoding.ids, encoding.offsets):
        if text[end:start].strip() or (token == unknown and text[start:stop] != tokenizer.id_to_token(token)):
            return True
        end = max(end, stop)
    return bool(text[end:].strip())


def _prompt(text: str, encoding: Encoding) -> Prompt:
    tokens, added = encoding.ids, encoding.special_tokens_mask  # 1: the token does not come from the text
    before = added.index(0) if 0 in added else len(added)
    after = added[::-1].index(0) if 0 in added else 0
    own = tokens[before : len(tokens) - after]
    if before and own[:before] == tokens[:before]:
        tokens = tokens[before:]
    return Prompt(text, tokens, own, tokens[len(tokens) - after :])


def _encode_all(tokenizer: Tokenizer, texts: Sequence[str], what: str, around: bool = True) -> list[Encoding]:
    try:
        with _refused("", ""):
            return tokenizer.encode_batch(texts, add_special_tokens=around)
    except CheckpointError:  # one by one, to name the text
        return [_encode(tokenizer, text, what, around) for text in texts]


def _encode(tokenizer: Tokenizer, text: str, what: str, around: bool = True) -> Encoding:
    with _refused(f"{what} {text[:40]!r}", "text that the policy's tokenizer.json can encode"):
        return tokenizer.encode(text, add_special_tokens=around)


@lru_cache(maxsize=1)
def _unknown(tokenizer: Tokenizer) -> int | None:
    """Return the token that stands for whatever the tokenizer does not know; None if there is none."""
    model = tokenizer.model
    if hasattr(model, "unk_token"):
        return None if model.unk_token is None else tokenizer.token_to_id(model.unk_token)
    return json.loads(model.__getstate__()).get("unk_id")


@contextmanager
def _refused(what: str, expected: str) -> Iterator[None]:
    """Turn whatever the library raises into a CheckpointError. It raises bare exceptions, and a panic of its Rust code
    is not even an Exception.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise CheckpointError(f"{what}: {first_line(error)}; expected {expected}") from None
