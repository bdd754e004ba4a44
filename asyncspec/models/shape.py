"""The architecture of a policy, with the fields of its Hugging Face config.json.

A field that is missing has the default of transformers. Imports no torch, so that checking a configuration stays fast.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncspec.errors import first_line
from asyncspec.models import CheckpointError
from asyncspec.models.fields import check_usual, check_whole, complete
from asyncspec.models.headers import read_json
from asyncspec.models.rope_scaling import RopeScaling, YarnScaling, read_rope

# The supported policies: config.json's model_type -> its architecture.
ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
VOCABULARY_UNIT = 64  # vLLM rounds the vocabulary up to a multiple of this before ranks divide it
# model_type -> the architecture of a policy's MTP module alone
MTP_ARCHITECTURES = {kind: name.replace("ForCausalLM", "MTP") for kind, name in ARCHITECTURES.items()}
# The defaults of transformers: for all types of policies, and for each type. Sizes that describe the weights have none.
_DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False, "max_position_embeddings": 32768}
_DEFAULTS_OF: dict[str, dict[str, Any]] = {
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "qwen2": {"num_key_value_heads": 32},
    "llama": {"max_position_embeddings": 2048, "eos_token_id": 2},
    "mistral": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "eos_token_id": 2,
        "sliding_window": 4096,
    },
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
class Lora:
    """The low-rank adapters that are trained in the place of a policy's weights, see models/lora.py."""

    rank: int
    alpha: float  # what the adapters add is scaled by alpha / rank
    targets: str  # the matrices that have adapters: "all-linear", "attention" or "mlp"


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
    rope_scaling: RopeScaling | None = None
    experts: Experts | None = None  # qwen3_moe
    config_json: str = ""  # the text of config.json, if transformers computes the policy; "": torchtitan does

    @classmethod
    def from_hf(cls, directory: Path, backend: str = "torchtitan") -> PolicyShape:
        """Read config.json, and from generation_config.json the tokens that end a response.

        Args:
            backend: the library that computes the policy, "torchtitan" or "transformers".

        Raises:
            CheckpointError: a file is missing, unreadable, or describes another architecture.
        """
        where = directory / "config.json"
        cfg = read_json(where)
        if backend == "transformers":
            return cls._foreign(directory, cfg)
        kind = cfg.get("model_type")
        if not isinstance(kind, str) or kind not in ARCHITECTURES:
            raise CheckpointError(
                f"{where}: model_type={kind!r}: expected {_choices()}; model.backend=transformers trains others"
            )
        if (found := cfg.get("architectures") or [ARCHITECTURES[kind]]) != [ARCHITECTURES[kind]]:
            raise CheckpointError(
                f"{where}: architectures={found}: expected ['{ARCHITECTURES[kind]}']; a policy's model_type is "
                f"{_choices()}"
            )
        try:
            return cls._of(kind, cfg, _more_ends(directory))
        except KeyError as error:
            raise CheckpointError(f"{where}: field {error} is missing") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{where}: {error}") from None

    @classmethod
    def _foreign(cls, directory: Path, given: Mapping[str, Any]) -> PolicyShape:
        """Read what all models of text have in common, as transformers reads it. It knows the rest."""
        where = directory / "config.json"
        try:
            from transformers import AutoConfig
        except ImportError:
            raise CheckpointError(
                f"{where}: transformers is not installed; expected pip install 'asyncspec[transformers]'"
            ) from None
        try:
            found = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # of many types
            raise CheckpointError(f"{where}: transformers refuses it: {first_line(error)}") from None
        if found.get_text_config() is not found:
            raise CheckpointError(
                f"{where}: model_type={found.model_type!r}: also has other inputs; expected a model of text alone"
            )
        names = (*_SIZES, "tie_word_embeddings", "pad_token_id", "eos_token_id")
        try:
            read = {name: getattr(found, name, None) for name in names}
            cfg = complete({"rms_norm_eps": 1e-6, **read}, _SIZES)
            first, *others = _ends(cfg, _more_ends(directory))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{where}: {error}") from None
        return cls(
            **_sizes(cfg),
            rope_theta=0.0,
            norm_eps=0.0,
            tied=bool(cfg["tie_word_embeddings"]),
            eos_token_id=first,
            pad_token_id=cfg["pad_token_id"],
            model_type=str(found.model_type),
            other_eos_token_ids=tuple(others),
            config_json=json.dumps(given),
        )

    @classmethod
    def _of(cls, kind: str, given: Mapping[str, Any], more_ends: Any) -> PolicyShape:
        """
        Args:
            given: the fields of config.json.
            more_ends: eos_token_id of generation_config.json.
        """
        # Qwen2's biases are fixed, so this field says nothing there.
        check_usual({k: v for k, v in given.items() if not (k == "attention_bias" and kind == "qwen2")})
        cfg = complete({**_DEFAULTS, **_DEFAULTS_OF[kind], **given}, _SIZES)
        if kind == "mistral" and (window := cfg["sliding_window"]) is not None:
            raise ValueError(f"sliding_window={window!r} with model_type='mistral': expected null")
        theta, scaling = read_rope(cfg)
        first, *others = _ends(cfg, more_ends)
        return cls(
            **_sizes(cfg),
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
        if self.config_json:
            sizes = {"hidden_size": self.dim, "num_hidden_layers": self.n_layers, "num_attention_heads": self.n_heads}
            sizes |= {"num_key_value_heads": self.n_kv_heads, "head_dim": self.head_dim, "vocab_size": self.vocab_size}
            sizes |= {"intermediate_size": self.hidden_dim, "tie_word_embeddings": self.tied}
            return json.loads(self.config_json) | sizes
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
            "eos_token_id": [*self.eos_token_ids] if self.other_eos_token_ids else self.eos_token_id,
            "torch_dtype": "float32",
        }
        if self.pad_token_id is not None:
            cfg["pad_token_id"] = self.pad_token_id
        if self.rope_scaling is not None:
            cfg["rope_scaling"] = self.rope_scaling.to_hf()
        if self.model_type == "mistral":
            cfg["sliding_window"] = None
        if not self.qkv_bias:
            cfg["attention_bias"] = False
        return cfg | ({} if self.experts is None else self.experts.to_hf())

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All tokens that end a response."""
        return (self.eos_token_id, *self.other_eos_token_ids)

    @property
    def head_norms(self) -> bool:
        """Whether queries and keys are normalized, head by head."""
        return self.model_type in ("qwen3", "qwen3_moe")

    @property
    def qkv_bias(self) -> bool:
        """Whether queries, keys and values have a bias."""
        return self.model_type == "qwen2"

    @property
    def like_llama(self) -> bool:
        """Whether torchtitan's Llama 3 computes the policy, which rotates neighbors where the files rotate halves."""
        return self.model_type in ("llama", "mistral")

    @property
    def longest(self) -> int:
        """The longest sequence that the policy is made for. YaRN may stretch the positions of config.json."""
        scaling = self.rope_scaling
        if not isinstance(scaling, YarnScaling):
            return self.max_positions
        return max(self.max_positions, int(scaling.factor * scaling.original_max_positions))

    @property
    def aux_layers(self) -> tuple[int, int, int]:
        """Layers whose inputs feed the draft: an early, a middle and a late one (EAGLE-3, arXiv 2503.01840). They are
        different in a shallow policy too, if it has at least three layers.
        """
        n = self.n_layers
        return (2, n // 2, n - 3) if n >= 7 else (n - 3, n - 2, n - 1)


def _sizes(cfg: Mapping[str, Any]) -> dict[str, int]:
    """Return a policy's sizes, by their names in `PolicyShape`."""
    return {
        "vocab_size": cfg["vocab_size"],
        "dim": cfg["hidden_size"],
        "n_layers": cfg["num_hidden_layers"],
        "n_heads": cfg["num_attention_heads"],
        "n_kv_heads": cfg["num_key_value_heads"],
        "head_dim": cfg["head_dim"],
        "hidden_dim": cfg["intermediate_size"],
        "max_positions": cfg["max_position_embeddings"],
    }


def _more_ends(directory: Path) -> Any:
    """Return eos_token_id of generation_config.json; None if it has none."""
    generation = directory / "generation_config.json"
    return read_json(generation).get("eos_token_id") if generation.is_file() else None


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
