"""Load problems from JSONL files or the built-in task, and check them.

Each line of a JSONL file is an object with "prompt" and "answer", both strings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from asyncspec.config import Config
from asyncspec.tasks.problem import Problem
from asyncspec.tasks.sums import sums


def load_problems(config: Config, tokenizer) -> tuple[list[Problem], list[Problem]]:
    """Return the problems to train on and the held-out problems.

    Raises:
        ValueError: there are no problems, a line of a file is malformed, or a prompt does not fit. The message is one
            line that names the field.
    """
    data, limit = config.data, config.engine.max_prompt_tokens
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
    longest = max([*problems, *held_out], key=lambda p: len(tokenizer.encode(p.prompt).ids)).prompt
    if (count := len(tokenizer.encode(longest).ids)) > limit:
        raise ValueError(
            f"engine.max_prompt_tokens={limit}: the longest prompt, {longest[:40]!r}, has {count} tokens; "
            f"nearest valid choice: engine.max_prompt_tokens={count}"
        )
    if empty := [p.prompt for p in [*problems, *held_out] if not tokenizer.encode(p.prompt).ids]:
        raise ValueError(f"prompt {empty[0][:40]!r}: has no token that the policy knows; expected at least one")
    return problems, held_out


def lost_characters(problems: list[Problem], tokenizer) -> str:
    """Return one line about prompts with characters that the tokenizer drops; "" if there are none."""
    lossy = [p.prompt for p in problems if set(p.prompt) - set(tokenizer.decode(tokenizer.encode(p.prompt).ids))]
    if not lossy:
        return ""
    kept = tokenizer.decode(tokenizer.encode(lossy[0]).ids)
    return (
        f"{len(lossy)} prompts have characters that the tokenizer does not know: the policy gets {lossy[0][:40]!r} as "
        f"{kept[:40]!r}"
    )


def load_jsonl(field: str, path: str) -> list[Problem]:
    """Load problems from a JSONL file.

    Args:
        field: the configuration field that holds `path`, for messages.

    Raises:
        ValueError: see `read_jsonl`; or the file has no problem.
    """
    problems = [
        Problem(item["prompt"], item["answer"]) for item in read_jsonl(f"{field}={path!r}", path, ("prompt", "answer"))
    ]
    if not problems:
        raise ValueError(f"{field}={path!r}: the file is empty; expected JSONL with prompt and answer on each line")
    return problems


def read_jsonl(name: str, path: str, fields: Sequence[str]) -> Iterator[dict]:
    """Yield the objects of a JSONL file. Empty lines are skipped.

    Args:
        name: what the user calls the file, for messages.
        fields: names of the string fields that every object must have; the first must not be empty.

    Raises:
        ValueError: a line is not such an object, or is not valid UTF-8. The message names the line.
    """
    with open(path, encoding="utf-8", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                item = json.loads(line)
                if not all(isinstance(item[field], str) for field in fields) or not item[fields[0]]:
                    raise TypeError
                "".join([line, *(item[field] for field in fields)]).encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"{name}: line {number}: expected UTF-8, without half a surrogate pair; got "
                    f"{error.object[error.start]!r}"
                ) from None
            except (ValueError, KeyError, TypeError, RecursionError):
                plural = "strings" if len(fields) > 1 else "string"
                raise ValueError(
                    f"{name}: line {number}: expected an object with the {plural} {' and '.join(fields)}, "
                    f"got {line.strip()[:60]!r}"
                ) from None
            yield item
