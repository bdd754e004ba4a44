"""The architecture of an EAGLE-3 draft, with the fields of its config.json as vLLM reads them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncspec.models import CheckpointError
from asyncspec.models.fields import check_usual, complete
from asyncspec.models.headers import read_json
from asyncspec.models.rope_scaling import RopeScaling, read_rope
from asyncspec.models.shape import PolicyShape

ARCHITECTURE = "LlamaForCausalLMEagle3"
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
# Variants of EAGLE-3 that compute something else: config.json, or eagle_config in it, must leave each out or give it
# null or this value.
_USUAL = {
    "num_hidden_layers": 1,
    "num_aux_hidden_states": 3,
    "use_aux_hidden_state": True,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "norm_output": False,
    "fc_norm": False,
    "logit_scale": 1.0,
}


@dataclass(frozen=True)
class DraftShape:
    vocab_size: int
    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    rope_theta: float
    norm_eps: float
    aux_layers: tuple[int, int, int]
    max_positions: int
    draft_vocab_size: int  # tokens it can propose
    rope_scaling: RopeScaling | None = None

    @classmethod
    def for_policy(cls, policy: PolicyShape, draft_vocab_size: int = 0) -> DraftShape:
        return cls(
            policy.vocab_size,
            policy.dim,
            policy.n_heads,
            policy.n_kv_heads,
            policy.head_dim,
            policy.hidden_dim,
            policy.rope_theta,
            policy.norm_eps,
            policy.aux_layers,
            policy.max_positions,
            draft_vocab_size or policy.vocab_size,
            policy.rope_scaling,
        )

    @classmethod
    def from_hf(cls, directory: Path, policy: PolicyShape) -> DraftShape:
        """Read a draft's config.json and check that it fits the policy.

        Raises:
            CheckpointError: the file is missing or broken, describes another architecture, or the draft was made for
                another policy's shape.
        """
        where = directory / "config.json"
        cfg = read_json(where)
        if cfg.get("architectures") != [ARCHITECTURE]:
            raise CheckpointError(f"{where}: architectures={cfg.get('architectures')}: expected ['{ARCHITECTURE}']")
        for key, value in (
            ("vocab_size", policy.vocab_size),
            ("hidden_size", policy.dim),
            ("target_hidden_size", policy.dim),
        ):
            if (found := cfg.get(key)) != value and (found is not None or key != "target_hidden_size"):
                raise CheckpointError(f"{where}: {key}={found}: expected the policy's {value}")
        try:
            return cls._of(cfg, policy)
        except KeyError as error:
            raise CheckpointError(f"{where}: field {error} is missing") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{where}: {error}") from None

    @classmethod
    def _of(cls, given: Mapping[str, Any], policy: PolicyShape) -> DraftShape:
        check_usual(given)
        nested = given.get("eagle_config") or {}
        for name, usual in _USUAL.items():
            for fields in (given, nested):
                if (value := fields.get(name)) is not None and value != usual:
                    raise ValueError(f"{name}={value!r}: expected {usual!r}")
        cfg = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, **given}  # as in transformers' LlamaConfig
        cfg["draft_vocab_size"] = cfg.get("draft_vocab_size") or cfg["vocab_size"]
        cfg = complete(cfg, ("num_key_value_heads", "head_dim", "intermediate_size", "draft_vocab_size"))
        if cfg["draft_vocab_size"] > policy.vocab_size:
            raise ValueError(f"draft_vocab_size={cfg['draft_vocab_size']}: expected at most {policy.vocab_size}")
        theta, scaling = read_rope(cfg)
        return cls(
            cfg["vocab_size"],
            cfg["hidden_size"],
            cfg["num_attention_heads"],
            cfg["num_key_value_heads"],
            cfg["head_dim"],
            cfg["intermediate_size"],
            theta,
            cfg["rms_norm_eps"],
            _aux_layers(given.get(AUX_LAYERS) or nested.get(AUX_LAYERS), policy.n_layers),
            policy.max_positions,
            cfg["draft_vocab_size"],
            scaling,
        )

    def to_hf(self) -> dict[str, Any]:
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "hidden_size": self.dim,
            "num_hidden_layers": 1,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.hidden_dim,
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.norm_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            AUX_LAYERS: list(self.aux_layers),
            "torch_dtype": "float32",
            **({} if self.rope_scaling is None else {"rope_scaling": self.rope_scaling.to_hf()}),
        }


def _aux_layers(given: Any, layers: int) -> tuple[int, int, int]:
    """Return the policy's layers whose inputs the draft takes: those of config.json, or vLLM's default."""
    found = (2, layers // 2, layers - 3) if given is None else given
    if (
        not isinstance(found, (list, tuple))
        or len(found) != 3
        or not all(type(layer) is int and 0 <= layer < layers for layer in found)
        or len(set(found)) < 3
    ):
        raise ValueError(
            f"{AUX_LAYERS}={given!r}: expected three different layers of the policy, 0 to {layers - 1}"
            + ("" if given is not None else f"; without the field they are {list(found)}, as in vLLM")
        )
    first, second, third = sorted(found)
    return first, second, third
