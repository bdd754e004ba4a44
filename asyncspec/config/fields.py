"""Fields of nested dataclasses: what `knob` says of one, and how a dotted name ("trainer.optimizer.lr") finds it.

A field's default, help and bounds stand in one place, its `knob`; `describe` reads them for --help, `refusal` for the
check.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Sequence
from typing import Any

# More than any run needs. A number beyond it is a slip, which would ask for endless time or for all memory.
_MOST_COUNTED, _MOST_SECONDS, _MOST_MEASURED = 10**6, 1e7, 1e9


def knob(
    default: Any,
    help: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A dataclass field with its help and bounds in its metadata.

    Args:
        least, most: bounds that the value may reach.
        above, below: bounds that it may not reach.
        choices: the values of a string that is one of a few.
    """
    metadata = {"help": help, "least": least, "above": above, "most": most, "below": below, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


def leaves(tree: Any, prefix: str = "") -> list[str]:
    """Dotted names of what is in nested mappings."""
    if not isinstance(tree, dict) or (not tree and prefix):
        return [prefix]
    return [leaf for key, value in tree.items() for leaf in leaves(value, f"{prefix}.{key}" if prefix else str(key))]


def value_of(config: Any, key: str) -> Any:
    """The value of the field that a dotted name names."""
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


def describe(cls: type, prefix: str = "") -> list[tuple[str, Any, typing.Mapping[str, Any]]]:
    """Every field of a dataclass and of those nested in it: (dotted name, default, metadata)."""
    found, hints = [], typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            found += describe(typing.cast(type, hints[field.name]), f"{prefix}{field.name}.")
        else:
            found.append((prefix + field.name, field.default, field.metadata))
    return found


def refusal(value: Any, default: Any, metadata: typing.Mapping[str, Any], seconds: bool) -> tuple[str, Any] | None:
    """What is wrong with a field's value by its own bounds: (what was expected, the nearest valid choice), or None.

    Args:
        seconds: whether it is a time.
    """
    if choices := metadata["choices"]:
        return None if value in choices else ("one of " + ", ".join(choices), closest(str(value), choices) or default)
    if type(value) not in (int, float):
        return None
    if not math.isfinite(value):
        return "a finite number", default
    least, above, most, below = (metadata[name] for name in ("least", "above", "most", "below"))
    if most is None and below is None:
        most = _MOST_COUNTED if isinstance(value, int) else _MOST_SECONDS if seconds else _MOST_MEASURED
        if value > most:
            return f"at most {most}", most
    low = f"at least {least}" if least is not None else f"more than {above}" if above is not None else ""
    high = f"at most {most}" if metadata["most"] is not None else f"below {below}" if below is not None else ""
    held = (
        (least is None or value >= least)
        and (above is None or value > above)
        and (most is None or value <= most)
        and (below is None or value < below)
    )
    if held:
        return None
    too_high = most is not None and value > most
    nearest = most if too_high else least if least is not None and value < least else default
    return " and ".join(filter(None, (low, high))), nearest


def closest(value: str, choices: Sequence[str]) -> str | None:
    """The choice most like what was given, if any is like it."""
    return next(iter(difflib.get_close_matches(value, choices, 1, 0.4)), None)


def hint(value: str, choices: Sequence[str]) -> str:
    """The end of a line that refuses a value: "; nearest: CHOICE", or nothing if none is like it."""
    nearest = closest(value, choices)
    return f"; nearest: {nearest}" if nearest else ""
