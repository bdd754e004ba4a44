"""Load problems from JSONL files or the built-in task.

Each line of a JSONL file is an object with "prompt" and "answer", both strings. A run may have a million lines, so
reading one takes about two microseconds.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import TypeVar

import msgspec
import numpy as np

from asyncspec.config import Config, resolve_path
from asyncspec.tasks.problem import Problem
from asyncspec.tasks.sums import sums

Line = TypeVar("Line", bound=msgspec.Struct)


def load_problems(config: Config) -> tuple[list[Problem], list[Problem]]:
    """Return the problem of each training ticket, in order, and the held-out problems.

    The order depends on the seed alone, so a longer run begins like a shorter one.

    Raises:
        ValueError: there are no problems, or a file cannot be read. The message is one line that names the field.
    """
    data = config.data
    if data.train_file:
        problems = load_jsonl("data.train_file", data.train_file)
        held_out = load_jsonl("data.eval_file", data.eval_file) if data.eval_file else []
    else:
        held_out = sums(config.seed + 1_000_003, data.eval_prompts)
        seen = {p.prompt for p in held_out}
        problems = [p for p in sums(config.seed, data.train_prompts) if p.prompt not in seen]
    if not problems:
        raise ValueError(
            f"data.train_prompts={data.train_prompts}: all of these prompts are held out; expected a larger number"
        )
    rng, needed = np.random.default_rng([config.seed, 0x7072]), config.steps * config.rl.groups_per_step
    order = np.concatenate([rng.permutation(len(problems)) for _ in range(-(-needed // len(problems)))])
    return [problems[i] for i in order[:needed]], held_out


def load_jsonl(field: str, path: str) -> list[Problem]:
    """Load problems from a JSONL file.

    Args:
        field: the configuration field that holds `path`, for messages.

    Raises:
        ValueError: see `read_jsonl`; or the file has no problem.
    """
    problems = list(read_jsonl(f"{field}={path!r}", path, Problem))
    if not problems:
        raise ValueError(f"{field}={path!r}: the file is empty; expected JSONL with prompt and answer on each line")
    return problems


def read_jsonl(name: str, path: str, kind: type[Line]) -> Iterator[Line]:
    """Yield the objects of a JSONL file. Empty lines are skipped.

    Args:
        name: what the user calls the file, for messages.
        kind: a struct of string fields. Every object must have them all; the first must not be empty.

    Raises:
        ValueError: the file cannot be read, or a line is not such an object, or is not valid UTF-8. The message names
            the line.
    """
    decode, first = msgspec.json.Decoder(kind).decode, kind.__struct_fields__[0]
    try:
        with open(resolve_path(path), "rb") as lines:
            for number, line in enumerate(lines, 1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.isspace():
                    continue
                try:
                    item = decode(line)
                    if not getattr(item, first) or not (line.isascii() or line.decode()):
                        raise ValueError
                except (msgspec.MsgspecError, ValueError, RecursionError):
                    item = _read_slowly(f"{name}: line {number}", line, kind)
                yield item
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror or error}; expected a JSONL file that can be read") from None


def _read_slowly(name: str, line: bytes, kind: type[Line]) -> Line:
    """Read a line that msgspec refuses. Python's own parser takes NaN, which Python writes, and tells what is wrong.

    Raises:
        ValueError: see `read_jsonl`.
    """
    fields, text = kind.__struct_fields__, line.decode(errors="surrogateescape")
    try:
        text.encode()
        found = json.loads(text)
        values = [found[field] for field in fields]
        if not all(isinstance(value, str) for value in values) or not values[0]:
            raise TypeError
        "".join(values).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name}: expected UTF-8, without half a surrogate pair; got {error.object[error.start]!r}"
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        plural = "strings" if len(fields) > 1 else "string"
        raise ValueError(
            f"{name}: expected an object with the {plural} {' and '.join(fields)}, got {text.strip()[:60]!r}"
        ) from None
    return kind(*values)
