"""What must hold of the boards that a configuration names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any

from asyncspec.config.schema import Config
from asyncspec.config.showing import BACKENDS


def rules(config: Config) -> Iterator[tuple[bool, str, str, Any]]:
    """Yield rules: whether the configuration keeps it, the field, what was expected, and the nearest valid choice."""
    names, logging = config.logging.boards, config.logging
    expected = f"{', '.join(BACKENDS)}, separated by commas, each once; or none"
    nearest = [difflib.get_close_matches(name, BACKENDS, 1, 0.0)[0] for name in names]
    held = len(set(names)) == len(names) and all(name in BACKENDS for name in names)
    yield held, "logging.backends", expected, ",".join(dict.fromkeys(nearest))
    host, _, port = logging.prometheus.rpartition(":")
    held = not logging.prometheus or (bool(host) and port.isdecimal() and int(port) < 65536)
    yield held, "logging.prometheus", "HOST:PORT with a port below 65536, or nothing", "127.0.0.1:9400"
    for name, value, fallback in (
        ("logging.project", logging.project, "asyncspec"),
        ("logging.run_name", logging.run_name or "x", "''"),
    ):
        plain = re.sub(r"[^\w .-]+", "-", value).strip(" .")[:100] or fallback
        held = re.fullmatch(r"[\w-][\w .-]{0,99}", value) is not None
        yield held, name, "at most 100 letters, digits, spaces, dots, hyphens and underscores", plain
