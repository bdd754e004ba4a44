"""Random numbers as a pure function of (seed, position, stream): no state, no order, no batch.

Each sequence has its own seed, so what it samples does not depend on its neighbours in the batch. Each position uses
one number per stream, and may compute it again in a later verification: a proposal beyond the first rejection is
discarded, together with everything that depended on the numbers of its position, so to the token finally written there
they are as good as new.
"""

from __future__ import annotations

import torch

DRAFT, ACCEPT, TARGET = 0, 1, 2
STREAMS = 3
_GOLDEN, _MIX1, _MIX2 = -7046029254386353131, -4658895280553007687, -7723592293110705685  # splitmix64, as signed


def uniforms(seed_B: torch.Tensor, position_BK: torch.Tensor) -> torch.Tensor:
    """Uniform numbers in [0, 1) for every stream.

    Args:
        seed_B: int64, one seed per sequence.
        position_BK: int64, token positions.

    Returns:
        float32 [STREAMS, B, K], multiples of 2**-23: times any positive float32 they stay below it, also after
        rounding. Generator: splitmix64 (Steele, Lea, Flood 2014), applied to the
        seed and then to its sum with position and stream.
    """
    stream = torch.arange(STREAMS, device=seed_B.device).view(-1, 1, 1)
    state = _splitmix(seed_B)[None, :, None] + (position_BK * STREAMS)[None] + stream
    return (_shift_right(_splitmix(state), 41)).to(torch.float32) * 2.0**-23


def _splitmix(x: torch.Tensor) -> torch.Tensor:
    x = x * _GOLDEN + _GOLDEN
    x = (x ^ _shift_right(x, 30)) * _MIX1
    x = (x ^ _shift_right(x, 27)) * _MIX2
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
