"""Random numbers as a pure function of (seed, position, stream): no state, no order, no batch.

Each sequence has its own seed, so what it samples does not depend on its neighbors in the batch. Each position uses one
number per stream. A later verification may use the same number again. That is exact: proposals beyond the first
rejection are discarded, with everything that depended on the numbers of their positions. For the token that is finally
written there, those numbers are as good as new.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

DRAFT, ACCEPT, TARGET = 0, 1, 2
STREAMS = 3
# splitmix64
_GOLDEN, _MIX1, _MIX2 = (np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def uniforms(seeds: Sequence[int], positions: int) -> np.ndarray:
    """Return uniform numbers in [0, 1) for positions 0..positions-1 and every stream.

    The generator is splitmix64 (Steele, Lea, Flood 2014), applied to the seed and then to the sum of the result with a
    counter of positions and streams. numpy has unsigned 64-bit integers, which makes this take a third of the time that
    torch took.

    Args:
        seeds: one per sequence, signed 64-bit integers.

    Returns:
        float32 [B, P, STREAMS], multiples of 2**-23. Their product with any positive float32 stays below that float32,
        also after rounding.
    """
    state_B = _splitmix(np.array(seeds, dtype=np.int64).view(np.uint64))
    state_BN = _splitmix(state_B[:, None] + np.arange(STREAMS * positions, dtype=np.uint64))
    return ((state_BN >> np.uint64(41)).astype(np.float32) * np.float32(2.0**-23)).reshape(
        len(seeds), positions, STREAMS
    )


def _splitmix(x: np.ndarray) -> np.ndarray:
    """Apply splitmix64 to x in place. Overflow is intended."""
    x *= _GOLDEN
    x += _GOLDEN
    x ^= x >> np.uint64(30)
    x *= _MIX1
    x ^= x >> np.uint64(27)
    x *= _MIX2
    x ^= x >> np.uint64(31)
    return x
