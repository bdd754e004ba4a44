"""Fields of nested dataclasses by dotted names ("trainer.optimizer.lr"): which there are, their values, types and
comments, and which choice is meant by one that is not.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Sequence
from typing import Any


def leaves(tree: Any, prefix: str = "") -> list[str]:
    """Dotted names of what is in nested mappings."""
    if not isinstance(tree, dict) or (not tree and prefix):
        return [prefix]
    return [leaf for key, value in tree.items() for leaf in leaves(value, f"{prefix}.{key}" if prefix else str(key))]


def value_of(config: Any, key: str) -> Any:
    """The field that a dotted name names."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def type_of(cls: Any, key: str) -> Any:
    """The type of the field that a dotted name names.

    Raises:
        KeyError: there is none.
    """
    for part in key.split("."):
        cls = typing.get_type_hints(cls)[part]
    return cls


def describe(cls: type) -> list[tuple[str, Any, str]]:
    """Every field of a dataclass as (dotted name, default, comment), for --help."""
    comments, defaults = _comments(cls), cls()
    return [(name, value_of(defaults, name), comments.get(name, "")) for name in leaves(dataclasses.asdict(defaults))]


def _comments(of: type) -> dict[str, str]:
    """The comment after each field of a dataclass, by dotted name: the source is the documentation."""
    import inspect

    found: dict[str, str] = {}

    def walk(cls: type, prefix: str) -> None:
        hints = typing.get_type_hints(cls)
        for line in inspect.getsource(cls).splitlines():
            name = line.strip().split(":")[0]
            if name in hints and line.startswith("    ") and not line.startswith("     "):
                found[prefix + name] = line.split("  # ", 1)[1] if "  # " in line else ""
        for name, hint in hints.items():
            if dataclasses.is_dataclass(hint):
                walk(hint, f"{prefix}{name}.")

    walk(of, "")
    return found


def closest(value: str, choices: Sequence[str]) -> str | None:
    """The choice most like what was given, if any is like it."""
    return next(iter(difflib.get_close_matches(value, choices, 1, 0.4)), None)


def hint(value: str, choices: Sequence[str]) -> str:
    """The end of a line that refuses a value: "; nearest: CHOICE", or nothing if none is like it."""
    nearest = closest(value, choices)
    return f"; nearest: {nearest}" if nearest else ""
