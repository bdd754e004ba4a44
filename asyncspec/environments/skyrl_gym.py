"""The environments of skyrl-gym, by their names there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import skyrl_gym

from asyncspec.environments.protocol import Message, Stepped


class OfSkyRL:
    def __init__(self, name: str) -> None:
        self.name, self.made = name, None

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        answer = {"reward_spec": {"ground_truth": row.get("answer", "")}}
        self.made = skyrl_gym.make(self.name, env_config=None, extras={**answer, **row})
        prompt = row["prompt"]
        messages, _ = self.made.init(prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}])
        return messages

    def step(self, message: Message) -> Stepped:
        found = self.made.step(message["content"])
        return found["observations"], found["done"], found["reward"]

    def close(self) -> None:
        if self.made is not None:
            self.made.close()


def maker(name: str) -> Callable[[], OfSkyRL]:
    """Return a function that makes environments of this name.

    Raises:
        ValueError: skyrl-gym has none.
    """
    if name not in (known := sorted(skyrl_gym.registry)):
        raise ValueError(f"environment.name='skyrl_gym:{name}': expected skyrl_gym:NAME with one of {', '.join(known)}")
    return lambda: OfSkyRL(name)
