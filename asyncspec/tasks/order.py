"""The order in which a run trains on its problems. It depends on the seed alone, so a longer run begins like a shorter
one, and a resumed run goes on where it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def order(seed: int, sizes: Sequence[int], weights: Sequence[float], count: int) -> np.ndarray:
    """Return the index of each training ticket's problem, int64 [count]. Indices go on from source to source.

    Each problem of a source comes once, then each once more, and so on. Sources take turns as evenly
    as their weights allow. A source with the share s has s * n of the first n problems, give or take the number of
    sources.

    Args:
        sizes: the number of problems of each source.
        weights: the share of each source is its weight over the sum of all.
    """
    source_N = _turns(weights, count)
    first, chosen_N = 0, np.empty(count, np.int64)
    for number, size in enumerate(sizes):
        turn_N = source_N == number
        chosen_N[turn_N] = first + _shuffled(np.random.default_rng([seed, 0x7072, number]), size, int(turn_N.sum()))
        first += size
    return chosen_N


def _turns(weights: Sequence[float], count: int) -> np.ndarray:
    """Return the source of each problem: a source with the share s has its n-th turn at the time (n + 1/2) / s."""
    shares = np.array(weights, float) / sum(weights)
    times = [(np.arange(int(count * share) + 2) + 0.5) / share for share in shares]
    source_N = np.repeat(np.arange(len(times)), [len(each) for each in times])
    return source_N[np.concatenate(times).argsort(kind="stable")[:count]]


def _shuffled(rng: np.random.Generator, size: int, count: int) -> np.ndarray:
    rounds = [rng.permutation(size) for _ in range(-(-count // size))]
    return np.concatenate([*rounds, np.empty(0, np.int64)])[:count]
