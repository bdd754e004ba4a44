"""The EAGLE-3 drafter: an `Eagle3` draft with its KV cache and the state it carries between two verifications.

Between verifications each row holds the draft's hidden state and its logits for the next token. `propose` samples from
them and drafts on; `extend` reads what the target has verified. A draft replaced in between costs acceptance, never
exactness: proposals are verified against the very distribution they were drawn from.
"""

from __future__ import annotations

import torch

from asyncspec.engine.kv_cache import KVCache
from asyncspec.models.eagle3 import Eagle3
from asyncspec.speculation.verify import sample, sampling_distribution


class Eagle3Drafter:
    def __init__(self, draft: Eagle3, embed, slots: int, positions: int, temperature: float, top_p: float, top_k: int):
        """
        Args:
            embed: the target's embedding, int64 tokens [...] -> [..., D].
            slots, positions: rows and length of the KV cache.
            temperature, top_p, top_k: the sampling settings of the target; the draft follows them to be accepted more.
        """
        shape = draft.shape
        self.draft, self.embed = draft, embed
        self.settings = (temperature, top_p, top_k)
        device = draft.fc.weight.device
        self.cache = KVCache(1, slots, positions, shape.n_kv_heads, shape.head_dim, device)
        self.hidden_SD = torch.zeros(slots, shape.dim, device=device)
        self.logits_SV = torch.zeros(slots, shape.vocab_size, device=device)

    def extend(self, first_row: int, features_BLE, next_token_BL, position_BL, last_B) -> None:
        """Read verified positions.

        Args:
            first_row: the slot of batch row 0; rows are contiguous.
            features_BLE: the target's auxiliary hidden states at `position_BL`.
            next_token_BL: int64, the token that follows each position.
            last_B: int64, index on L of the last valid position of each row; later ones are padding.
        """
        hidden_BLD, logits_BLV = self._forward(first_row, self.draft.fc(features_BLE), next_token_BL, position_BL)
        rows = torch.arange(len(last_B), device=last_B.device)
        slots = slice(first_row, first_row + len(last_B))
        self.hidden_SD[slots] = hidden_BLD[rows, last_B]
        self.logits_SV[slots] = logits_BLV[rows, last_B]

    def propose(self, count: int, length_B, draft_length: int, uniform_BK) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft for the first `count` rows.

        Args:
            length_B: int64, tokens each row has so far.
            uniform_BK: uniform numbers in [0, 1), one a proposal.

        Returns:
            draft_BK, int64 proposals, and q_BKV, the distributions they were drawn from.
        """
        hidden_B1D, logits_BV = self.hidden_SD[:count].unsqueeze(1), self.logits_SV[:count]
        tokens, distributions = [], []
        for step in range(draft_length):
            if step:
                hidden_B1D, logits_B1V = self._forward(
                    0, hidden_B1D, tokens[-1].unsqueeze(1), (length_B + (step - 2)).unsqueeze(1))
                logits_BV = logits_B1V.squeeze(1)
            distributions.append(sampling_distribution(logits_BV, *self.settings))
            tokens.append(sample(distributions[-1], uniform_BK[:, step]))
        return torch.stack(tokens, 1), torch.stack(distributions, 1)

    def move(self, source: int, target: int, length: int) -> None:
        """Row `source` takes the place of row `target`."""
        self.cache.move(source, target, length)
        self.hidden_SD[target] = self.hidden_SD[source]
        self.logits_SV[target] = self.logits_SV[source]

    def _forward(self, first_row, hidden_BLD, token_BL, position_BL):
        self.cache.at(first_row, position_BL)
        return self.draft(hidden_BLD, self.embed(token_BL), self.draft.rope(position_BL),
                          lambda q, k, v: self.cache.attend(0, q, k, v))
