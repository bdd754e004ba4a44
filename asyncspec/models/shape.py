"""The architecture of a policy, with the fields of its Hugging Face config.json.

A field that is missing has the default of transformers. Imports no torch, so that checking a configuration stays fast.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncspec.models import CheckpointError
from asyncspec.models.headers import read_json

# The supported policies: config.json's model_type -> its architecture.
ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
# model_type -> the architecture of a policy's MTP module alone
MTP_ARCHITECTURES = {kind: name.replace("ForCausalLM", "MTP") for kind, name in ARCHITECTURES.items()}
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
# The defaults of transformers: for all types of policies, and for each type. Sizes that describe the weights have none.
_DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False, "max_position_embeddings": 32768}
_DEFAULTS_OF: dict[str, dict[str, Any]] = {
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "llama": {"max_position_embeddings": 2048, "eos_token_id": 2},
    "qwen3_moe": {"num_key_value_heads": 4, "norm_topk_prob": False, "intermediate_size": 6144},
}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's RoPE (config.json's rope_type "llama3"): long wavelengths are stretched, short ones kept, and those
    between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    @classmethod
    def from_hf(cls, rope: dict) -> RopeScaling | None:
        """Return the scaling, or None for the default RoPE.

        Args:
            rope: config.json's rope_parameters, or rope_scaling.

        Raises:
            ValueError: the RoPE is neither the default nor Llama 3.1's.
            KeyError: a field is missing.
        """
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default" or (kind == "linear" and rope.get("factor") == 1.0):
            return None
        if kind != "llama3":
            raise ValueError(f"rope_type={kind!r}: expected 'default', or 'llama3' as in Llama 3.1")
        factors = ("factor", "low_freq_factor", "high_freq_factor")
        for name in factors:
            check_number(name, rope[name])
        check_whole("original_max_position_embeddings", rope["original_max_position_embeddings"])
        return cls(*(float(rope[name]) for name in factors), rope["original_max_position_embeddings"])

    def to_hf(self) -> dict:
        return {
            "rope_type": "llama3",
            "factor": self.factor,
            "low_freq_factor": self.low_freq_factor,
            "high_freq_factor": self.high_freq_factor,
            "original_max_position_embeddings": self.original_max_positions,
        }


@dataclass(frozen=True)
class Experts:
    """The mixture of experts that each layer has in place of a feed-forward network."""

    count: int
    per_token: int
    hidden_dim: int  # of each expert
    normed: bool  # whether the weights of a token's experts are scaled to sum to 1

    @classmethod
    def from_hf(cls, cfg: Mapping[str, Any]) -> Experts:
        count = cfg["num_experts"] if "num_experts" in cfg else cfg["num_local_experts"]  # transformers accepts both
        for name, size in (
            ("num_experts", count),
            *((name, cfg[name]) for name in ("num_experts_per_tok", "moe_intermediate_size")),
        ):
            check_whole(name, size)
        experts = cls(count, cfg["num_experts_per_tok"], cfg["moe_intermediate_size"], bool(cfg["norm_topk_prob"]))
        if experts.per_token > count:
            raise ValueError(f"num_experts_per_tok={experts.per_token}: expected 1 to num_experts={count}")
        return experts

    def to_hf(self) -> dict:
        return {
            "num_experts": self.count,
            "num_experts_per_tok": self.per_token,
            "moe_intermediate_size": self.hidden_dim,
            "norm_topk_prob": self.normed,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }


@dataclass(frozen=True)
class PolicyShape:
    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    max_positions: int
    rope_theta: float
    norm_eps: float
    tied: bool
    eos_token_id: int  # the token that a response learns to end with
    pad_token_id: int | None = None
    model_type: str = "qwen3"  # one of ARCHITECTURES
    other_eos_token_ids: tuple[int, ...] = ()  # other tokens that end a response
    rope_scaling: RopeScaling | None = None  # llama
    experts: Experts | None = None  # qwen3_moe

    @classmethod
    def from_hf(cls, directory: Path) -> PolicyShape:
        """Read config.json, and from generation_config.json the tokens that end a response.

        Raises:
            CheckpointError: a file is missing, unreadable, or describes another architecture.
        """
        where = directory / "config.json"
        cfg = read_json(where)
        kind = cfg.get("model_type")
        if not isinstance(kind, str) or kind not in ARCHITECTURES:
            raise CheckpointError(f"{where}: model_type={kind!r}: expected {_choices()}")
        if (found := cfg.get("architectures") or [ARCHITECTURES[kind]]) != [ARCHITECTURES[kind]]:
            raise CheckpointError(
                f"{where}: architectures={found}: expected ['{ARCHITECTURES[kind]}']; a policy's model_type is "
                f"{_choices()}"
            )
        generation = directory / "generation_config.json"
        more = read_json(generation).get("eos_token_id") if generation.is_file() else None
        try:
            return cls._of(kind, cfg, more)
        except KeyError as error:
            raise CheckpointError(f"{where}: field {error} is missing") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{where}: {error}") from None

    @classmethod
    def _of(cls, kind: str, given: Mapping[str, Any], more_ends: Any) -> PolicyShape:
        """
        Args:
            given: the fields of config.json.
            more_ends: eos_token_id of generation_config.json.
        """
        check_usual(given)
        cfg = complete({**_DEFAULTS, **_DEFAULTS_OF[kind], **given}, _SIZES)
        theta, scaling = read_rope(cfg)
        if scaling is not None and kind != "llama":
            raise ValueError(f"rope_type='llama3' with model_type={kind!r}: expected 'default'")
        first, *others = _ends(cfg, more_ends)
        return cls(
            vocab_size=cfg["vocab_size"],
            dim=cfg["hidden_size"],
            n_layers=cfg["num_hidden_layers"],
            n_heads=cfg["num_attention_heads"],
            n_kv_heads=cfg["num_key_value_heads"],
            head_dim=cfg["head_dim"],
            hidden_dim=cfg["intermediate_size"],
            max_positions=cfg["max_position_embeddings"],
            rope_theta=theta,
            norm_eps=cfg["rms_norm_eps"],
            tied=bool(cfg["tie_word_embeddings"]),
            eos_token_id=first,
            pad_token_id=cfg.get("pad_token_id"),
            model_type=kind,
            other_eos_token_ids=tuple(others),
            rope_scaling=scaling,
            experts=Experts.from_hf(cfg) if kind == "qwen3_moe" else None,
        )

    def to_hf(self) -> dict:
        cfg = {
            "architectures": [ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.dim,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.hidden_dim,
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
            "attention_bias": False,
            "eos_token_id": [*self.eos_token_ids] if self.other_eos_token_ids else self.eos_token_id,
            "torch_dtype": "float32",
        }
        if self.pad_token_id is not None:
            cfg["pad_token_id"] = self.pad_token_id
        if self.rope_scaling is not None:
            cfg["rope_scaling"] = self.rope_scaling.to_hf()
        return cfg | ({} if self.experts is None else self.experts.to_hf())

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All tokens that end a response."""
        return (self.eos_token_id, *self.other_eos_token_ids)

    @property
    def aux_layers(self) -> tuple[int, int, int]:
        """Layers whose inputs feed the draft: an early, a middle and a late one (EAGLE-3, arXiv 2503.01840). They are
        different in a shallow policy too, if it has at least three layers.
        """
        n = self.n_layers
        return (2, n // 2, n - 3) if n >= 7 else (n - 3, n - 2, n - 1)


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


def read_rope(cfg: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Return the base of RoPE and its scaling. As in transformers, rope_scaling precedes rope_parameters, and a
    rope_theta inside them precedes one beside them.

    Raises:
        ValueError, KeyError: a field has an unknown value or is missing.
    """
    rope = cfg.get("rope_scaling") or cfg.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters={rope!r}: expected an object")
    check_usual(rope)
    theta = rope.get("rope_theta") or cfg["rope_theta"]
    check_number("rope_theta", theta)
    return float(theta), RopeScaling.from_hf(
        {"original_max_position_embeddings": cfg.get("max_position_embeddings"), **rope}
    )


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


def _ends(cfg: Mapping[str, Any], more: Any) -> list[int]:
    """Return the tokens that end a response: those of config.json, then further ones of generation_config.json."""
    found: list[int] = []
    for eos in (cfg.get("eos_token_id"), more):
        for token in eos if isinstance(eos, list) else [] if eos is None else [eos]:
            if type(token) is not int or not 0 <= token < cfg["vocab_size"]:
                raise ValueError(
                    f"eos_token_id={eos!r}: expected a token below vocab_size={cfg['vocab_size']}, or a list of them"
                )
            if token not in found:
                found.append(token)
    if not found:
        raise ValueError("eos_token_id=None: expected a token that ends a response, or a list of them")
    return found


def _choices() -> str:
    return ", ".join(map(repr, ARCHITECTURES))
