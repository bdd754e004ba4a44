"""Load the reward function that `module:function` names.

It is called as `reward(prompt: str, response: str, answer: str) -> float`.
"""

from __future__ import annotations

import importlib
import inspect
import operator
import os
import sys
from collections.abc import Callable

from asyncspec.errors import first_line

Reward = Callable[[str, str, str], float]
_LATER = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


def load_reward(path: str) -> Reward:
    """Import and return the reward function that `module:function` names.

    Raises:
        ValueError: the path does not have this form, the import fails, or what it names cannot be called.
    """
    module_name, colon, name = path.partition(":")
    if os.getcwd() not in sys.path:  # the user's directory; installed commands do not have it on the path
        sys.path.append(os.getcwd())
    try:
        reward = operator.attrgetter(name)(importlib.import_module(module_name))
    except BaseException as error:  # importing the user's module may raise anything, SystemExit too
        raise ValueError(
            f"data.reward={path!r}: {type(error).__name__}: {first_line(error)}; expected "
            f"module:function, for example asyncspec.tasks.sums:exact_match"
        ) from None
    if not colon or not callable(reward):
        raise ValueError(f"data.reward={path!r}: expected module:function, naming something that can be called")
    for function in (inspect.unwrap(reward), type(reward).__call__):
        if any(is_such(function) for is_such in _LATER):
            raise ValueError(
                f"data.reward={path!r}: is an async function or a generator; expected one that returns the reward"
            )
    try:
        inspect.signature(reward).bind("", "", "")
    except TypeError as error:
        raise ValueError(
            f"data.reward={path!r}: cannot be called as reward(prompt, response, answer): {error}; expected a function "
            "of these three strings"
        ) from None
    except ValueError:  # a built-in function that does not tell its arguments
        pass
    return reward
