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

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from asyncspec.models import CheckpointError
from asyncspec.models.contents import check_eagle3
from asyncspec.models.draft_shape import DraftShape
from asyncspec.models.hf_files import carried, read_tensors, write_checkpoint
from asyncspec.models.rope import frequencies, magnitude
from asyncspec.models.shape import PolicyShape


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
        frequency_H = frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling)
        self.register_buffer("frequency_H", frequency_H.repeat(2), persistent=False)  # radians a position
        self._magnitude = magnitude(shape.rope_scaling)

    def fuse(self, features_BLE: torch.Tensor) -> torch.Tensor:
        """Join the target's auxiliary hidden states into one, [B, L, D]."""
        return self.fc(features_BLE)

    def rope(self, positions_BL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine for positions, [B, L, 1, H] each."""
        angle_BL1H = (positions_BL.unsqueeze(-1) * self.frequency_H).unsqueeze(2)
        return angle_BL1H.cos() * self._magnitude, angle_BL1H.sin() * self._magnitude

    def forward(self, hidden_BLD, embeds_BLD, rope, attend):
        """Run one pass of the draft.

        Args:
            hidden_BLD: `fuse` of the target's features, or the draft's own output at the position before.
            embeds_BLD: the target's embedding of the following token.
            rope: (cos, sin) of the positions, from `rope`.
            attend: callable(q_BLNH, k_BLNH, v_BLNH) -> out_BLNH; it holds the keys and values of earlier positions.

        Returns:
            out_BLD, the hidden state to feed back, also the input of `logits`.
        """
        return self.midlayer(hidden_BLD, embeds_BLD, rope, attend)

    def logits(self, out_TD: torch.Tensor) -> torch.Tensor:
        """Return logits of the token after the following one over the draft's tokens, [T, U], from outputs."""
        return self.lm_head(self.norm(out_TD))


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


def load(directory: Path, policy: PolicyShape) -> Eagle3:
    """Read a draft and check that it fits the policy.

    Raises:
        CheckpointError: the files are missing or broken, or the draft was made for another policy's shape.
    """
    shape, tensors = check_eagle3(directory, policy), read_tensors(directory)
    tokens = None
    if shape.draft_vocab_size != shape.vocab_size:
        tokens = tensors["d2t"].to(torch.int64) + torch.arange(shape.draft_vocab_size)
    draft = Eagle3(shape, tokens)
    for name in draft.state_dict():
        if not tensors[name].isfinite().all():
            raise CheckpointError(f"{directory}: tensor {name} holds values that are not finite")
    draft.load_state_dict({k: tensors[k].float() for k in draft.state_dict()})
    return draft


def save(draft: Eagle3, directory: Path, source: Path | None = None) -> None:
    """Write the draft in the layout that vLLM reads.

    Args:
        source: the directory that the draft was loaded from, see `hf_files.carried`.
    """
    shape, tensors = draft.shape, draft.state_dict()
    if draft.d2t_U is not None:
        tensors |= {
            "d2t": draft.d2t_U - torch.arange(len(draft.d2t_U), device=draft.d2t_U.device),
            "t2d": draft.t2d_V >= 0,
        }
    write_checkpoint(directory, carried(source, shape.to_hf()), tensors, source)
