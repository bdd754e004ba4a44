"""Reward functions: `module:function`, called as `reward(prompt: str, response: str, answer: str) -> float`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable

from asyncspec.errors import first_line

Reward = Callable[[str, str, str], float]


def load_reward(path: str) -> Reward:
    """The reward function that `module:function` names.

    Raises:
        ValueError: the path has another form, or names nothing that can be called.
    """
    module_name, colon, name = path.partition(":")
    if os.getcwd() not in sys.path:  # where the user is; installed commands do not have it
        sys.path.append(os.getcwd())
    try:
        reward = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # whatever the user's module raises when it is imported
        raise ValueError(
            f"data.reward={path!r}: {first_line(error)}; expected "
            f"module:function, for example asyncspec.tasks.sums:exact_match"
        ) from None
    if not colon or not callable(reward):
        raise ValueError(f"data.reward={path!r}: expected module:function that can be called")
    return reward
