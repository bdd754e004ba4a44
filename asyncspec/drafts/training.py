"""Training a draft: the losses of each kind of draft, and the steps on them.

Shape suffixes: B batch, L positions, T = L - 2 positions a draft over hidden states learns at, D model dimension, V
vocabulary, N heads, H head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from asyncspec.drafts.supervision import Supervision
from asyncspec.ledger import checkpoint
from asyncspec.models.policy import hidden_states

LEAST_OVERLAP = 1e-6  # so that its logarithm is finite


def imitation(entropy_BL: torch.Tensor, overlap_BL: torch.Tensor) -> torch.Tensor:
    """What a draft minimises at each position: cross-entropy while its proposals are seldom accepted there, minus the
    logarithm of how often they are accepted once they mostly are.

    A draft too small to be the policy gets more accepted by the latter, but learns it slowly from far away. After LK
    losses (arXiv 2602.23881), which have the logarithm, and a mixture (of KL and total variation) that moves with
    acceptance; this one moves with each position's own, squared.

    Args:
        entropy_BL, overlap_BL: float, of `Target.compared`.

    Returns:
        float [B, L], with a gradient.
    """
    share_BL = overlap_BL.detach().square()
    return (1 - share_BL) * entropy_BL - share_BL * overlap_BL.clamp(min=LEAST_OVERLAP).log()


def distillation_loss(draft, supervision: Supervision, temperature: float) -> tuple[torch.Tensor, list[float]]:
    """`imitation` of a separate draft model, at the positions whose next token the policy sampled.

    Args:
        draft: a small policy.
        temperature: of the sampling, which the target's distributions are at.

    Returns:
        The mean loss, and the expected acceptance rate in a list of one.
    """
    tokens_BL, mask_BL, target, _, _, start_B = supervision
    position_BL = (
        None if start_B is None else start_B.unsqueeze(1) + torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
    )
    hidden_BLD = hidden_states(draft, tokens_BL, position_BL)
    logq_BLV = (draft.lm_head(hidden_BLD) / temperature).log_softmax(-1)[:, :-1]
    mask_BL = mask_BL[:, 1:].to(logq_BLV.dtype)
    count = mask_BL.sum().clamp(min=1)
    entropy_BL, overlap_BL = target.between(0, logq_BLV.shape[1]).compared(logq_BLV)
    return (imitation(entropy_BL, overlap_BL) * mask_BL).sum() / count, [
        float((overlap_BL.detach() * mask_BL).sum() / count)
    ]


def unrolled_loss(
    draft, supervision: Supervision, unroll: int, temperature: float = 1.0
) -> tuple[torch.Tensor, list[float]]:
    """`imitation` of a draft over hidden states (`Eagle3`, `MTP`), unrolled over the positions it will really draft.

    This is EAGLE-3's training-time test (arXiv 2503.01840). Pass 0 reads the target's features everywhere; pass j reads
    at position t the output of pass j-1 at t-1, as it does when drafting its (j+1)-th token. In pass j, position t
    attends to pass-0 keys up to t-j and to the key of pass i at t-(j-i), for i = 1..j: just what the KV cache holds
    then.

    Args:
        unroll: number of passes.
        temperature: of the sampling, which the target's distributions are at and the draft's will be.

    Returns:
        The mean loss, and for each pass the expected acceptance rate, sum over the vocabulary of min(p, q). Of
        sequences shorter than three tokens there is nothing to learn: the loss is a constant.
    """
    features_BLE, embeds_BLD, start_B = supervision.features_BLE, supervision.embeds_BLD, supervision.start_B
    B, L, _ = features_BLE.shape
    T = L - 2  # position t needs the token at t+1 and the target's distribution of the token at t+2
    if T < 1:
        return features_BLE.new_zeros(()), [0.0] * unroll
    position_BT = torch.arange(T, device=features_BLE.device).expand(B, T)
    rope = draft.rope(position_BT if start_B is None else position_BT + start_B.unsqueeze(1))
    next_BTD = embeds_BLD[:, 1 : T + 1]
    target = supervision.target.between(1, T + 1).within(getattr(draft, "t2d_V", None), getattr(draft, "d2t_U", None))
    mask_BT = supervision.mask_BL[:, 2:].to(features_BLE.dtype)
    attend = _UnrolledAttention(T, features_BLE.device)
    hidden_BTD = draft.fuse(features_BLE[:, :T])
    loss, rates = features_BLE.new_zeros(()), []
    for step in range(unroll):
        # The first `step` positions have no pass before them to read from.
        live_BT = mask_BT.clone()
        live_BT[:, :step] = 0
        count = live_BT.sum().clamp(min=1)
        out_BTD, logits_BTV = draft(hidden_BTD, next_BTD, rope, attend)
        entropy_BT, overlap_BT = target.compared((logits_BTV / temperature).log_softmax(-1))
        loss = loss + (imitation(entropy_BT, overlap_BT) * live_BT).sum() / count
        rates.append(float((overlap_BT.detach() * live_BT).sum() / count))
        hidden_BTD = F.pad(out_BTD[:, :-1], (0, 0, 1, 0))
    return loss / unroll, rates


class _UnrolledAttention:
    """Keys and values of the passes of `unrolled_loss`, attended to as the KV cache would hold them."""

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


class DraftTrainer:
    def __init__(self, draft, loss: Callable, lr: float) -> None:
        """
        Args:
            draft: `Eagle3`, `MTP` or a small policy.
            loss: callable(draft, supervision) -> (loss, expected acceptance rate of each position).
        """
        self.draft, self.loss, self.lr = draft, loss, lr
        self.optimizer = torch.optim.AdamW(draft.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
        self.steps = self.skipped = 0

    def state(self) -> dict:
        """All that the next step depends on; `restore` takes it back."""
        return {**checkpoint.learned(self.draft, self.optimizer), "steps": [self.steps, self.skipped]}

    def restore(self, state: dict) -> None:
        """Take back what `checkpoint.load` has read into `state`."""
        self.steps, self.skipped = state["steps"]

    def anneal(self, progress: float) -> None:
        """Set the learning rate for this share of the training, half a cosine from `lr` to zero."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    def step(self, supervision: Supervision) -> tuple[float, list[float]]:
        """One optimizer step; returns the loss and the expected acceptance rate of each position.

        A batch that nothing can be learned from is passed over, and so is one whose gradient is not finite (`skipped`
        counts them): a draft must never become worse than useless.
        """
        loss, rates = self.loss(self.draft, supervision)
        self.optimizer.zero_grad()
        if loss.requires_grad:
            loss.backward()
        if not loss.requires_grad or not torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0).isfinite():
            self.skipped += 1
            return loss.item(), rates
        self.optimizer.step()
        self.steps += 1
        return loss.item(), rates
