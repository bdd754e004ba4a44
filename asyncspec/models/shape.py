"""The architecture of a policy, with the fields of its Hugging Face config.json.

Imports no torch, so that checking a configuration stays fast.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from asyncspec.models import CheckpointError

# The supported policies: config.json's model_type -> its architecture.
ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
# model_type -> the architecture of a policy's MTP module alone
MTP_ARCHITECTURES = {kind: name.replace("ForCausalLM", "MTP") for kind, name in ARCHITECTURES.items()}
# Features that no supported policy has: config.json must leave each out or give it this value.
_USUAL = {
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "hidden_act": "silu",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


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
        if kind == "default":
            return None
        if kind != "llama3":
            raise ValueError(f"rope_type={kind!r}: expected 'default', or 'llama3' as in Llama 3.1")
        return cls(
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(rope["original_max_position_embeddings"]),
        )

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
    def from_hf(cls, cfg: dict) -> Experts:
        count = cfg["num_experts"] if "num_experts" in cfg else cfg["num_local_experts"]  # transformers accepts both
        experts = cls(
            count, cfg["num_experts_per_tok"], cfg["moe_intermediate_size"], bool(cfg.get("norm_topk_prob", False))
        )
        if not 1 <= experts.per_token <= count:
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
    pad_token_id: int
    model_type: str = "qwen3"  # one of ARCHITECTURES
    other_eos_token_ids: tuple[int, ...] = ()  # other tokens that end a response
    rope_scaling: RopeScaling | None = None  # llama
    experts: Experts | None = None  # qwen3_moe

    @classmethod
    def from_hf(cls, directory: Path) -> PolicyShape:
        """Read config.json.

        Raises:
            CheckpointError: the file is missing, unreadable, or describes another architecture.
        """
        where = directory / "config.json"
        try:
            cfg = json.loads(where.read_text())
            if not isinstance(cfg, dict):
                raise ValueError("expected an object")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{where}: {error}") from None
        kind = cfg.get("model_type")
        if not isinstance(kind, str) or kind not in ARCHITECTURES:
            raise CheckpointError(f"{where}: model_type={kind!r}: expected {_choices()}")
        if (found := cfg.get("architectures") or [ARCHITECTURES[kind]]) != [ARCHITECTURES[kind]]:
            raise CheckpointError(
                f"{where}: architectures={found}: expected ['{ARCHITECTURES[kind]}']; a policy's model_type is "
                f"{_choices()}"
            )
        try:
            return cls._of(kind, cfg)
        except KeyError as error:
            raise CheckpointError(f"{where}: field {error} is missing") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{where}: {error}") from None

    @classmethod
    def _of(cls, kind: str, cfg: dict) -> PolicyShape:
        for name, usual in _USUAL.items():
            if (value := cfg.get(name, usual)) != usual and value is not None:
                raise ValueError(f"{name}={value!r}: expected {usual!r}")
        rope = cfg.get("rope_parameters") or cfg.get("rope_scaling") or {}
        scaling = RopeScaling.from_hf(rope)
        if scaling is not None and kind != "llama":
            raise ValueError(f"rope_type='llama3' with model_type={kind!r}: expected 'default'")
        eos = cfg.get("eos_token_id")
        first, *others = ends = eos if isinstance(eos, list) and eos else [eos]
        if not all(isinstance(token, int) and 0 <= token < cfg["vocab_size"] for token in ends):
            raise ValueError(
                f"eos_token_id={eos!r}: expected a token below vocab_size={cfg['vocab_size']}, or a list of them"
            )
        heads = cfg["num_attention_heads"]
        return cls(
            vocab_size=cfg["vocab_size"],
            dim=cfg["hidden_size"],
            n_layers=cfg["num_hidden_layers"],
            n_heads=heads,
            n_kv_heads=cfg.get("num_key_value_heads") or heads,
            head_dim=cfg.get("head_dim") or cfg["hidden_size"] // heads,
            hidden_dim=cfg["intermediate_size"],
            max_positions=cfg["max_position_embeddings"],
            rope_theta=float(cfg.get("rope_theta") or rope.get("rope_theta") or (1e4 if kind == "llama" else 1e6)),
            norm_eps=cfg["rms_norm_eps"],
            tied=bool(cfg.get("tie_word_embeddings", False)),
            eos_token_id=first,
            pad_token_id=cfg.get("pad_token_id") or 0,
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
            "pad_token_id": self.pad_token_id,
            "torch_dtype": "float32",
        }
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


def _choices() -> str:
    return ", ".join(map(repr, ARCHITECTURES))
