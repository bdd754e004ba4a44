"""The tasks of reasoning-gym as environments of one turn: the row's problem, then the score of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reasoning_gym import get_score_answer_fn  # noqa: F401  so that a missing package is found at the start

from asyncspec.environments.protocol import Message, Stepped
from asyncspec.tasks.builtin import reasoning_gym


class OneTurn:
    """An episode about a row with reasoning-gym's columns: question, answer and metadata."""

    def reset(self, row: Mapping[str, Any]) -> None:
        self.row = {name: [row[name]] for name in ("question", "answer", "metadata")}

    def step(self, message: Message) -> Stepped:
        return [], True, reasoning_gym([message["content"]], **self.row)[0]

    def close(self) -> None:
        pass
