"""Tasks: where prompts come from, what a right answer is, and the demonstrations a policy is warmed up on.

The built-in task "sums" is made from a seed. A prompt is a sum of many small numbers, "8+7+5="; a worked response carries a
running total, "8+7=15,15+5=20,#20", and what follows '#' is the answer. The number of terms is 2 + a log-normal, so most
responses are short and some have hundreds of tokens.

Any other data comes as JSONL with "prompt" and "answer"; any other reward as `module:function`, called as
`reward(prompt: str, response: str, answer: str) -> float`.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import numpy as np

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


def load_jsonl(path: str | Path) -> list[Problem]:
    """Problems from JSONL.

    Raises:
        ValueError: a line is not an object with string "prompt" and "answer"; names the line.
    """
    problems = []
    with open(path) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                item = json.loads(line)
                problem = Problem(item["prompt"], item["answer"])
                if not (isinstance(problem.prompt, str) and isinstance(problem.answer, str) and problem.prompt):
                    raise TypeError
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{path}, line {number}: expected an object with the strings prompt and answer, "
                                 f"got {line.strip()[:60]!r}") from None
            problems.append(problem)
    if not problems:
        raise ValueError(f"{path}: no problems in the file")
    return problems


def load_reward(path: str) -> Reward:
    """The reward function that `module:function` names.

    Raises:
        ValueError: the path has another form, or names nothing that can be called.
    """
    module_name, colon, name = path.partition(":")
    try:
        reward = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"data.reward={path!r}: {error}; expected module:function, "
                         "for example asyncspec.rl.tasks:exact_match") from None
    if not colon or not callable(reward):
        raise ValueError(f"data.reward={path!r}: expected module:function that can be called")
    return reward
