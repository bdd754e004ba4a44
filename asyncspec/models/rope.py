"""The tables of RoPE, stretched or not: torchtitan's two forms, with the numbers of transformers.

torchtitan's own tables know Llama 3.1's stretching in one form only, and of YaRN they leave out the magnitude.

Shape suffixes: P positions, H half of a head's dimensions, one for each pair that is rotated together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from asyncspec.loading import compiling_later
from asyncspec.models.rope_scaling import RopeScaling, YarnScaling

with compiling_later():
    from torchtitan.models.common import ComplexRoPE, CosSinRoPE


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """Return the angle that each position adds, in radians, float32 [H]."""
    frequency_H = 1.0 / (theta ** (torch.arange(0, head_dim, 2).float() / head_dim))
    if scaling is None:
        return frequency_H
    if isinstance(scaling, YarnScaling):
        kept_H = 1 - _ramp(head_dim, theta, scaling)
    else:
        turns_H = scaling.original_max_positions * frequency_H / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept_H = ((turns_H - low) / (high - low)).clamp(0, 1)
    return (1 - kept_H) * frequency_H / scaling.factor + kept_H * frequency_H


def _ramp(head_dim: int, theta: float, scaling: YarnScaling) -> torch.Tensor:
    """Return how much YaRN stretches each pair, from 0 to 1, float32 [H]."""

    def dimension(turns: float) -> float:
        """Return the index of the pair that makes so many turns over the original positions."""
        return head_dim * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return ((torch.arange(head_dim // 2).float() - low) / (high - low or 0.001)).clamp(0, 1)


def rotations(head_dim: int, positions: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """Return the rotation of each position and pair, complex [P, H]. Its magnitude is the scaling's."""
    angle_PH = torch.outer(torch.arange(positions).float(), frequencies(head_dim, theta, scaling))
    return torch.polar(torch.full_like(angle_PH, magnitude(scaling)), angle_PH)


def magnitude(scaling: RopeScaling | None) -> float:
    """Return what RoPE multiplies queries and keys by."""
    return 1.0 if scaling is None else scaling.magnitude


class NeighborRoPE(ComplexRoPE):
    """RoPE that rotates neighbors. Its table is `rotations`."""

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        stretched: RopeScaling | None = None

    def _precompute_cache(self) -> torch.Tensor:
        cfg = self.config
        return rotations(cfg.dim, cfg.max_seq_len, cfg.theta, cfg.stretched)


class HalvesRoPE(CosSinRoPE):
    """RoPE that rotates the halves of a head. Its table has the cosines of all dimensions, then the sines."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        stretched: RopeScaling | None = None

    def _precompute_cache(self) -> torch.Tensor:
        cfg = self.config
        frequency_H = frequencies(cfg.dim, cfg.theta, cfg.stretched)
        angle_PD = torch.outer(torch.arange(cfg.max_seq_len).float(), frequency_H).repeat(1, 2)
        return torch.cat([angle_PD.cos(), angle_PD.sin()], -1) * magnitude(cfg.stretched)


def rope_config(
    neighbors: bool, head_dim: int, positions: int, theta: float, scaling: RopeScaling | None
) -> ComplexRoPE.Config | CosSinRoPE.Config:
    """Return the configuration of a RoPE whose table has this many positions.

    Args:
        neighbors: whether it rotates neighbors; otherwise it rotates halves.
    """
    kind = NeighborRoPE if neighbors else HalvesRoPE
    return kind.Config(dim=head_dim, max_seq_len=positions, theta=theta, stretched=scaling)
