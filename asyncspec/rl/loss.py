"""The loss of a pass, as a sum over tokens: a clipped policy loss, an off-policy correction, KL and entropy.

Three policies meet in it: behavior (which sampled the token, up to `lag` versions old), proximal (the newest that the
logprob actor had), and the one being trained. The importance weight proximal / behavior corrects for the lag; the ratio
policy / proximal is clipped (Hilton et al. 2021, arXiv 2110.00641; AReaL, arXiv 2505.24298).

The losses are sums, not means: the trainer adds up passes, and divides once a step by `divisor`, so the gradient does
not depend on how the groups were divided. What belongs to a response needs all of its tokens: a pass never has a part
of one.

A policy loss is a function

    loss(logprob_T, tokens, config) -> loss_T, clipped_T

of the logprobs under the policy being trained, with gradient, and of `Tokens`. It is not yet weighted or added up;
clipped_T tells which tokens' ratios were clipped: -1 at the lower bound, 1 at the upper bound, 0 not at all.

Shape suffixes: T tokens, R responses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from asyncspec.config import RLConfig

LOG_RATIO_CAP = 20.0
REPORTED = (
    "loss/policy",
    "loss/kl",
    "loss/entropy",
    "ppo/clipped",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "correction/weight_mean",
    "correction/truncated",
    "correction/kl_behavior_proximal",
)


class Tokens(NamedTuple):
    """The response tokens of a pass that the policy sampled; an environment's are context only. Logprobs are at the
    sampling temperature, without gradient.

    proximal_T, behavior_T: logprobs.
    advantage_T: of each token's response.
    length_R: int64, tokens of each response, in order; their sum is T.
    reference_T: logprobs of the reference policy; None without a KL term.
    """

    proximal_T: torch.Tensor
    behavior_T: torch.Tensor
    advantage_T: torch.Tensor
    length_R: torch.Tensor
    reference_T: torch.Tensor | None = None


PolicyLoss = Callable[[torch.Tensor, Tokens, RLConfig], tuple[torch.Tensor, torch.Tensor]]


def ppo(logprob_T, tokens: Tokens, config: RLConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Clip each token's ratio (PPO, arXiv 1707.06347), with two bounds (DAPO, arXiv 2503.14476).

    With rl.clip_dual, a token of negative advantage has no gradient if its ratio is above rl.clip_dual (dual clip,
    arXiv 1912.09729).
    """
    ratio_T, advantage_T = _ratio(logprob_T, tokens.proximal_T), tokens.advantage_T
    surrogate_T, clipped_T = _clipped(ratio_T, advantage_T, config)
    if config.clip_dual:
        bound_T = config.clip_dual * advantage_T
        clipped_T = torch.where((advantage_T < 0) & (surrogate_T < bound_T), 1, clipped_T)
        surrogate_T = torch.where(advantage_T < 0, torch.maximum(surrogate_T, bound_T), surrogate_T)
    return -surrogate_T, clipped_T


def cispo(logprob_T, tokens: Tokens, config: RLConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight the policy gradient by the clipped ratio (CISPO of MiniMax-M1, arXiv 2506.13585). Every token keeps a
    gradient.
    """
    ratio_T = _ratio(logprob_T.detach(), tokens.proximal_T)
    weight_T = ratio_T.clamp(1 - config.clip_low, 1 + config.clip_high)
    return -(weight_T * tokens.advantage_T * logprob_T), (ratio_T - weight_T).sign()


def gspo(logprob_T, tokens: Tokens, config: RLConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Clip each response's ratio, the geometric mean of its tokens' (GSPO, arXiv 2507.18071).

    The loss of a token has the response's ratio as its value and the token's own logprob as its gradient (GSPO-token in
    the paper); added up over a response this is GSPO's gradient.
    """
    log_ratio_T = (logprob_T.detach() - tokens.proximal_T).clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP)
    mean_R = sums(log_ratio_T, tokens.length_R) / tokens.length_R
    ratio_T = (mean_R.repeat_interleave(tokens.length_R) + logprob_T - logprob_T.detach()).exp()
    surrogate_T, clipped_T = _clipped(ratio_T, tokens.advantage_T, config)
    return -surrogate_T, clipped_T


BUILT_IN: dict[str, PolicyLoss] = {each.__name__: each for each in (ppo, cispo, gspo)}


def _clipped(ratio_T, advantage_T, config: RLConfig) -> tuple[torch.Tensor, torch.Tensor]:
    clipped_T = ratio_T.clamp(1 - config.clip_low, 1 + config.clip_high)
    return (
        torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T),
        torch.where(ratio_T * advantage_T > clipped_T * advantage_T, (ratio_T - 1).sign(), 0).detach(),
    )


