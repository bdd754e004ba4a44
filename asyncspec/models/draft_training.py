"""Training a draft on what a policy sampled: supervision from one pass of the policy, then steps on `draft_loss`.

Nothing here can reach the policy: supervision is detached where it is made, and the draft holds none of its parameters.
"""

from __future__ import annotations

import math
from typing import Callable

import torch

from asyncspec.models.policy import hidden_states


@torch.no_grad()
def supervise(model, aux_layers, tokens_BL, mask_BL, temperature: float):
    """What a draft learns from, made by one pass of the policy.

    Args:
        mask_BL: bool, True at response tokens.
        temperature: of the sampling; the draft learns the distribution that is sampled from.

    Returns:
        (features_BLE, embeds_BLD, target_logprobs_BLV, mask_BL): the arguments of `DraftTrainer.step`.
    """
    hidden_BLD, features_BLE = hidden_states(model, tokens_BL, None, aux_layers)
    logprobs_BLV = (model.lm_head(hidden_BLD) / temperature).log_softmax(-1)
    return features_BLE, model.tok_embeddings(tokens_BL), logprobs_BLV, mask_BL


def distillation_loss(draft, tokens_BL, target_logprobs_BLV, mask_BL, temperature: float) -> tuple[torch.Tensor, list[float]]:
    """Soft cross-entropy of a separate draft model, at the positions whose next token the policy sampled.

    Args:
        draft: a small policy.
        target_logprobs_BLV: the policy's log-distribution of the next token at each position, at the temperature.
        mask_BL: bool, True at response tokens.

    Returns:
        The mean loss, and the expected acceptance rate in a list of one.
    """
    hidden_BLD, _ = hidden_states(draft, tokens_BL)
    logq_BLV = (draft.lm_head(hidden_BLD) / temperature).log_softmax(-1)[:, :-1]
    p_BLV, mask_BL = target_logprobs_BLV[:, :-1].exp(), mask_BL[:, 1:].to(logq_BLV.dtype)
    count = mask_BL.sum().clamp(min=1)
    with torch.no_grad():
        rate = float((torch.minimum(p_BLV, logq_BLV.exp()).sum(-1) * mask_BL).sum() / count)
    return -((p_BLV * logq_BLV).sum(-1) * mask_BL).sum() / count, [rate]


class DraftTrainer:
    def __init__(self, draft, loss: Callable, lr: float, total_steps: int = 0) -> None:
        """
        Args:
            draft: `Eagle3`, `MTP` or a small policy.
            loss: callable(draft, *supervision) -> (loss, expected acceptance rate of each position).
            total_steps: with a number, the learning rate is annealed to zero over it; 0 keeps it constant.
        """
        self.draft, self.loss = draft, loss
        self.optimizer = torch.optim.AdamW(draft.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda s: 0.5 * (1 + math.cos(math.pi * min(1.0, s / total_steps))) if total_steps else 1.0)
        self.steps = self.skipped = 0

    def step(self, *supervision) -> tuple[float, list[float]]:
        """One optimizer step; returns the loss and the expected acceptance rate of each position.

        A batch that nothing can be learned from is passed over, and so is one whose gradient is not finite (`skipped` counts
        them): a draft must never become worse than useless.
        """
        loss, rates = self.loss(self.draft, *supervision)
        self.optimizer.zero_grad()
        if loss.requires_grad:
            loss.backward()
        if not loss.requires_grad or not torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0).isfinite():
            self.skipped += 1
            return loss.item(), rates
        self.optimizer.step()
        self.schedule.step()
        self.steps += 1
        return loss.item(), rates
