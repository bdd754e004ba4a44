"""What must hold of the environment that a configuration names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any

from asyncspec.config.schema import Config
from asyncspec.config.sections import ENVIRONMENTS

_FORM = re.compile(
    r"python|reasoning_gym|skyrl_gym:\w+|openenv:https?://\S+|(?!openenv:|skyrl_gym:)[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*(\.\w+)*"
)
_KNOWN = ("python", "reasoning_gym", "skyrl_gym:gsm8k", "openenv:http://127.0.0.1:8000", "my_module:Environment")


def rules(config: Config) -> Iterator[tuple[bool, str, str, Any]]:
    """Yield rules: whether the configuration keeps it, the field, what was expected, and the nearest valid choice."""
    c, kind = config.environment, config.engine.kind
    if not c.name:
        return
    nearest = difflib.get_close_matches(c.name, _KNOWN, 1, 0.0)[0]
    yield _FORM.fullmatch(c.name) is not None, "environment.name", f"{ENVIRONMENTS}, or nothing", nearest
    yield kind != "mock", "environment.name", "empty with engine.kind=mock: what a mock samples means nothing", "''"
    several = config.deployment.generators > 1
    why = f"0 with deployment.generators={config.deployment.generators}: each generator has a port of its own"
    yield c.port == 0 or not several, "environment.port", why, 0
    held, why = c.name != "python" or c.reward_from == "data.reward", "data.reward with environment.name=python"
    yield held, "environment.reward_from", f"{why}, which gives no rewards", "data.reward"
    yield bool(c.host.strip()), "environment.host", "an address of the generators' hosts", "127.0.0.1"
    held, most = c.turn_timeout_s <= c.episode_timeout_s, f"{c.episode_timeout_s:g}"
    yield held, "environment.turn_timeout_s", f"at most environment.episode_timeout_s={most}", most
