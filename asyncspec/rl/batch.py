"""Divides groups into passes of trainer and logprob: prompts with some of their responses, packed into rows.

The gradient is a sum over tokens, so it does not matter how the responses of a step are divided.

Shape suffixes: R responses, T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from asyncspec.wire.messages import Arrays, Pass

if TYPE_CHECKING:
    from asyncspec.models.packed import Row

PER_RESPONSE = ("lengths", "advantages")  # arrays with one entry for each response
PER_PROMPT_TOKEN = ("prompt_experts",)  # and with one for each token of the prompt; the others have one for each token


class Part(NamedTuple):
    """A prompt and some of its responses.

    arrays: lengths int32 [R], perhaps advantages float32 [R], prompt_experts as in `Group`, and arrays of [T].
    """

    prompt: list[int]
    arrays: Arrays

    @property
    def tokens(self) -> int:
        """Tokens in a packed row, at most."""
        return len(self.prompt) + int(self.arrays["lengths"].sum())

    def of(self, responses: Sequence[int]) -> Part:
        """Return the part with these responses only, in this order."""
        ends = np.cumsum(self.arrays["lengths"])
        rows = np.concatenate([np.arange(ends[r] - self.arrays["lengths"][r], ends[r]) for r in responses])
        return Part(
            self.prompt,
            {
                name: array if name in PER_PROMPT_TOKEN else array[responses if name in PER_RESPONSE else rows]
                for name, array in self.arrays.items()
            },
        )

    @property
    def experts(self) -> np.ndarray:
        """What the generator chose for the tokens of the prompt and of all responses but their last, [l, M, K]."""
        responses = np.split(self.arrays["experts"], np.cumsum(self.arrays["lengths"])[:-1])
        return np.concatenate([self.arrays["prompt_experts"], *(response[:-1] for response in responses)])


def pack(parts: Sequence[Part], device: str = "cpu") -> Row:
    """Return parts as one packed row. Their response tokens keep their order."""
    from asyncspec.models.packed import row_of  # loads torchtitan

    responses = [np.split(part.arrays["tokens"], np.cumsum(part.arrays["lengths"])[:-1]) for part in parts]
    experts = [part.experts for part in parts if "experts" in part.arrays]
    return row_of([part.prompt for part in parts], responses, device, experts)


def to_message(step: int, parts: Sequence[Part], last: bool = True) -> tuple[Pass, Arrays]:
    """Return a pass as a message; `from_message` turns it back."""
    arrays = {name: np.concatenate([part.arrays[name] for part in parts]) for name in parts[0].arrays} if parts else {}
    responses = [len(part.arrays["lengths"]) for part in parts]
    return Pass(step, [part.prompt for part in parts], responses, last), arrays


def from_message(message: Pass, arrays: Arrays) -> list[Part]:
    if not message.prompts:
        return []
    ends = np.cumsum(message.responses)[:-1]
    token_ends = np.cumsum(arrays["lengths"])[np.cumsum(message.responses) - 1][:-1]
    prompt_ends = np.cumsum([len(prompt) for prompt in message.prompts])[:-1]
    at = dict.fromkeys(PER_RESPONSE, ends) | dict.fromkeys(PER_PROMPT_TOKEN, prompt_ends)
    pieces = {n: np.split(array, at.get(n, token_ends)) for n, array in arrays.items()}
    return [Part(prompt, {n: each[i] for n, each in pieces.items()}) for i, prompt in enumerate(message.prompts)]


def divide(part: Part, most_tokens: int) -> list[Part]:
    """Divide a part into parts of consecutive responses. Each has at most most_tokens, or a single response."""
    first, tokens, cuts = 0, len(part.prompt), []
    for index, length in enumerate(part.arrays["lengths"]):
        if index > first and tokens + length > most_tokens:
            cuts.append(range(first, index))
            first, tokens = index, len(part.prompt)
        tokens += int(length)
    return [part.of(list(cut)) for cut in (*cuts, range(first, len(part.arrays["lengths"])))]


@dataclass
class _Bin:
    """A pass that is being filled: of each part, by its index, the chosen responses."""

    tokens: int = 0
    chosen: dict[int, list[int]] = field(default_factory=dict)

    def cost(self, index: int, part: Part, response: int) -> int:
        return int(part.arrays["lengths"][response]) + (0 if index in self.chosen else len(part.prompt))

    def put(self, index: int, part: Part, response: int) -> None:
        self.tokens += self.cost(index, part, response)
        self.chosen.setdefault(index, []).append(response)


def place(parts: Sequence[Part], bins: int, most_tokens: int) -> tuple[list[list[Part]], list[Part]]:
    """Distribute responses over passes so that the passes are of about the same size.

    Parts stay whole where they fit; otherwise their responses are placed one by one, the longest first.

    Args:
        bins: number of passes.
        most_tokens: tokens of a pass. A longer response has a pass alone.

    Returns:
        The passes, the largest first, each a list of parts; and the parts that found no place.
    """
    filled, left = [_Bin() for _ in range(bins)], []
    for index in sorted(range(len(parts)), key=lambda i: -parts[i].tokens):
        part, lightest = parts[index], min(filled, key=lambda b: b.tokens)
        lengths = part.arrays["lengths"]
        if lightest.tokens + part.tokens <= most_tokens:
            for response in range(len(lengths)):
                lightest.put(index, part, response)
            continue
        remaining = []
        for response in sorted(range(len(lengths)), key=lambda r: -lengths[r]):
            fitting = [b for b in filled if not b.tokens or b.tokens + b.cost(index, part, response) <= most_tokens]
            sharing = [b for b in fitting if index in b.chosen]
            if fitting:
                min(sharing or fitting, key=lambda b: b.tokens).put(index, part, response)
            else:
                remaining.append(response)
        if remaining:
            left.append(part.of(sorted(remaining)))
    filled.sort(key=lambda b: -b.tokens)
    return [[parts[i].of(sorted(b.chosen[i])) for i in sorted(b.chosen)] for b in filled], left


class Pool:
    """Parts that wait until a round of passes is full. A round is one pass of each data rank.

    Which responses share a pass follows from the order of the parts alone, so a run can be repeated.
    """

    def __init__(self, ranks: int, most_tokens: int) -> None:
        """
        Args:
            ranks: number of data ranks.
            most_tokens: tokens of a pass, with each prompt counted once.
        """
        self.ranks, self.most_tokens = ranks, most_tokens
        self._waiting: list[Part] = []

    def add(self, part: Part) -> list[list[list[Part]]]:
        """Add a part. Return the rounds that are full."""
        self._waiting.append(part)
        rounds = []
        while sum(part.tokens for part in self._waiting) >= self.ranks * self.most_tokens:
            passes, self._waiting = place(self._waiting, self.ranks, self.most_tokens)
            rounds.append(passes)
        return rounds

    def flush(self) -> list[list[list[Part]]]:
        """Return the rest as rounds of about the same size. Some passes of the last round may be empty."""
        rounds: list[list[list[Part]]] = []
        while self._waiting:
            tokens = sum(part.tokens for part in self._waiting)
            count = self.ranks * -(-tokens // (self.ranks * self.most_tokens))
            # Room for unevenness, so that few responses are left over.
            most = min(self.most_tokens, int(1.1 * tokens / count) + 1)
            passes, self._waiting = place(self._waiting, count, most)
            rounds += [passes[first : first + self.ranks] for first in range(0, count, self.ranks)]
        return rounds

    def clear(self) -> None:
        self._waiting = []
