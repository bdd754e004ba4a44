"""Training a draft on what a policy sampled: supervision from one pass of the policy, then steps on `draft_loss`.

Nothing here can reach the policy: supervision is detached where it is made, and the draft holds none of its parameters.
"""

from __future__ import annotations

import math

import torch

from asyncspec.models.eagle3 import draft_loss
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


class DraftTrainer:
    def __init__(self, draft, lr: float, unroll: int, total_steps: int = 0) -> None:
        """
        Args:
            draft: `Eagle3` or `MTP`.
            unroll: passes of training-time test.
            total_steps: with a number, the learning rate is annealed to zero over it; 0 keeps it constant.
        """
        self.draft, self.unroll = draft, unroll
        self.optimizer = torch.optim.AdamW(draft.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda s: 0.5 * (1 + math.cos(math.pi * min(1.0, s / total_steps))) if total_steps else 1.0)
        self.steps = self.skipped = 0

    def step(self, features_BLE, embeds_BLD, target_logprobs_BLV, mask_BL) -> tuple[float, list[float]]:
        """One optimizer step; returns the loss and the expected acceptance rate of each unrolled position.

        A batch too short to unroll over is passed over, and so is one whose gradient is not finite (`skipped` counts them):
        a draft must never become worse than useless.
        """
        if mask_BL.shape[1] < 3:
            self.skipped += 1
            return 0.0, [0.0] * self.unroll
        loss, rates = draft_loss(self.draft, features_BLE, embeds_BLD, target_logprobs_BLV, mask_BL, self.unroll)
        self.optimizer.zero_grad()
        loss.backward()
        if not torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0).isfinite():
            self.skipped += 1
            return loss.item(), rates
        self.optimizer.step()
        self.schedule.step()
        self.steps += 1
        return loss.item(), rates
