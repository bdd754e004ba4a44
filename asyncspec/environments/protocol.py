"""The Environment protocol: what an episode asks of the user's code.

An episode is one conversation with one environment, which is made for it and closed at its end:

    reset(row)        -> messages                  the beginning
    step(message)     -> messages, done, reward    what the policy said -> what it gets to read
    step(message)     -> [], True, 1.0
    close()

All three may be async functions or plain ones. They run in a process of their own, beside those of other episodes.

An environment may have two attributes more. `tools` lists the JSON schemas of its tools, for the chat template; it is
read after `reset`. `tool` names the tool that the last `step` called, for the reports; "": none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol

Message = dict[str, Any]  # with role and content, as chat templates take them
Stepped = tuple[Sequence[Message], bool, float | None]


class Service(Protocol):
    """What plays an episode by itself, and asks the policy over HTTP. It has `run` in the place of the three."""

    async def run(self, row: Mapping[str, Any], endpoint: Mapping[str, str]) -> float | None:
        """Play an episode.

        Args:
            row: the row of the data.
            endpoint: base_url, api_key and model, for OpenAI's clients. All requests with this key are turns of one
                conversation.

        Returns:
            The episode's reward; None: 0, or that of data.reward.
        """
        ...


class Environment(Protocol):
    def reset(self, row: Mapping[str, Any]) -> Sequence[Message] | None | Awaitable[Sequence[Message] | None]:
        """Begin an episode.

        Args:
            row: the row of the data, with its prompt and answer.

        Returns:
            The messages that the conversation begins with; None: the row's prompt.
        """
        ...

    def step(self, message: Message) -> Stepped | Awaitable[Stepped]:
        """Take what the policy said: {"role": "assistant", "content": text}.

        Returns:
            What the policy reads next; whether the episode is over; and a reward, or None. An episode's reward is the
            sum of these, or that of data.reward if the environment gives none.
        """
        ...

    def close(self) -> None | Awaitable[None]:
        """Free what the episode holds."""
        ...
