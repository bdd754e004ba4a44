"""Drafters that read the target's hidden states: EAGLE-3, and the policy's own multi-token-prediction module.

Position t of such a draft reads the target's features of position t and token t+1, and predicts token t+2; drafting on, it reads
its own hidden state in place of the target's. Features wait in a buffer until the drafter is asked for proposals; then it
reads all it has missed in one pass, right-aligned over the rows, and drafts on from there. A draft replaced in between costs
acceptance, never exactness: proposals are verified against the very distribution they were drawn from.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from asyncspec.engine.decode import RMSNorm, RoPE, rotated
from asyncspec.engine.kv_cache import KVCache
from asyncspec.models.eagle3 import Eagle3
from asyncspec.speculation.base import Proposal, Slots
from asyncspec.speculation.verify import sample, sampling_distribution


class FeatureDrafter:
    def __init__(self, draft, decode, embed, slots: Slots, settings: tuple[float, float, int]) -> None:
        """
        Args:
            draft: the module whose weights a new draft version replaces.
            decode: its forward pass over a KV cache (`DecodeEagle3`, `DecodeMTP`).
            embed: the target's embedding, int64 tokens [...] -> [..., D].
            settings: temperature, top_p, top_k of the target; the draft follows them to be accepted more.
        """
        self.draft, self.decode, self.embed, self.slots, self.settings = draft, decode, embed, slots, settings
        self.aux_layers = draft.shape.aux_layers
        size = (*slots.token_SP.shape, len(self.aux_layers) * draft.shape.dim)
        self.feature_SPE = torch.zeros(size, device=slots.device)
        self._feature_TE = self.feature_SPE.view(-1, size[-1])
        self._start_S1 = torch.arange(size[0], device=slots.device).unsqueeze(1) * slots.positions
        self.read = np.zeros(size[0], dtype=np.int64)  # positions below are in the KV cache
        self.reload()

    def reload(self) -> None:
        self.decode.reload()

    def enter(self, first_row: int, count: int) -> None:
        self.read[first_row : first_row + count] = 0

    def observe(self, first_row: int, features_BLE, position_BL) -> None:
        index_BL = self._start_S1[first_row : first_row + len(position_BL)] + position_BL
        self._feature_TE.index_copy_(0, index_BL.flatten(), features_BLE.flatten(0, 1))

    def unread(self, count: int) -> int:
        # The last token's features come with the next verification.
        return max(1, int((self.slots.length[:count] - 1 - self.read[:count]).max()))

    def prefill(self, first_row: int, count: int) -> None:
        rows = slice(first_row, first_row + count)
        self._read(first_row, count, int((self.slots.length[rows] - 1 - self.read[rows]).max()))

    def propose(self, count: int, draft_length: int, uniform_BK) -> Proposal:
        hidden_BD, logits_BV = self._read(0, count, self.unread(count))
        span, position_B = int(self.slots.length[:count].max()), self.slots.length_S[:count] - 1
        tokens, distributions = [], []
        for step in range(draft_length):
            if step:
                hidden_BD, logits_BV = self._pass(0, hidden_BD, tokens[-1].unsqueeze(1), (position_B + (step - 1)).unsqueeze(1), span + step)
            distributions.append(sampling_distribution(logits_BV, *self.settings))
            tokens.append(sample(distributions[-1], uniform_BK[:, step]))
        return Proposal(torch.stack(tokens, 1), torch.stack(distributions, 1))

    def move(self, source: int, target: int) -> None:
        length = int(self.slots.length[source])
        self.decode.cache.move(source, target, length)
        self.feature_SPE[target, :length] = self.feature_SPE[source, :length]
        self.read[target] = self.read[source]

    def leave(self, row: int) -> None:
        pass

    def _read(self, first_row: int, count: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the `width` positions before each row's last token; what was read before is read again alike."""
        rows, slots = slice(first_row, first_row + count), self.slots
        position_BW = (slots.length_S[rows].unsqueeze(1) - (1 + width) + slots.index_P[:width]).clamp_(min=0)
        features_TE = self._feature_TE[(self._start_S1[rows] + position_BW).flatten()]
        token_BW = slots.token_SP[rows].gather(1, position_BW + 1)
        length = slots.length[rows]
        result = self._pass(first_row, self.decode.fuse(features_TE), token_BW, position_BW, int(length.max()))
        self.read[rows] = length - 1
        return result

    def _pass(self, first_row, hidden_TD, token_BL, position_BL, span) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden state and logits of the last position of each row."""
        B, L = token_BL.shape
        place = self.decode.cache.at(first_row, position_BL, span)
        out_TD = self.decode(hidden_TD, self.embed(token_BL.flatten()), place, *self.decode.rope.at(position_BL))
        out_BD = out_TD.view(B, L, -1)[:, -1]
        return out_BD, self.decode.logits(out_BD)


class DecodeEagle3:
    """`models.eagle3.Eagle3` over a KV cache, in few operations; see engine/decode.py."""

    def __init__(self, draft: Eagle3, slots: Slots) -> None:
        shape, layer = draft.shape, draft.midlayer
        self.groups, self.queries = shape.n_kv_heads, shape.n_heads // shape.n_kv_heads
        self.head_dim = shape.head_dim
        self.cache = KVCache(1, *slots.token_SP.shape, self.groups, self.queries, shape.head_dim, slots.device)
        angles = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angles_PH = torch.outer(torch.arange(slots.positions).float(), angles).repeat(1, 2)
        self.rope = RoPE(torch.cat([angles_PH.cos(), angles_PH.sin()], -1).to(slots.device))
        self.embed_norm, self.hidden_norm, self.mlp_norm, self.norm = (
            RMSNorm(n.weight, n.eps) for n in (layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm, draft.norm))
        self.draft, self.attention, self.mlp = draft, layer.self_attn, layer.mlp

    def reload(self) -> None:
        """Take the projection that is joined from three parameters anew."""
        a, G = self.attention, self.groups
        parts = [w.weight.view(G, -1, w.weight.shape[-1]) for w in (a.q_proj, a.k_proj, a.v_proj)]
        self.wqkv = torch.cat(parts, 1).flatten(0, 1)

    def fuse(self, features_TE: torch.Tensor) -> torch.Tensor:
        return F.linear(features_TE, self.draft.fc.weight)

    def logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        return F.linear(self.norm(hidden_BD), self.draft.lm_head.weight)

    def __call__(self, hidden_TD, embeds_TD, place, cos, sin) -> torch.Tensor:
        B, L = place.shape
        x_TD2 = torch.cat([self.embed_norm(embeds_TD), self.hidden_norm(hidden_TD)], -1)
        qkv_BLGRH = F.linear(x_TD2, self.wqkv).view(B, L, self.groups, self.queries + 2, self.head_dim)
        qk = qkv_BLGRH[..., : self.queries + 1, :]
        qk.copy_(torch.addcmul(qk * cos, rotated(qk), sin))
        hidden_TD = torch.addmm(hidden_TD, self.cache.attend(0, place, qkv_BLGRH), self.attention.o_proj.weight.t())
        x_TD, mlp = self.mlp_norm(hidden_TD), self.mlp
        gate_TF = F.silu(F.linear(x_TD, mlp.gate_proj.weight)).mul_(F.linear(x_TD, mlp.up_proj.weight))
        return torch.addmm(hidden_TD, gate_TF, mlp.down_proj.weight.t())


def eagle3_drafter(draft: Eagle3, model, slots: Slots, settings) -> FeatureDrafter:
    return FeatureDrafter(draft.to(slots.device).requires_grad_(False), DecodeEagle3(draft, slots), model.tok_embeddings, slots, settings)
