"""The order in which a run trains on its problems. It depends on the seed alone, so a longer run begins like a shorter
one, and a resumed run goes on where it was.

Sources take turns. Each source gives all its problems once, then all once more, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def turns(weights: Sequence[float], count: int) -> np.ndarray:
    """Return the number of the source that gives each problem, int64 [count].

    A source with the share s has its n-th turn at the time (n + 1/2) / s. So it has s * n of the first n problems, give
    or take the number of sources.

    Args:
        weights: the share of each source is its weight over the sum of all.
    """
    relative = np.array(weights, float) / max(weights)  # the sum of large weights may be infinite
    shares = relative / relative.sum()
    times = [(np.arange(int(count * share) + 2) + 0.5) / share for share in shares]
    source_N = np.repeat(np.arange(len(times)), [len(each) for each in times])
    return source_N[np.concatenate(times).argsort(kind="stable")[:count]]


def shuffled(seed: int, source: int, size: int, count: int) -> np.ndarray:
    """Return the indices of the first `count` problems of a source with `size` problems, int64 [count]."""
    rng = np.random.default_rng([seed, 0x7072, source])
    rounds = [rng.permutation(size) for _ in range(-(-count // size))]
    return np.concatenate([*rounds, np.empty(0, np.int64)])[:count]
