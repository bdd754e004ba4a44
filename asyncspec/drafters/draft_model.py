"""A separate small policy as the draft, with its own KV cache.

Its only input is tokens, so it fits any target with the same vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from asyncspec.engine.backend import Target
from asyncspec.engine.decode import DecodeModel
from asyncspec.engine.graphs import Graphs
from asyncspec.models.policy import PolicyShape
from asyncspec.speculation.drafter import Drafter, Proposal
from asyncspec.speculation.verify import sample, sampling_distribution


class DraftModelDrafter(Drafter):
    def __init__(self, model, shape: PolicyShape, target: Target) -> None:
        """
        Args:
            model: a policy in the target's dtype, with a RoPE table for all positions of its slots.
            shape: the shape of that policy.
        """
        self.slots, self.sampling, backend = target.slots, target.sampling, target.backend
        self.draft = model.to(backend.device)
        self.decode = DecodeModel(model, shape, *self.slots.token_SP.shape, backend)
        # positions below this are in the KV cache; `observe` lowers it after a rejection
        self.cached_S = np.zeros(len(self.slots.length), dtype=np.int64)
        self.reload()

    def reload(self) -> None:
        self.decode.reload()

    def launch_by(self, graphs: Graphs | None) -> None:
        self.decode.launch_by(graphs)

    def enter(self, first_row: int, count: int) -> None:
        self.cached_S[first_row : first_row + count] = 0

    def observe(self, first_row: int, features_BLD, position_BL, packed=None) -> None:
        # Only accepted proposals stay in the cache. The token after them is the target's own and not in it yet.
        rows = slice(first_row, first_row + len(position_BL))
        self.cached_S[rows] = np.minimum(self.cached_S[rows], self.slots.length[rows] - 1)

    def behind(self, count: int) -> int:
        # At least the last token: the target chose it itself, so the draft has not processed it.
        return max(1, int((self.slots.length[:count] - self.cached_S[:count]).max()))

    def prefill(self, first_row: int, count: int) -> None:
        self._read(first_row, count, int(self.slots.length[first_row : first_row + count].max()))

    def propose(self, count: int, draft_length: int, uniform_BK) -> Proposal:
        width = self.behind(count)
        if self.decode.graphs is not None and width <= draft_length + 1:
            width = draft_length + 1  # one graph serves any number of accepted proposals
        logits_BV = self._read(0, count, width)
        length_B1 = self.slots.length_S[:count].unsqueeze(1)
        tokens, distributions = [], []
        for step in range(draft_length):
            if step:
                hidden_B1D, _ = self.decode.hidden_states(
                    0, tokens[-1].unsqueeze(1), length_B1 + (step - 1), self.slots.spans(0, count, step)
                )
                logits_BV = self.decode.logits(hidden_B1D.squeeze(1))
            distributions.append(sampling_distribution(logits_BV, self.sampling))
            tokens.append(sample(distributions[-1], uniform_BK[:, step]))
        # All proposals but the last are in the cache now; `observe` takes out those that are rejected.
        self.cached_S[:count] += draft_length - 1
        return Proposal(torch.stack(tokens, 1), torch.stack(distributions, 1))

    def copy(self, sources: Sequence[int], rows: Sequence[int]) -> None:
        self.decode.cache.copy(sources, rows, int(self.slots.length[sources].max()))
        self.cached_S[rows] = self.cached_S[sources]

    def _read(self, first_row: int, count: int, width: int) -> torch.Tensor:
        """Process the last `width` tokens of each row; return logits for the next token, [count, V]."""
        rows, slots = slice(first_row, first_row + count), self.slots
        position_BW = (slots.length_S[rows].unsqueeze(1) - width + slots.index_P[:width]).clamp_(min=0)
        hidden_BWD, _ = self.decode.hidden_states(
            first_row, slots.token_SP[rows].gather(1, position_BW), position_BW, slots.spans(first_row, count)
        )
        self.cached_S[rows] = slots.length[rows]
        return self.decode.logits(hidden_BWD[:, -1])
