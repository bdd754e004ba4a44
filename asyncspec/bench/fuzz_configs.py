"""Damaged configurations for `bench fuzz`: values of other types or out of range, and misspelled field names."""

from __future__ import annotations

from typing import Any

import numpy as np
import yaml

from asyncspec import config as configuration
from asyncspec.config.fields import describe, value_of
from asyncspec.errors import UserError

COUNTS = ("tried", "refused", "accepted", "crashes", "silent", "lost")
_VALUES = (
    "",
    "x",
    "-1",
    "0",
    "1",
    "1.5",
    "1e400",
    "nan",
    "inf",
    "-inf",
    "true",
    "null",
    "[]",
    "{}",
    "[1, 2]",
    "{a: 1}",
    "0x10",
    "1_000",
    "1e-9",
    "9" * 30,
    "'1'",
    "~",
    "../..",
    "/nonexistent",
    "none",
    "auto",
    "é",
    "a b",
    "a=b",
    "${seed}",
    "???",
    "!!python/object:os.system {}",
)


def fuzz_configs(rng: np.random.Generator, count: int) -> dict[str, float]:
    """Load configurations with damaged names and values; return how many had each outcome."""
    counts = dict.fromkeys(COUNTS, 0)
    names = [name for name, _, _ in describe(configuration.Config)]
    for _ in range(count):
        name, text = str(rng.choice(names)), str(rng.choice(_VALUES))
        misspelt = rng.random() < 0.25
        if misspelt:
            at = int(rng.integers(len(name)))
            name = (name[:at] + name[at + 1 :], name[:at] + "q" + name[at:], name.upper())[int(rng.integers(3))]
        counts["tried"] += 1
        try:
            loaded = configuration.load("tiny", [f"{name}={text}"])
        except UserError as error:
            counts["refused"] += 1
            counts["silent"] += "\n" in str(error) or not str(error)
            continue
        except Exception:
            counts["crashes"] += 1
            continue
        counts["accepted"] += 1
        value = value_of(loaded, name) if name in names else None
        counts["silent"] += (name not in names) or not same(value, text)
    return counts


def same(value: Any, text: str) -> bool:
    """Whether a field's value is what its text says."""
    if text.startswith("${"):  # it stands for another field's value
        return True
    if isinstance(value, str):
        return value == text
    said = yaml.safe_load(text)
    if isinstance(said, str):  # YAML 1.1 reads 1e-9 as a string
        try:
            said = float(said)
        except ValueError:
            return False
    return (
        type(said) in (int, float, bool)
        and isinstance(said, bool) == isinstance(value, bool)
        and value == type(value)(said)
    )
