"""Training of a draft: the loss of each method, and the optimizer steps.

Shape suffixes: B batch, L positions, T = L - 2 positions that a draft over hidden states learns at, D model dimension,
V vocabulary, N heads, H head size, R positions of all rows that count.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F

from asyncspec.drafts.supervision import Supervision
from asyncspec.ledger import checkpoint
from asyncspec.models.policy import hidden_states

LEAST_OVERLAP = 1e-6  # so that its logarithm is finite


def imitation(entropy_BL: torch.Tensor, overlap_BL: torch.Tensor) -> torch.Tensor:
    """Return a draft's loss at each position.

    The loss moves from the cross-entropy, where proposals are seldom accepted, to minus the logarithm of the acceptance
    rate, where they mostly are. The latter gets more proposals accepted if the draft is too small to match the policy,
    but it teaches slowly while acceptance is low.

    It follows LK losses (arXiv 2602.23881), which use the logarithm, and a mixture of KL and total variation whose
    weights depend on acceptance. Here the weight is the position's own acceptance rate, squared.

    Args:
        entropy_BL, overlap_BL: float, both from `Target.compared`.

    Returns:
        float [B, L], with a gradient.
    """
    share_BL = overlap_BL.detach().square()
    return (1 - share_BL) * entropy_BL - share_BL * overlap_BL.clamp(min=LEAST_OVERLAP).log()


def distillation_loss(draft, supervision: Supervision, temperature: float) -> tuple[torch.Tensor, list[float]]:
    """Return the mean `imitation` loss of a separate draft model over positions whose next token the policy sampled.

    Args:
        draft: a small policy.
        temperature: temperature of the sampling and of the target's distributions.

    Returns:
        The mean loss, and a list with one expected acceptance rate.
    """
    tokens_BL, mask_BL, target, _, _, start_B = supervision
    mask_BL = F.pad(mask_BL[:, 1:], (0, 1))
    position_BL = (
        None if start_B is None else start_B.unsqueeze(1) + torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
    )
    hidden_BLD = hidden_states(draft, tokens_BL, position_BL)
    count = mask_BL.sum().clamp(min=1)
    logq_RV = (draft.lm_head(hidden_BLD[mask_BL]) / temperature).log_softmax(-1)
    entropy_R, overlap_R = target.at(mask_BL).compared(logq_RV)
    return imitation(entropy_R, overlap_R).sum() / count, [float(overlap_R.detach().sum() / count)]


def unrolled_loss(
    draft, supervision: Supervision, unroll: int, temperature: float = 1.0
) -> tuple[torch.Tensor, list[float]]:
    """Return the `imitation` loss of a draft over hidden states (`Eagle3`, `MTP`), unrolled as in real drafting.

    This is EAGLE-3's training-time test (arXiv 2503.01840). Pass 0 takes the target's features at every position. Pass
    j takes at position t the output of pass j-1 at t-1, as the draft does for its (j+1)-th token. In pass j, position t
    attends to pass-0 keys up to t-j and to the key of pass i at t-(j-i), for i = 1..j: exactly what the KV cache holds
    then.

    Args:
        unroll: number of passes.
        temperature: temperature of the sampling. The target's distributions have it, and the draft's will have it.

    Returns:
        The mean loss, and the expected acceptance rate of each pass: the sum over the vocabulary of min(p, q).
        Sequences shorter than three tokens teach nothing: for them the loss is a constant.
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
    mask_BT = supervision.mask_BL[:, 2:]
    attend = _UnrolledAttention(T, features_BLE.device)
    hidden_BTD = draft.fuse(features_BLE[:, :T])
    loss, rates = features_BLE.new_zeros(()), []
    for step in range(unroll):
        # The first `step` positions have no output of an earlier pass to take.
        live_BT = mask_BT.clone()
        live_BT[:, :step] = False
        count = live_BT.sum().clamp(min=1)
        out_BTD = draft(hidden_BTD, next_BTD, rope, attend)
        # A large vocabulary makes the head the most expensive part, so it runs over the positions that count only.
        logq_RV = (draft.logits(out_BTD[live_BT]) / temperature).log_softmax(-1)
        entropy_R, overlap_R = target.at(live_BT).compared(logq_RV)
        loss = loss + imitation(entropy_R, overlap_R).sum() / count
        rates.append(float(overlap_R.detach().sum() / count))
        hidden_BTD = F.pad(out_BTD[:, :-1], (0, 0, 1, 0))
    return loss / unroll, rates


class _UnrolledAttention:
    """Attention over the keys and values of the passes of `unrolled_loss`, as the KV cache would hold them."""

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
        hidden = self.distance_TT < step  # position t sees pass-0 keys up to t - step
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
            loss: callable(draft, supervision) -> (loss, expected acceptance rate of each proposal's position).
            lr: learning rate of AdamW.
        """
        self.draft, self.loss, self.lr = draft, loss, lr
        self.optimizer = torch.optim.AdamW(draft.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
        self.steps = self.skipped = 0
        self._rates: list[float] = []  # of a first proposal, in the steps since `expected` was called

    def state(self) -> dict:
        """Return everything that the next step depends on, for `restore`."""
        return {**checkpoint.learned(self.draft, self.optimizer), "steps": [self.steps, self.skipped]}

    def restore(self, state: dict) -> None:
        """Restore the counters from `state`, which `checkpoint.load` has filled."""
        self.steps, self.skipped = state["steps"]

    def anneal(self, progress: float) -> None:
        """Set the learning rate on half a cosine from `lr` to 0. progress: share of the training that is done."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    def step(self, supervision: Supervision) -> tuple[float, list[float]]:
        """Do one optimizer step; return the loss and the expected acceptance rate of each proposal's position.

        A batch with nothing to learn is skipped, and so is one whose gradient is not finite: a draft must never become
        worse than useless. `skipped` counts these batches.
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
        self._rates.append(rates[0])
        return loss.item(), rates

    def expected(self) -> float:
        """Return the expected acceptance rate of a first proposal, the mean over the steps since the last call; -1 if
        there was none.
        """
        rates, self._rates = self._rates, []
        return statistics.fmean(rates) if rates else -1.0
