"""Encode the texts of a run or of a draft's training before it starts, and refuse those that cannot be used."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from asyncspec.console import LINE_EVERY_S, QUIET_S
from asyncspec.models.tokenizer import Prompt, encode_prompts, encode_responses, loses

BATCH = 1000  # texts that are encoded at once, on all cores

Tokens = TypeVar("Tokens")


def encoded_prompts(tokenizer: Tokenizer, texts: Sequence[str], vocab_size: int, console: Console) -> Iterator[Prompt]:
    """Yield the prompts with their tokens. Print a warning at the end if the policy gets other text than expected.

    Args:
        vocab_size: tokens that the policy has.

    Raises:
        ValueError: a generator would refuse a prompt, whatever its length. The message is one line.
    """
    lossy: Prompt | None = None
    losses, appended = 0, []
    for prompt in _encoded(lambda part: encode_prompts(tokenizer, part), texts, "prompts", console):
        if not prompt.own:
            raise ValueError(f"prompt {prompt.text[:40]!r}: has no token that the policy knows; expected at least one")
        _check(tokenizer, "prompt", prompt.text, prompt.tokens, vocab_size)
        if loses(tokenizer, prompt):
            lossy, losses = lossy or prompt, losses + 1
        appended = prompt.appended
        yield prompt
    if lossy is not None:
        kept = tokenizer.decode(lossy.own, skip_special_tokens=False)
        console.print(
            f"warning: {losses} of {len(texts)} prompts have characters that the tokenizer does not know: the policy "
            f"gets {lossy.text[:40]!r} as {kept[:40]!r}",
            soft_wrap=True,
        )
    if appended:
        console.print(
            f"warning: tokenizer.json adds {tokenizer.decode(appended, skip_special_tokens=False)!r} behind every "
            "prompt; the policy's responses begin behind it",
            soft_wrap=True,
        )


def encoded_responses(
    tokenizer: Tokenizer, texts: Sequence[str], vocab_size: int, console: Console
) -> Iterator[list[int]]:
    """Yield the tokens of responses, with nothing around them.

    Raises:
        ValueError: a response has a token that the policy does not have. The message is one line.
    """
    encode = _encoded(lambda part: encode_responses(tokenizer, part), texts, "responses", console)
    for text, tokens in zip(texts, encode):
        _check(tokenizer, "response", text, tokens, vocab_size)
        yield tokens


def _check(tokenizer: Tokenizer, what: str, text: str, tokens: list[int], vocab_size: int) -> None:
    if tokens and (token := max(tokens)) >= vocab_size:
        raise ValueError(
            f"{what} {text[:40]!r}: its token {tokenizer.id_to_token(token)!r} has the number {token}; expected less "
            f"than {vocab_size}, the policy's vocab_size; the policy's directory has the tokenizer.json of another one"
        )


def _encoded(
    encode: Callable[[Sequence[str]], list[Tokens]], texts: Sequence[str], what: str, console: Console
) -> Iterator[Tokens]:
    """Yield what `encode` makes of each text, and show how far it has come if that takes long."""
    columns = (TextColumn(f"encoding {what}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    began = told = time.monotonic()
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task("", total=len(texts))
    try:
        for start in range(0, len(texts), BATCH):
            yield from encode(texts[start : start + BATCH])
            done, now = min(start + BATCH, len(texts)), time.monotonic()
            if console.is_terminal and now - began > QUIET_S:
                bar.start()
                bar.update(task, completed=done)
            elif not console.is_terminal and now - told > LINE_EVERY_S:
                told = now
                console.print(f"{done:,} of {len(texts):,} {what} encoded", soft_wrap=True)
    finally:
        if bar.live.is_started:
            bar.stop()
