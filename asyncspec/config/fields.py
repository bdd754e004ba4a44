"""Fields of nested dataclasses: how `knob` declares one, and how a dotted name ("trainer.optimizer.lr") finds it.

A field's default, help text and bounds are in one place, its `knob`. `describe` reads them for --help, and `refusal`
reads them to check a value.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Sequence
from typing import Any

# Upper bounds for fields without one, above what any run needs. A larger number is a typing error that would take
# endless time or all memory.
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
    """Return a dataclass field with its help text and bounds in its metadata.

    Args:
        default: the field's default value.
        help: what the field is, its unit, and what 0 or an empty value means; printed by --help.
        least, most: inclusive bounds.
        above, below: exclusive bounds.
        choices: the allowed values of a string field; empty: any.
    """
    metadata = {"help": help, "least": least, "above": above, "most": most, "below": below, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


def leaves(tree: Any, prefix: str = "") -> list[str]:
    """Return the dotted names of all leaves of nested mappings."""
    if not isinstance(tree, dict) or (not tree and prefix):
        return [prefix]
    return [leaf for key, value in tree.items() for leaf in leaves(value, f"{prefix}.{key}" if prefix else str(key))]


def value_of(config: Any, key: str) -> Any:
    """Return the value of the field with this dotted name."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def type_of(cls: Any, key: str) -> Any:
    """Return the type of the field with this dotted name.

    Raises:
        KeyError: there is no such field.
    """
    for part in key.split("."):
        cls = typing.get_type_hints(cls)[part]
    return cls


def describe(cls: type, prefix: str = "") -> list[tuple[str, Any, typing.Mapping[str, Any]]]:
    """Return (dotted name, default, metadata) of every field of a dataclass and of its nested dataclasses."""
    found, hints = [], typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            found += describe(typing.cast(type, hints[field.name]), f"{prefix}{field.name}.")
        else:
            found.append((prefix + field.name, field.default, field.metadata))
    return found


def bounds(metadata: typing.Mapping[str, Any]) -> str:
    """Describe the valid values of a field, for --help."""
    if choices := metadata["choices"]:
        return f" [{', '.join(choices)}]"
    words = {"least": "at least", "above": "more than", "most": "at most", "below": "below"}
    found = [f"{word} {metadata[name]}" for name, word in words.items() if metadata[name] is not None]
    return f" [{', '.join(found)}]" if found else ""


def refusal(value: Any, default: Any, metadata: typing.Mapping[str, Any], seconds: bool) -> tuple[str, Any] | None:
    """Check a value against its field's choices and bounds.

    Args:
        metadata: the field's, as made by `knob`.
        seconds: whether the field is a time in seconds.

    Returns:
        None if the value is valid; else (what was expected, the nearest valid choice).
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
    """Return the choice most similar to `value`; None if none is similar."""
    return next(iter(difflib.get_close_matches(value, choices, 1, 0.4)), None)


def hint(value: str, choices: Sequence[str]) -> str:
    """Return the end of an error line: "; nearest: CHOICE", or "" if no choice is similar to `value`."""
    nearest = closest(value, choices)
    return f"; nearest: {nearest}" if nearest else ""
