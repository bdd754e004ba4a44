"""The EAGLE-3 draft (arXiv 2503.01840): one decoder layer over the target's fused hidden states.

The draft's input at position t is the target's auxiliary hidden states of position t (three layers, concatenated) and
the embedding of token t+1; it predicts token t+2. To predict further tokens, it takes its own hidden state in place of
the target's. The embeddings are the target's and not part of the draft.

Parameter names and config.json are those that vLLM reads (LlamaForCausalLMEagle3).

The draft's vocabulary may be a part of the policy's (`d2t`, `t2d` in its file), so that its head is small where the
policy's is large.

Shape suffixes: B batch, L positions, D model dimension, E = A*D fused features, V vocabulary, U the draft's vocabulary,
N heads, H head size.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from asyncspec.models import CheckpointError
from asyncspec.models.hf_files import read_tensors, write_checkpoint
from asyncspec.models.policy import llama_rope
from asyncspec.models.shape import PolicyShape, RopeScaling


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

    def angles(self, positions: int) -> torch.Tensor:
        """Return the angles of RoPE in radians, float32 [positions, H / 2]."""
        return llama_rope(self.head_dim, positions, self.rope_theta, self.rope_scaling).build().cache.angle()


class Eagle3(nn.Module):
    def __init__(self, shape: DraftShape, tokens: torch.Tensor | None = None) -> None:
        """
        Args:
            tokens: int64 [draft_vocab_size], the tokens it can propose, ascending; None: all of the policy's.
        """
        super().__init__()
        self.shape, self.aux_layers = shape, shape.aux_layers
        self.register_buffer("d2t_U", tokens, persistent=False)
        t2d_V = None
        if tokens is not None:
            t2d_V = torch.full((shape.vocab_size,), -1)
            t2d_V[tokens] = torch.arange(len(tokens))
        self.register_buffer("t2d_V", t2d_V, persistent=False)  # -1: cannot be proposed
        self.fc = nn.Linear(3 * shape.dim, shape.dim, bias=False)
        self.midlayer = _DraftLayer(shape)
        self.norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.lm_head = nn.Linear(shape.dim, shape.draft_vocab_size, bias=False)
        angles = shape.angles(shape.max_positions).repeat(1, 2)
        self.register_buffer("cos_PH", angles.cos(), persistent=False)
        self.register_buffer("sin_PH", angles.sin(), persistent=False)

    def fuse(self, features_BLE: torch.Tensor) -> torch.Tensor:
        """Join the target's auxiliary hidden states into one, [B, L, D]."""
        return self.fc(features_BLE)

    def rope(self, positions_BL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine for positions, [B, L, 1, H] each."""
        return self.cos_PH[positions_BL].unsqueeze(2), self.sin_PH[positions_BL].unsqueeze(2)

    def forward(self, hidden_BLD, embeds_BLD, rope, attend):
        """Run one pass of the draft.

        Args:
            hidden_BLD: `fuse` of the target's features, or the draft's own output at the position before.
            embeds_BLD: the target's embedding of the following token.
            rope: (cos, sin) of the positions, from `rope`.
            attend: callable(q_BLNH, k_BLNH, v_BLNH) -> out_BLNH; it holds the keys and values of earlier positions.

        Returns:
            out_BLD, the hidden state to feed back, and logits_BLU for the token after the following one, over the
            draft's tokens.
        """
        out_BLD = self.midlayer(hidden_BLD, embeds_BLD, rope, attend)
        return out_BLD, self.lm_head(self.norm(out_BLD))


class _DraftLayer(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.hidden_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.self_attn = _DraftAttention(shape)
        self.mlp = _DraftMLP(shape)

    def forward(self, hidden_BLD, embeds_BLD, rope, attend):
        x_BL2D = torch.cat([self.input_layernorm(embeds_BLD), self.hidden_norm(hidden_BLD)], dim=-1)
        h_BLD = hidden_BLD + self.self_attn(x_BL2D, rope, attend)
        return h_BLD + self.mlp(self.post_attention_layernorm(h_BLD))


class _DraftAttention(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(2 * shape.dim, shape.n_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * shape.dim, shape.n_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * shape.dim, shape.n_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.n_heads * shape.head_dim, shape.dim, bias=False)

    def forward(self, x_BL2D, rope, attend):
        cos, sin = rope

        def heads(linear):
            return linear(x_BL2D).unflatten(-1, (-1, self.head_dim))

        def rotate(t):
            first, second = t.chunk(2, dim=-1)
            return t * cos + torch.cat([-second, first], dim=-1) * sin

        out_BLNH = attend(rotate(heads(self.q_proj)), rotate(heads(self.k_proj)), heads(self.v_proj))
        return self.o_proj(out_BLNH.flatten(2))


class _DraftMLP(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.dim, shape.hidden_dim, bias=False)
        self.up_proj = nn.Linear(shape.dim, shape.hidden_dim, bias=False)
        self.down_proj = nn.Linear(shape.hidden_dim, shape.dim, bias=False)

    def forward(self, x_BLD):
        return self.down_proj(F.silu(self.gate_proj(x_BLD)) * self.up_proj(x_BLD))


def read_shape(directory: Path, policy: PolicyShape) -> DraftShape:
    """Read a draft's config.json and check that it fits the policy.

    Raises:
        CheckpointError: the file is missing or broken, or the draft was made for another policy's shape.
    """
    try:
        cfg = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory}/config.json: {error}") from None
    if cfg.get("architectures") != ["LlamaForCausalLMEagle3"]:
        raise CheckpointError(
            f"{directory}/config.json: architectures={cfg.get('architectures')}: expected ['LlamaForCausalLMEagle3']"
        )
    for key, value in (("vocab_size", policy.vocab_size), ("hidden_size", policy.dim)):
        if cfg.get(key) != value:
            raise CheckpointError(f"{directory}/config.json: {key}={cfg.get(key)}: expected the policy's {value}")
    rope = cfg.get("rope_parameters") or cfg.get("rope_scaling") or {}
    try:
        return DraftShape(
            cfg["vocab_size"],
            cfg["hidden_size"],
            cfg["num_attention_heads"],
            cfg["num_key_value_heads"],
            cfg["head_dim"],
            cfg["intermediate_size"],
            float(cfg.get("rope_theta") or rope["rope_theta"]),
            cfg["rms_norm_eps"],
            tuple(cfg["eagle_aux_hidden_state_layer_ids"]),
            policy.max_positions,
            cfg.get("draft_vocab_size") or cfg["vocab_size"],
            RopeScaling.from_hf(rope),
        )
    except KeyError as error:
        raise CheckpointError(f"{directory}/config.json: field {error} is missing") from None
    except ValueError as error:
        raise CheckpointError(f"{directory}/config.json: {error}") from None


def load(directory: Path, policy: PolicyShape) -> Eagle3:
    """Read a draft and check that it fits the policy.

    Raises:
        CheckpointError: the files are missing or broken, or the draft was made for another policy's shape.
    """
    shape, tensors = read_shape(directory, policy), read_tensors(directory)
    tokens = None
    if shape.draft_vocab_size != shape.vocab_size:
        offsets = tensors.get("d2t")
        if offsets is None or offsets.shape != (shape.draft_vocab_size,):
            raise CheckpointError(
                f"{directory}: tensor d2t is missing or does not fit draft_vocab_size={shape.draft_vocab_size}"
            )
        tokens = offsets.to(torch.int64) + torch.arange(shape.draft_vocab_size)
        if not (
            0 <= int(tokens.min()) and int(tokens.max()) < shape.vocab_size and len(tokens.unique()) == len(tokens)
        ):
            raise CheckpointError(
                f"{directory}: tensor d2t does not name {len(tokens)} different tokens of the policy's "
                f"{shape.vocab_size}"
            )
    draft = Eagle3(shape, tokens)
    for name, tensor in draft.state_dict().items():
        if name not in tensors or tensors[name].shape != tensor.shape or not tensors[name].isfinite().all():
            raise CheckpointError(f"{directory}: tensor {name} is missing, has the wrong shape or is not finite")
    draft.load_state_dict({k: tensors[k].float() for k in draft.state_dict()})
    return draft


def save(draft: Eagle3, directory: Path) -> None:
    """Write the draft in the layout that vLLM reads."""
    shape, tensors = draft.shape, draft.state_dict()
    if draft.d2t_U is not None:
        tensors |= {
            "d2t": draft.d2t_U - torch.arange(len(draft.d2t_U), device=draft.d2t_U.device),
            "t2d": draft.t2d_V >= 0,
        }
    write_checkpoint(
        directory,
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "vocab_size": shape.vocab_size,
            "draft_vocab_size": shape.draft_vocab_size,
            "hidden_size": shape.dim,
            "num_hidden_layers": 1,
            "num_attention_heads": shape.n_heads,
            "num_key_value_heads": shape.n_kv_heads,
            "head_dim": shape.head_dim,
            "intermediate_size": shape.hidden_dim,
            "max_position_embeddings": shape.max_positions,
            "rope_theta": shape.rope_theta,
            "rms_norm_eps": shape.norm_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "eagle_aux_hidden_state_layer_ids": list(shape.aux_layers),
            "torch_dtype": "float32",
            **({} if shape.rope_scaling is None else {"rope_scaling": shape.rope_scaling.to_hf()}),
        },
        tensors,
    )
