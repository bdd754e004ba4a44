"""Sampling and exact verification, as pure functions over tensors.

`verify` is speculative sampling (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318). Accept a
proposal x ~ q with probability min(1, p(x)/q(x)). At the first rejection, sample from max(p - q, 0), normalized. If
none is rejected, sample one more token from p. Whatever q is, each emitted token has the distribution p.

Shape suffixes: B batch, K draft length, J = K + 1 positions verified, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import isqrt
from typing import NamedTuple

import torch

LARGE = 8192  # a GPU samples rows of this many weights or more in blocks


class Sampling(NamedTuple):
    """The parameters of the sampling distribution. They apply in this order: temperature, top-k, top-p.

    Top-k keeps exactly k tokens (ties broken by token id); 0 keeps all. Top-p keeps the smallest set of most probable
    tokens whose mass reaches top-p, after renormalizing what top-k kept.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def whole(self, vocabulary: int) -> bool:
        """Whether any token of the vocabulary may be sampled."""
        return self.top_p >= 1.0 and not 0 < self.top_k < vocabulary


AS_IS = Sampling()  # the policy's own distribution
GREEDY = Sampling(top_k=1)  # the most probable token


def sampling_distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Turn logits [..., V] into the probabilities to sample from, float32 [..., V]."""
    (temperature, top_p, top_k), V = sampling, logits.shape[-1]
    if temperature != 1.0:
        logits = logits.float() / temperature
    if sampling.whole(V):
        return logits.softmax(-1, dtype=torch.float32)
    logits = logits.float()
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    if 0 < top_k < V:
        ordered[..., top_k:] = float("-inf")
    probs = ordered.softmax(-1)
    if top_p < 1.0:
        mass_before = probs.cumsum(-1) - probs
        probs = probs.masked_fill(mass_before >= top_p, 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(-1, order, probs)


def sampling_distributions(logits: torch.Tensor, sampling_N: Sequence[Sampling]) -> torch.Tensor:
    """Turn logits [N, ..., V] into the probabilities to sample from, float32 [N, ..., V], each row in its own way."""
    kinds = dict.fromkeys(sampling_N)
    if len(kinds) == 1:
        return sampling_distribution(logits, sampling_N[0])
    result = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    for kind in kinds:
        rows = [row for row, each in enumerate(sampling_N) if each == kind]
        result[rows] = sampling_distribution(logits[rows], kind)
    return result


def sample(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw one index per row by inverting the cumulative sum.

    Args:
        weights: float [..., V], not negative, not necessarily normalized, with a positive entry in each row.
        uniform: float32 [...], multiples of 2**-23 in [0, 1), so that its product with the total stays below the total.

    Returns:
        int64 [...]; never an index whose weight is zero.
    """
    if weights.is_cuda and weights.shape[-1] >= LARGE:
        return sample_in_blocks(weights, uniform)
    # A GPU adds in its own order: in float32 a cumulative sum may exceed the one before it by rounding alone.
    cumulative = weights.cumsum(-1, dtype=torch.float64 if weights.is_cuda else None)
    threshold = uniform.unsqueeze(-1) * cumulative[..., -1:]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)


def sample_in_blocks(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Do what `sample` does, for a large V on a GPU, where long cumulative sums over several rows are slow.

    Draw a block of weights first, then a weight within the block.
    """
    parts = weights.unflatten(-1, (-1, _block(weights.shape[-1])))
    cumulative = parts.sum(-1, dtype=torch.float64).cumsum(-1)
    threshold = uniform.unsqueeze(-1) * cumulative[..., -1:]
    at = torch.searchsorted(cumulative, threshold, right=True)
    before = torch.where(at > 0, cumulative.gather(-1, (at - 1).clamp_(min=0)), 0.0)
    within = parts.take_along_dim(at.unsqueeze(-1), -2).squeeze(-2).cumsum(-1, dtype=torch.float64)
    # The block's sum may differ from `parts.sum` by rounding, so keep the rest of the threshold below it.
    left = torch.minimum(threshold - before, within[..., -1:] * (1 - 2**-50))
    return (at * parts.shape[-1] + torch.searchsorted(within, left, right=True)).squeeze(-1)


@lru_cache
def _block(size: int) -> int:
    """Return the largest divisor of `size` that is at most its square root."""
    return next(block for block in range(isqrt(size), 0, -1) if size % block == 0)


def verify(p_BJV, q_BKV, draft_BK, accept_BK, target_BJ, count_B=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept or replace proposals so that the emitted tokens have the distribution p.

    Args:
        p_BJV: the target's sampling distribution after the prefix and after each proposal, J = K + 1 of them.
        q_BKV: the distribution each proposal was drawn from; None if each is a point mass.
        draft_BK: int64, the proposals.
        accept_BK, target_BJ: uniform numbers in [0, 1), independent of each other and of the proposals.
        count_B: int64, how many of a row's proposals count; None: all. It may depend on the prefix, not on the
            proposals.

    Returns:
        token_BJ, int64: the accepted proposals, then the target's own token; entries beyond the count are meaningless.
        count_B, int64: the number of tokens emitted, from 1 to K + 1.
    """
    B, J, V = p_BJV.shape
    K = J - 1
    p_BK = p_BJV[:, :K].gather(-1, draft_BK.unsqueeze(-1)).squeeze(-1)
    if q_BKV is not None:
        accept_BK = accept_BK * q_BKV.gather(-1, draft_BK.unsqueeze(-1)).squeeze(-1)
    # proposals before the first rejected one
    kept_B = torch.where(accept_BK < p_BK, K, torch.arange(K, device=draft_BK.device)).amin(-1)
    if count_B is not None:
        kept_B = torch.minimum(kept_B, count_B)
    last_B1 = kept_B.unsqueeze(1)
    p_BV = p_BJV.gather(1, last_B1.unsqueeze(-1).expand(B, 1, V)).squeeze(1)
    # Where nothing was rejected, q is zero, so that p - q is p itself and yields the bonus token.
    rejected_B1 = (last_B1 < (K if count_B is None else count_B.unsqueeze(1))).to(p_BV.dtype)
    at_B1 = last_B1.clamp(max=K - 1)
    if q_BKV is None:
        q_BV = torch.zeros_like(p_BV).scatter_(1, draft_BK.gather(1, at_B1), rejected_B1)
    else:
        q_BV = q_BKV.gather(1, at_B1.unsqueeze(-1).expand(B, 1, V)).squeeze(1) * rejected_B1
    residual_BV = (p_BV - q_BV).clamp_(min=0)
    # Where p and q are almost equal, rounding can leave no residual; then sample from p.
    residual_BV = torch.where(residual_BV.sum(-1, keepdim=True) > 0, residual_BV, p_BV)
    own_B = sample(residual_BV, target_BJ.gather(1, last_B1).squeeze(1))
    own_B1 = own_B.unsqueeze(1)
    return torch.cat([draft_BK, own_B1], 1).scatter_(1, last_B1, own_B1), kept_B + 1
