"""The experts to which the policy's passes sent each token, for routing replay. They lie in rows as keys and values do.

Shape suffixes: those of kv_cache.py, and M layers with experts, K experts of a token, T tokens of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from asyncspec.engine.kv_cache import runs
from asyncspec.engine.protocol import Completion
from asyncspec.speculation.drafter import Packed


class Routes:
    """The experts of the tokens in all rows of an engine's cache."""

    def __init__(self, mixtures: Sequence, slots: int, positions: int, device) -> None:
        """
        Args:
            mixtures: the `Mixture` of each layer that has experts.
        """
        self._mixtures = mixtures
        dtype = torch.uint8 if mixtures[0].count <= 256 else torch.int16
        self.expert_SPMK = torch.zeros(
            slots, positions, len(mixtures), mixtures[0].per_token, dtype=dtype, device=device
        )

    def write(self, first_row: int, position_BL: torch.Tensor, packed: Packed | None) -> None:
        """Keep the choices of the pass that has just run; arguments as in `DecodeModel.hidden_states`."""
        B, L = position_BL.shape
        row_B = torch.arange(first_row, first_row + B, device=position_BL.device)
        at_T = (row_B.unsqueeze(1) * self.expert_SPMK.shape[1] + position_BL).flatten()
        if packed is not None:
            at_T = at_T[torch.from_numpy(packed.at_T)]
        chosen_TMK = torch.stack([mixture.expert_TK for mixture in self._mixtures], 1)
        self.expert_SPMK.flatten(0, 1).index_copy_(0, at_T, chosen_TMK.to(self.expert_SPMK.dtype))

    def copy(self, sources: Sequence[int], rows: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of each source to its row."""
        for source, copies in runs(sources, rows):
            self.expert_SPMK[copies, :length] = self.expert_SPMK[source, :length]

    def of(self, row: int, length: int) -> torch.Tensor:
        """Return the choices for the first `length` tokens of a row, [length, M, K], on the host."""
        return self.expert_SPMK[row, :length].cpu().clone()


def arrays_of(completions: Sequence[Completion], prompt: int) -> dict[str, np.ndarray]:
    """Return `experts` and `prompt_experts` of a group, see wire.messages.Group.

    Args:
        completions: those of the group.
        prompt: the number of tokens of its prompt.
    """
    found = []
    for completion in completions:
        chosen = completion.experts[prompt:].numpy()
        missing = len(completion.tokens) - len(chosen)  # the last token, and what an environment wrote after it
        found.append(np.concatenate([chosen, np.zeros((missing, *chosen.shape[1:]), chosen.dtype)]))
    return {"experts": np.concatenate(found), "prompt_experts": completions[0].experts[:prompt].numpy()}
