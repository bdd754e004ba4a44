"""The sets of held-out prompts that `data.eval_file` names: NAME=PATH, separated by commas.

    data.eval_file=easy=sums/easy.jsonl,hard=sums/hard.jsonl
    data.eval_file=sums/easy.jsonl                             its name is that of its file: easy

What stands before "=" is a name if it has no "/" and no ":". A path whose first "=" comes before a "/" needs "./".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

NAME = re.compile(r"[A-Za-z0-9_-]+")


class EvalSet(NamedTuple):
    """A set of held-out prompts: its name, and its path or its name on a hub."""

    name: str
    path: str


def parse(text: str) -> list[EvalSet]:
    """Return the sets that a text names, in order. `fault` says whether their names can be used."""
    return [EvalSet(given or _stem(path), path) for given, path in _parts(text)]


def paths(text: str) -> str:
    """Return a text without the names: paths separated by commas, as `data_files` reads them."""
    return ",".join(path for _, path in _parts(text))


def mapped(text: str, change: Callable[[str], str]) -> str:
    """Return a text with each path changed, and the names kept."""
    return ",".join(f"{given}={change(path)}" if given else change(path) for given, path in _parts(text))


def fault(text: str) -> tuple[str, str] | None:
    """Return what was expected of the names and the nearest valid text; None if all names can be used."""
    sets = parse(text)
    if not all(each.path for each in sets):
        return "a file for each set", mapped(",".join(part for part in text.split(",") if paths(part)), str)
    if wrong := next((each.name for each in sets if not NAME.fullmatch(each.name)), None):
        nearest = ",".join(f"{_cleaned(each.name)}={each.path}" for each in sets)
        return f"names of letters, digits, - and _, not {wrong!r}", nearest
    counts = Counter(each.name for each in sets)
    if twice := next((name for name, count in counts.items() if count > 1), None):
        free: dict[str, str] = {}
        for each in sets:
            name, number = each.name, 2
            while name in free or (name != each.name and name in counts):
                name, number = f"{each.name}{number}", number + 1
            free[name] = each.path
        return f"another name for each set, not {twice!r} twice", ",".join(
            f"{name}={path}" for name, path in free.items()
        )
    return None


def _parts(text: str) -> list[tuple[str, str]]:
    """Return (given name or "", path) of each set."""
    found = []
    for part in map(str.strip, text.split(",")) if text else ():
        name, mark, path = map(str.strip, part.partition("="))
        found.append((name, path) if name and mark and not {"/", ":"} & {*name} else ("", part))
    return found


def _stem(path: str) -> str:
    file = path.rpartition("/")[2]
    return _cleaned(file.rpartition(".")[0] or file)


def _cleaned(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-") or "held-out"
