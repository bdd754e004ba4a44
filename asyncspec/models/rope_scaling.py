"""How a policy stretches RoPE for sequences longer than those it first learned, from config.json. Imports no torch.

models/rope.py computes the tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncspec.models.fields import check_number, check_usual, check_whole

_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's RoPE (rope_type "llama3"): long wavelengths are stretched, short ones kept, and those between are
    interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    magnitude = 1.0  # what queries and keys are multiplied by

    @classmethod
    def from_hf(cls, rope: Mapping[str, Any]) -> Llama3Scaling:
        factors = ("factor", "low_freq_factor", "high_freq_factor")
        for name in factors:
            check_number(name, rope[name])
        check_whole(_ORIGINAL, rope[_ORIGINAL])
        if rope["high_freq_factor"] <= rope["low_freq_factor"]:
            raise ValueError(
                f"high_freq_factor={rope['high_freq_factor']}: expected more than "
                f"low_freq_factor={rope['low_freq_factor']}"
            )
        return cls(*(float(rope[name]) for name in factors), rope[_ORIGINAL])

    def to_hf(self) -> dict[str, Any]:
        return {
            "rope_type": "llama3",
            "factor": self.factor,
            "low_freq_factor": self.low_freq_factor,
            "high_freq_factor": self.high_freq_factor,
            _ORIGINAL: self.original_max_positions,
        }


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071; rope_type "yarn"): dimensions that turn seldom are stretched, those that turn often are
    kept, and those between are interpolated. Queries and keys grow by `magnitude`.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0  # dimensions that turn at least this often over the original positions are kept
    beta_slow: float = 1.0  # dimensions that turn at most this often are stretched
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True  # whether the bounds between the three kinds are whole dimensions

    @classmethod
    def from_hf(cls, rope: Mapping[str, Any]) -> YarnScaling:
        check_number("factor", rope["factor"])
        check_whole(_ORIGINAL, rope[_ORIGINAL])
        given: dict[str, Any] = {}
        for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            if value := rope.get(name):  # as in transformers, zero counts as missing
                check_number(name, value)
                given[name] = float(value)
        if (attention := rope.get("attention_factor")) is not None:
            check_number("attention_factor", attention)
            given["attention_factor"] = float(attention)
        if type(truncate := rope.get("truncate", True)) is not bool:
            raise ValueError(f"truncate={truncate!r}: expected true or false")
        return cls(float(rope["factor"]), rope[_ORIGINAL], truncate=truncate, **given)

    def to_hf(self) -> dict[str, Any]:
        optional = {
            "attention_factor": self.attention_factor,
            "mscale": self.mscale,
            "mscale_all_dim": self.mscale_all_dim,
        }
        return {
            "rope_type": "yarn",
            "factor": self.factor,
            _ORIGINAL: self.original_max_positions,
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
            "truncate": self.truncate,
        } | {name: value for name, value in optional.items() if value is not None}

    @property
    def magnitude(self) -> float:
        """What queries and keys are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    def _magnitude(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


RopeScaling = Llama3Scaling | YarnScaling
_KINDS: dict[Any, type[Llama3Scaling] | type[YarnScaling]] = {"llama3": Llama3Scaling, "yarn": YarnScaling}


def read_rope(cfg: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Return the base of RoPE and its scaling; None: the default RoPE. As in transformers, rope_scaling precedes
    rope_parameters, and a rope_theta inside them precedes one beside them.

    Raises:
        ValueError, KeyError: a field has an unknown value or is missing.
    """
    rope = cfg.get("rope_scaling") or cfg.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters={rope!r}: expected an object")
    check_usual(rope)
    theta = rope.get("rope_theta") or cfg["rope_theta"]
    check_number("rope_theta", theta)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default" or (kind == "linear" and rope.get("factor") == 1.0):
        return float(theta), None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"rope_type={kind!r}: expected 'default', 'llama3' or 'yarn'")
    if kind == "yarn" and theta <= 1:
        raise ValueError(f"rope_theta={theta}: expected more than 1 with rope_type='yarn'")
    found = {_ORIGINAL: cfg.get("max_position_embeddings"), **rope}
    if cfg.get(_ORIGINAL) is not None:  # beside the RoPE's own fields it precedes them
        found[_ORIGINAL] = cfg[_ORIGINAL]
    return float(theta), _KINDS[kind].from_hf(found)
