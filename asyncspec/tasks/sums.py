"""The built-in task "sums", made from a seed.

A prompt is a sum of small numbers, such as "8+7+5=". A worked response carries a running total, "8+7=15,15+5=20,#20".
The answer follows "#". The number of terms is 2 plus a log-normal number, so most responses are short and some have
hundreds of tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncspec.tasks.problem import Problem

if TYPE_CHECKING:
    import numpy as np

MAX_TERMS = 32


def sum_terms(rng: np.random.Generator) -> list[int]:
    count = min(MAX_TERMS, 2 + int(rng.lognormal(1.0, 0.8)))
    return [int(t) for t in rng.integers(1, 10, count)]


def sums(seed: int, count: int) -> list[Problem]:
    """Return `count` problems of the sums task. The same seed gives the same problems."""
    import numpy as np  # not for the rewards below, whose process starts sooner without

    rng = np.random.default_rng([seed, 0x5375])
    problems = []
    for _ in range(count):
        terms = sum_terms(rng)
        problems.append(Problem("+".join(map(str, terms)) + "=", str(sum(terms))))
    return problems


def exact_match(prompt: str, response: str, answer: str) -> float:
    """Return 1.0 if the text after the last '#' is the answer, else 0.0."""
    head, mark, tail = response.rpartition("#")
    return float(bool(mark) and tail.strip() == answer)


def parity(prompt: str, response: str, answer: str) -> float:
    """Return a reward that random weights earn about half of the time, so that there is something to train."""
    return float(len(response) % 2)


def sevens(prompt: str, response: str, answer: str) -> float:
    """Return the share of sevens in the response, which any policy with digits can learn from random weights."""
    return response.count("7") / max(1, len(response))
