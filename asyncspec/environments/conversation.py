"""A conversation as tokens: what an episode has sampled and read so far. Tokens are only ever appended.

    tokens      p p p p | a a a e | t t t t | a a e
    sampled     0 0 0 0   1 1 1 1   0 0 0 0   1 1 1
    versions              4 4 5 5             5 5 5

Shape suffixes: T response tokens, from the first one on that the policy sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from asyncspec.environments.protocol import Message

NO_VERSION = -1  # of a token that nobody sampled


class Turn(NamedTuple):
    """What the policy sampled in one turn: int32, float32 and int32 [T], and whether the length limit ended it."""

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    truncated: bool


@dataclass
class Conversation:
    """
    beginning: text, or the messages so far.
    prompt: its tokens.
    """

    beginning: str | list[Message]
    prompt: list[int]
    turns: list[Turn] = field(default_factory=list)
    read: list[list[int]] = field(
        default_factory=list
    )  # tokens that the environment added, after each turn but the last

    @property
    def tokens(self) -> list[int]:
        """All tokens, which the next turn begins with."""
        return [*self.prompt, *self.response()]

    def response(self) -> list[int]:
        """The tokens after the prompt."""
        found: list[int] = []
        for number, turn in enumerate(self.turns):
            found += turn.tokens.tolist()
            if number < len(self.read):
                found += self.read[number]
        return found

    def sampled(self, turn: Turn) -> None:
        """Append a turn of the policy."""
        if len(self.read) != len(self.turns):
            raise ValueError("the environment has not answered the turn before")
        self.turns.append(turn)

    def answered(self, tokens: Sequence[int], text: str, messages: Sequence[Message]) -> None:
        """Append what an environment has said about the last turn.

        Args:
            tokens: of its messages, see `Renderer.follow`.
            text: what the policy had said.
        """
        if len(self.read) + 1 != len(self.turns):
            raise ValueError("there is no turn to answer")
        self.read.append(list(tokens))
        if not isinstance(self.beginning, str):
            self.beginning = [*self.beginning, {"role": "assistant", "content": text}, *messages]

    def arrays(self, shared: int) -> dict[str, np.ndarray]:
        """Return the conversation as a response of a group: tokens, versions int32 [T], behavior float32 [T], loss_mask
        uint8 [T], see `wire.messages.Group`. It ends with the last turn.

        Args:
            shared: how many tokens of the prompt the whole group has in common. The others are part of the response.
        """
        pieces: list[tuple[Sequence[int] | np.ndarray, Turn | None]] = [(self.prompt[shared:], None)]
        for number, turn in enumerate(self.turns):
            pieces.append((turn.tokens, turn))
            if number + 1 < len(self.turns):
                pieces.append((self.read[number], None))
        tokens, behavior, versions, mask = [], [], [], []
        for piece, turn in pieces:
            count = len(piece)
            tokens.append(np.asarray(piece, dtype=np.int32))
            behavior.append(np.zeros(count, np.float32) if turn is None else turn.logprobs.astype(np.float32))
            versions.append(np.full(count, NO_VERSION, np.int32) if turn is None else turn.versions.astype(np.int32))
            mask.append(np.full(count, turn is not None, np.uint8))
        names = ("tokens", "behavior", "versions", "loss_mask")
        return {name: np.concatenate(each) for name, each in zip(names, (tokens, behavior, versions, mask))}


def common(prompts: Sequence[Sequence[int]]) -> int:
    """Return how many tokens all prompts begin with."""
    shortest = min(map(len, prompts))
    for at in range(shortest):
        if any(prompt[at] != prompts[0][at] for prompt in prompts):
            return at
    return shortest
