"""Makes the environments that environment.name names: the user's own, or those of other libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncspec.environments.protocol import Environment
from asyncspec.tasks.importing import import_function

EXAMPLE = "my_module:Environment"


def maker(name: str) -> Callable[[], Environment]:
    """Return a function that makes an environment for an episode.

    Args:
        name: as environment.name.

    Raises:
        ValueError: it cannot be made. The message is one line.
    """
    library, _, rest = name.partition(":")
    try:
        if name == "python":
            from asyncspec.environments.python_tool import PythonTool

            return PythonTool
        if name == "reasoning_gym":
            from asyncspec.environments.reasoning_gym import OneTurn

            return OneTurn
        if library == "skyrl_gym":
            from asyncspec.environments.skyrl_gym import maker as of_skyrl

            return of_skyrl(rest)
        if library == "openenv":
            from asyncspec.environments.openenv import OpenEnv

            return lambda: OpenEnv(rest)
    except ImportError as error:
        extra = "tasks" if name == "reasoning_gym" else "environments"
        raise ValueError(
            f"environment.name={name!r}: {error}; expected what `pip install 'asyncspec[{extra}]'` brings"
        ) from None
    factory = import_function("environment.name", name, EXAMPLE)
    return lambda: adapted(factory(), name)


def adapted(made: Any, name: str) -> Environment:
    """Return what a factory has made as an environment: it is one, or it has tools by method, as TRL's have.

    Raises:
        ValueError: it is neither.
    """
    if callable(getattr(made, "run", None)):  # it asks the policy itself, see protocol.Service
        return made
    if not callable(getattr(made, "reset", None)):
        raise ValueError(
            f"environment.name={name!r}: {type(made).__name__} has neither reset nor run; expected {EXAMPLE}"
        )
    if callable(getattr(made, "step", None)):
        return made
    from asyncspec.environments.trl import ToolsByMethod

    adapted = ToolsByMethod(made)
    if not adapted.tools:
        raise ValueError(
            f"environment.name={name!r}: {type(made).__name__} has no method step, and no other public method, which "
            f"would be a tool; expected {EXAMPLE}"
        )
    return adapted
