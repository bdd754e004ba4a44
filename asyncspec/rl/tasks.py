"""Tasks: where prompts come from, what a right answer is, and the demonstrations a policy is warmed up on.

The built-in task "sums" is made from a seed. A prompt is a sum of many small numbers, "8+7+5="; a worked response
carries a running total, "8+7=15,15+5=20,#20", and what follows '#' is the answer. The number of terms is 2 + a
log-normal, so most responses are short and some have hundreds of tokens.

`general_prompts` are of other tasks, for drafts that know the policy but not the task.

Any other data comes as JSONL with "prompt" and "answer"; any other reward as `module:function`, called as
`reward(prompt: str, response: str, answer: str) -> float`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from asyncspec.config import Config

MAX_TERMS = 32
Reward = Callable[[str, str, str], float]


@dataclass(frozen=True)
class Problem:
    prompt: str
    answer: str


def sum_terms(rng: np.random.Generator) -> list[int]:
    count = min(MAX_TERMS, 2 + int(rng.lognormal(1.0, 0.8)))
    return [int(t) for t in rng.integers(1, 10, count)]


def sums(seed: int, count: int) -> list[Problem]:
    """`count` problems of the sums task; the same seed gives the same problems."""
    rng = np.random.default_rng([seed, 0x5375])
    problems = []
    for _ in range(count):
        terms = sum_terms(rng)
        problems.append(Problem("+".join(map(str, terms)) + "=", str(sum(terms))))
    return problems


def general_prompts(seed: int, count: int) -> list[str]:
    """Prompts of other tasks than sums, from a seed: what a draft of general purpose is trained on."""
    rng = np.random.default_rng([seed, 0x6765])

    def number(digits: int) -> str:
        return str(rng.integers(10 ** (digits - 1), 10**digits))

    def word() -> str:
        return "".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), int(rng.integers(2, 9))))

    kinds = (
        lambda: f"{number(int(rng.integers(1, 4)))}*{number(int(rng.integers(1, 3)))}=",
        lambda: f"{number(int(rng.integers(1, 5)))}-{number(int(rng.integers(1, 5)))}=",
        lambda: ",".join(number(int(rng.integers(1, 3))) for _ in range(rng.integers(2, 8))) + ";",
        lambda: "_".join(word() for _ in range(rng.integers(2, 6))) + "?",
        lambda: f"({number(1)}+{number(1)})*{number(1)}=",
        lambda: f"{word()}:{word()}|",
    )
    return [kinds[rng.integers(len(kinds))]() for _ in range(count)]


def worked_response(terms: list[int], rng: np.random.Generator, slip: float) -> str:
    """The worked steps of a sum. With probability `slip` a step's result is wrong, and the error is carried on."""
    parts, total = [], terms[0]
    for term in terms[1:]:
        result = total + term
        if rng.random() < slip:
            result = max(1, result + int(rng.choice([-10, -2, -1, 1, 2, 10])))
        parts.append(f"{total}+{term}={result},")
        total = result
    return "".join(parts) + f"#{total}"


def guessed_response(terms: list[int], rng: np.random.Generator) -> str:
    """An answer without working: near the truth, seldom right."""
    total = sum(terms)
    return f"#{max(1, int(round(rng.normal(total, 0.15 * total))))}"


def exact_match(prompt: str, response: str, answer: str) -> float:
    """1.0 if the text after the last '#' is the answer, else 0.0."""
    head, mark, tail = response.rpartition("#")
    return float(bool(mark) and tail.strip() == answer)


def load_problems(config: Config, tokenizer) -> tuple[list[Problem], list[Problem]]:
    """The problems to train on and the held-out ones.

    Raises:
        ValueError: there are none, a line of a file is malformed, or a prompt does not fit; one line that names the
            field.
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
            f"data.train_prompts={data.train_prompts}: no prompt is left that is not held out; expected more"
        )
    longest = max([*problems, *held_out], key=lambda p: len(tokenizer.encode(p.prompt).ids)).prompt
    if (count := len(tokenizer.encode(longest).ids)) > limit:
        raise ValueError(
            f"engine.max_prompt_tokens={limit}: the longest prompt, {longest[:40]!r}, has {count} tokens; "
            f"nearest valid choice: engine.max_prompt_tokens={count}"
        )
    if empty := [p.prompt for p in [*problems, *held_out] if not tokenizer.encode(p.prompt).ids]:
        raise ValueError(f"prompt {empty[0][:40]!r}: has no token the policy knows; expected at least one")
    return problems, held_out


def lost_characters(problems: list[Problem], tokenizer) -> str:
    """One line about prompts with characters that the tokenizer drops; empty if there are none."""
    lossy = [p.prompt for p in problems if set(p.prompt) - set(tokenizer.decode(tokenizer.encode(p.prompt).ids))]
    if not lossy:
        return ""
    kept = tokenizer.decode(tokenizer.encode(lossy[0]).ids)
    return (
        f"{len(lossy)} prompts have characters that the tokenizer does not know: {lossy[0][:40]!r} is read as "
        f"{kept[:40]!r}"
    )


def load_jsonl(field: str, path: str) -> list[Problem]:
    """Problems from JSONL, as `read_jsonl`.

    Raises:
        ValueError: as there, or there is none.
    """
    problems = [
        Problem(item["prompt"], item["answer"]) for item in read_jsonl(f"{field}={path!r}", path, ("prompt", "answer"))
    ]
    if not problems:
        raise ValueError(f"{field}={path!r}: the file is empty; expected JSONL with prompt and answer on each line")
    return problems


def read_jsonl(name: str, path: str, fields: Sequence[str]) -> Iterator[dict]:
    """The objects of a JSONL file; empty lines are passed over.

    Args:
        name: what the user called the file, for messages.
        fields: strings that every object must have; the first of them not empty.

    Raises:
        ValueError: a line is something else, or no text that can be written as UTF-8; names the line.
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


def load_reward(path: str) -> Reward:
    """The reward function that `module:function` names.

    Raises:
        ValueError: the path has another form, or names nothing that can be called.
    """
    module_name, colon, name = path.partition(":")
    if os.getcwd() not in sys.path:  # where the user is; installed commands do not have it
        sys.path.append(os.getcwd())
    try:
        reward = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # whatever the user's module raises when it is imported
        raise ValueError(
            f"data.reward={path!r}: {str(error).splitlines()[0] if str(error) else type(error).__name__}; expected "
            f"module:function, "
            "for example asyncspec.rl.tasks:exact_match"
        ) from None
    if not colon or not callable(reward):
        raise ValueError(f"data.reward={path!r}: expected module:function that can be called")
    return reward
