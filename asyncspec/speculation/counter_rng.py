"""Random numbers as a pure function of (seed, position, stream): no state, no order, no batch.

Each sequence has its own seed, so what it samples does not depend on its neighbours in the batch. Each position uses
one number per stream, and may compute it again in a later verification: a proposal beyond the first rejection is
discarded, together with everything that depended on the numbers of its position, so to the token finally written there
they are as good as new.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

DRAFT, ACCEPT, TARGET = 0, 1, 2
STREAMS = 3
# splitmix64
_GOLDEN, _MIX1, _MIX2 = (np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def uniforms(seeds: Sequence[int], positions: int) -> np.ndarray:
    """Uniform numbers in [0, 1) for positions 0..positions-1 and every stream.

    Args:
        seeds: one per sequence, integers of 64 bits with sign.

    Returns:
        float32 [B, P, STREAMS], multiples of 2**-23: times any positive float32 they stay below it, also after
        rounding. Generator: splitmix64 (Steele, Lea, Flood 2014), applied to the seed and then to its sum with position
        and stream. By numpy, which has 64 bits without sign: a third of the time.
    """
    state_B = _splitmix(np.array(seeds, dtype=np.int64).view(np.uint64))
    state_BN = _splitmix(state_B[:, None] + np.arange(STREAMS * positions, dtype=np.uint64))
    return ((state_BN >> np.uint64(41)).astype(np.float32) * np.float32(2.0**-23)).reshape(
        len(seeds), positions, STREAMS
    )


def _splitmix(x: np.ndarray) -> np.ndarray:
    """Overwrites x. Overflows are meant."""
    x *= _GOLDEN
    x += _GOLDEN
    x ^= x >> np.uint64(30)
    x *= _MIX1
    x ^= x >> np.uint64(27)
    x *= _MIX2
    x ^= x >> np.uint64(31)
    return x