def correction(tokens: Tokens, config: RLConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the importance weight of each token, and which ones were outside the bounds.

    Weights outside are truncated (IMPALA, arXiv 1802.01561) or set to 0 (IcePop, arXiv 2510.18855). A weight belongs to
    a token or to a response. A masked token still counts in `divisor`.
    """
    weight_T = _ratio(tokens.proximal_T, tokens.behavior_T)
    if config.correction_level == "sequence":
        log_R = sums(tokens.proximal_T - tokens.behavior_T, tokens.length_R).clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP)
        weight_T = log_R.exp().repeat_interleave(tokens.length_R)
    outside_T = (weight_T < config.correction_low) | (weight_T > config.correction_high)
    if config.correction_action == "none":
        return torch.ones_like(weight_T), outside_T
    if config.correction_action == "mask":
        return weight_T.masked_fill(outside_T, 0.0), outside_T  # NaN is outside of nothing, and stays visible
    return weight_T.clamp(config.correction_low, config.correction_high), outside_T


def kl_estimate(logprob_T, reference_T, kind: str) -> torch.Tensor:
    """Return an estimate of KL(policy || reference) from each token, which the policy has sampled (Schulman 2020,
    "Approximating KL divergence"). Of the three, k2 and k3 are never negative, and k1 and k3 have no bias.
    """
    log_ratio_T = reference_T - logprob_T
    if kind == "k1":
        return -log_ratio_T
    if kind == "k2":
        return log_ratio_T**2 / 2
    log_ratio_T = log_ratio_T.clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP)
    return log_ratio_T.exp() - log_ratio_T - 1


def divisor(config: RLConfig, tokens: float, responses: float, longest: int) -> float:
    """Return what the sum of a step's losses is divided by, at least 1.

    Args:
        tokens, responses: the numbers of the step's response tokens and responses, without those that are masked.
        longest: sampling.max_response_tokens.
    """
    found = {
        "token-mean": tokens,
        "token-sum": 1.0,
        "seq-mean-token-mean": responses,
        "seq-mean-token-sum": responses,
        "seq-mean-token-sum-norm": responses * longest,
    }
    return max(1.0, found[config.loss_aggregation])


def policy_loss(
    logprob_T, tokens: Tokens, config: RLConfig, loss: PolicyLoss = ppo, entropy_T: torch.Tensor | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the loss of a pass, to be added up and divided by `divisor`.

    Args:
        logprob_T: logprobs under the policy being trained, with gradient.
        loss: the function that rl.loss_type names.
        entropy_T: entropies of the distributions before the tokens, with gradient; None: they are not known.

    Returns:
        The loss, and the values of REPORTED, summed over tokens whatever the aggregation.
    """
    loss_T, clipped_T = loss(logprob_T, tokens, config)
    weight_T, outside_T = correction(tokens, config)
    # As with verl's seq-mean-token-mean, each token has the weight 1 / length.
    share_T = None
    if config.loss_aggregation == "seq-mean-token-mean":
        share_T = (1 / tokens.length_R.to(logprob_T.dtype)).repeat_interleave(tokens.length_R)

    def added(value_T):
        return (value_T if share_T is None else value_T * share_T).sum()

    total = added(weight_T * loss_T)
    zero_T = torch.zeros_like(logprob_T)
    kl_T = zero_T if tokens.reference_T is None else kl_estimate(logprob_T, tokens.reference_T, config.kl_estimator)
    if config.kl_in == "loss":
        total = total + config.kl_coef * added(kl_T)
    if config.entropy_coef > 0:
        total = total - config.entropy_coef * added(entropy_T)
    with torch.no_grad():
        stats = {
            "loss/policy": (weight_T * loss_T).sum(),
            "loss/kl": kl_T.sum(),
            "loss/entropy": (zero_T if entropy_T is None else entropy_T).sum(),
            "ppo/clipped": (clipped_T != 0).sum(),
            "clip_ratio/low_mean": (clipped_T < 0).sum(),
            "clip_ratio/high_mean": (clipped_T > 0).sum(),
            "correction/weight_mean": weight_T.sum(),
            "correction/truncated": outside_T.sum(),
            # How far behavior and proximal disagree: the effect of the lag on the logprobs (k1 estimator of their KL).
            "correction/kl_behavior_proximal": (tokens.behavior_T - tokens.proximal_T).sum(),
        }
    return total, stats


def sums(value_T: torch.Tensor, length_R: torch.Tensor) -> torch.Tensor:
    """Return the sum over each response."""
    return torch.segment_reduce(value_T, "sum", lengths=length_R)


def _ratio(above_T: torch.Tensor, below_T: torch.Tensor) -> torch.Tensor:
    """Return exp(above - below), capped: infinity for a single token, times an advantage of zero, would be NaN."""
    return (above_T - below_T).clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP).exp()
