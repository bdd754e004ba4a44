"""The EAGLE-3 draft (arXiv 2503.01840): one decoder layer over the target's fused hidden states.

At position t the draft reads the target's auxiliary hidden states of position t (three layers, concatenated) and the
embedding of token t+1, and predicts token t+2. Drafting on, it feeds back its own hidden state in place of the
target's. Embeddings are the target's and are not part of the draft.

Parameter names and config.json are those vLLM reads (LlamaForCausalLMEagle3).

Shape suffixes: B batch, L positions, D model dimension, E = A*D fused features, V vocabulary, N heads, H head size.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from asyncspec.models import CheckpointError
from asyncspec.models.policy import PolicyShape, read_tensors, write_checkpoint


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

    @classmethod
    def for_policy(cls, policy: PolicyShape) -> "DraftShape":
        return cls(policy.vocab_size, policy.dim, policy.n_heads, policy.n_kv_heads, policy.head_dim,
                   policy.hidden_dim, policy.rope_theta, policy.norm_eps, policy.aux_layers, policy.max_positions)


class Eagle3(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape, self.aux_layers = shape, shape.aux_layers
        self.fc = nn.Linear(3 * shape.dim, shape.dim, bias=False)
        self.midlayer = _DraftLayer(shape)
        self.norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.lm_head = nn.Linear(shape.dim, shape.vocab_size, bias=False)
        inv_freq = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angles = torch.outer(torch.arange(shape.max_positions).float(), inv_freq).repeat(1, 2)
        self.register_buffer("cos_PH", angles.cos(), persistent=False)
        self.register_buffer("sin_PH", angles.sin(), persistent=False)

    def fuse(self, features_BLE: torch.Tensor) -> torch.Tensor:
        """The target's auxiliary hidden states, joined into one."""
        return self.fc(features_BLE)

    def rope(self, positions_BL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin for positions, [B, L, 1, H]."""
        return self.cos_PH[positions_BL].unsqueeze(2), self.sin_PH[positions_BL].unsqueeze(2)

    def forward(self, hidden_BLD, embeds_BLD, rope, attend):
        """One pass of the draft.

        Args:
            hidden_BLD: `fuse` of the target's features, or the draft's own output of the position before.
            embeds_BLD: the target's embedding of the following token.
            rope: (cos, sin) of the positions, from `rope`.
            attend: callable(q_BLNH, k_BLNH, v_BLNH) -> out_BLNH; owns the keys and values of earlier positions.

        Returns:
            out_BLD, the hidden state to feed back, and logits_BLV for the token after the following one.
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


def draft_loss(
    draft: Eagle3, features_BLE, embeds_BLD, target_logprobs_BLV, mask_BL, unroll: int
) -> tuple[torch.Tensor, list[float]]:
    """Soft cross-entropy of the draft, unrolled over the positions it will really draft (training-time test).

    Pass 0 reads the target's features everywhere; pass j reads at position t the output of pass j-1 at t-1, as it
    does when drafting its (j+1)-th token. In pass j, position t attends to pass-0 keys up to t-j and to the key of
    pass i at t-(j-i), for i = 1..j: just what the KV cache holds then.

    Args:
        features_BLE: float, the target's auxiliary hidden states of each position.
        embeds_BLD: float, the target's embeddings of the tokens at each position.
        target_logprobs_BLV: float, the target's log-distribution of the next token at each position.
        mask_BL: bool, True where the token at that position was sampled by the policy (response tokens).
        unroll: number of passes.

    Returns:
        The mean loss, and for each pass the expected acceptance rate, sum over the vocabulary of min(p, q). Of sequences
        shorter than three tokens there is nothing to learn: the loss is a constant.
    """
    B, L, _ = features_BLE.shape
    T = L - 2  # position t needs the token at t+1 and the target's distribution of the token at t+2
    if T < 1:
        return features_BLE.new_zeros(()), [0.0] * unroll
    rope = draft.rope(torch.arange(T, device=features_BLE.device).expand(B, T))
    next_BTD = embeds_BLD[:, 1 : T + 1]
    target_BTV = target_logprobs_BLV[:, 1 : T + 1]
    mask_BT = mask_BL[:, 2:].to(features_BLE.dtype)
    attend = _UnrolledAttention(T, features_BLE.device)
    hidden_BTD = draft.fuse(features_BLE[:, :T])
    loss, rates = features_BLE.new_zeros(()), []
    for step in range(unroll):
        # The first `step` positions have no pass before them to read from.
        live_BT = mask_BT.clone()
        live_BT[:, :step] = 0
        count = live_BT.sum().clamp(min=1)
        out_BTD, logits_BTV = draft(hidden_BTD, next_BTD, rope, attend)
        logq_BTV = logits_BTV.log_softmax(-1)
        loss = loss - ((target_BTV.exp() * logq_BTV).sum(-1) * live_BT).sum() / count
        with torch.no_grad():
            overlap_BT = torch.minimum(target_BTV.exp(), logq_BTV.exp()).sum(-1)
            rates.append(float((overlap_BT * live_BT).sum() / count))
        hidden_BTD = F.pad(out_BTD[:, :-1], (0, 0, 1, 0))
    return loss / unroll, rates


class _UnrolledAttention:
    """Keys and values of the passes of `draft_loss`, attended to as the KV cache would hold them."""

    def __init__(self, length: int, device) -> None:
        index = torch.arange(length, device=device)
        self.distance_TT = index[:, None] - index[None, :]
        self.passes: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, q_BTNH, k_BTNH, v_BTNH):
        repeat = q_BTNH.shape[2] // k_BTNH.shape[2]
        q, k, v = (t.transpose(1, 2) for t in (q_BTNH, k_BTNH, v_BTNH))
        self.passes.append((k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)))
        step, scale = len(self.passes) - 1, q.shape[-1] ** -0.5
        first_k, first_v = self.passes[0]
        hidden = self.distance_TT < step  # pass-0 keys are seen up to t - step
        scores = [(q @ first_k.transpose(-1, -2) * scale).masked_fill(hidden, float("-inf"))]
        values = []
        for i in range(1, step + 1):
            back = step - i
            k_i, v_i = (F.pad(t[:, :, : t.shape[2] - back], (0, 0, back, 0)) for t in self.passes[i])
            scores.append((q * k_i).sum(-1, keepdim=True) * scale)
            values.append(v_i)
        weights = torch.cat(scores, dim=-1).softmax(-1)
        T = self.distance_TT.shape[0]
        out = weights[..., :T] @ first_v
        for i, v_i in enumerate(values):
            out = out + weights[..., T + i, None] * v_i
        return out.transpose(1, 2)


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
        raise CheckpointError(f"{directory}/config.json: architectures={cfg.get('architectures')}: "
                              "expected ['LlamaForCausalLMEagle3']")
    for key, value in (("vocab_size", policy.vocab_size), ("hidden_size", policy.dim)):
        if cfg.get(key) != value:
            raise CheckpointError(f"{directory}/config.json: {key}={cfg.get(key)}: the policy has {value}")
    rope = cfg.get("rope_parameters") or {}
    try:
        return DraftShape(
            cfg["vocab_size"], cfg["hidden_size"], cfg["num_attention_heads"], cfg["num_key_value_heads"], cfg["head_dim"],
            cfg["intermediate_size"], float(cfg.get("rope_theta") or rope["rope_theta"]), cfg["rms_norm_eps"],
            tuple(cfg["eagle_aux_hidden_state_layer_ids"]), policy.max_positions,
        )
    except KeyError as error:
        raise CheckpointError(f"{directory}/config.json: field {error} is missing") from None


