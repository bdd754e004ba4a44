"""Checks of single fields of a config.json, for policies and drafts alike. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

# Features that no supported model has: config.json must leave each out, or give it null or this value.
USUAL = {
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "hidden_act": "silu",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "quantization_config": None,
}


def check_usual(cfg: Mapping[str, Any]) -> None:
    """Check that config.json describes no feature that the models here lack.

    Raises:
        ValueError: it describes one.
    """
    for name, usual in USUAL.items():
        if (value := cfg.get(name)) is not None and value != usual:
            raise ValueError(f"{name}={value!r}: expected {usual!r}")
    for layer in cfg.get("layer_types") or ():
        if layer != "full_attention":
            raise ValueError(f"layer_types contains {layer!r}: expected 'full_attention' for every layer")


def complete(given: Mapping[str, Any], sizes: Iterable[str]) -> dict[str, Any]:
    """Return the fields of config.json, with those of the heads filled in where they are missing or null.

    Args:
        sizes: fields that must be whole numbers of at least 1.

    Raises:
        ValueError, KeyError: a size has an impossible value or is missing.
    """
    for name in ("hidden_size", "num_attention_heads"):
        check_whole(name, given[name])
    width, heads = given["hidden_size"], given["num_attention_heads"]
    cfg = {**given, "num_key_value_heads": given.get("num_key_value_heads") or heads}
    if not cfg.get("head_dim"):
        if width % heads:
            raise ValueError(f"hidden_size={width}: expected a multiple of num_attention_heads={heads}, or head_dim")
        cfg["head_dim"] = width // heads
    for name in sizes:
        check_whole(name, cfg[name])
    check_number("rms_norm_eps", cfg["rms_norm_eps"])
    if heads % cfg["num_key_value_heads"]:
        raise ValueError(
            f"num_key_value_heads={cfg['num_key_value_heads']}: expected a divisor of num_attention_heads={heads}"
        )
    if cfg["head_dim"] % 2:
        raise ValueError(f"head_dim={cfg['head_dim']}: expected an even number")
    return cfg


def check_whole(name: str, value: Any) -> None:
    """Check that a field is a whole number of at least 1.

    Raises:
        ValueError: it is not.
    """
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r}: expected a whole number of at least 1")


def check_number(name: str, value: Any) -> None:
    """Check that a field is a finite number above 0.

    Raises:
        ValueError: it is not.
    """
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{name}={value!r}: expected a finite number above 0")