def load(directory: Path, policy: PolicyShape) -> Eagle3:
    """Read a draft and check that it fits the policy.

    Raises:
        CheckpointError: the files are missing or broken, or the draft was made for another policy's shape.
    """
    draft = Eagle3(read_shape(directory, policy))
    tensors = read_tensors(directory)
    for name, tensor in draft.state_dict().items():
        if name not in tensors or tensors[name].shape != tensor.shape or not tensors[name].isfinite().all():
            raise CheckpointError(f"{directory}: tensor {name} is missing, has another shape or is not finite")
    draft.load_state_dict({k: tensors[k].float() for k in draft.state_dict()})
    return draft


def save(draft: Eagle3, directory: Path) -> None:
    """Write the draft in the layout vLLM reads."""
    shape = draft.shape
    write_checkpoint(directory, {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.vocab_size, "hidden_size": shape.dim, "num_hidden_layers": 1,
        "num_attention_heads": shape.n_heads, "num_key_value_heads": shape.n_kv_heads, "head_dim": shape.head_dim,
        "intermediate_size": shape.hidden_dim, "max_position_embeddings": shape.max_positions,
        "rope_theta": shape.rope_theta, "rms_norm_eps": shape.norm_eps, "hidden_act": "silu", "attention_bias": False,
        "tie_word_embeddings": False, "eagle_aux_hidden_state_layer_ids": list(shape.aux_layers),
        "torch_dtype": "float32",
    }, draft.state_dict())
