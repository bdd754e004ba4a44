"""GRPO: advantages within a group, and the decoupled PPO loss as a sum over tokens.

Three policies meet in the loss: behavior (which sampled the token, up to `lag` versions old), proximal (the newest that
the logprob actor had), and the one being trained. The importance weight proximal / behavior corrects for the lag and is
truncated; the PPO ratio policy / proximal is clipped (Hilton et al. 2021, arXiv 2110.00641; AReaL, arXiv 2505.24298).
Advantages: GRPO (arXiv 2402.03300). KL: the k3 estimator (Schulman 2020, "Approximating KL divergence").

The losses are sums, not means: the trainer adds up groups as they arrive and divides once a step by the step's number
of tokens, so the gradient does not depend on how the groups were streamed.

Shape suffix: T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncspec.config import RLConfig

LOG_RATIO_CAP = 20.0
REPORTED = (
    "loss/policy",
    "loss/kl",
    "ppo/clipped",
    "correction/weight_mean",
    "correction/truncated",
    "correction/kl_behavior_proximal",
)


def group_advantages(rewards: Sequence[float], kind: str) -> torch.Tensor:
    """Return one advantage per sample of a group, float32 [G].

    Args:
        kind: "group" for (r - mean) / (std + 1e-6), "mean" for r - mean (Dr. GRPO, arXiv 2503.20783).
    """
    r_G = torch.tensor(rewards, dtype=torch.float64)
    # Equal rewards give exactly zero: their mean may be rounded, and the division below would amplify the error.
    centered_G = (r_G - r_G.mean()) if r_G.max() > r_G.min() else torch.zeros_like(r_G)
    if kind == "group":
        centered_G = centered_G / (r_G.std(unbiased=False) + 1e-6)
    return centered_G.float()


def policy_loss(
    logprob_T, proximal_T, behavior_T, advantage_T, reference_T, config: RLConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the loss, summed over tokens.

    Args:
        logprob_T: logprobs under the policy being trained, with gradient; all at the sampling temperature.
        proximal_T, behavior_T: logprobs without gradient.
        reference_T: logprobs of the reference policy, or None without a KL term.

    Returns:
        The loss, and the values of REPORTED, all summed over tokens.
    """
    ratio_T = _ratio(logprob_T, proximal_T)
    clipped_T = ratio_T.clamp(1 - config.clip_low, 1 + config.clip_high)
    surrogate_T = torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T)
    weight_T = torch.ones_like(proximal_T)
    if config.correction == "truncated":
        weight_T = _ratio(proximal_T, behavior_T).clamp(max=config.correction_cap)
    policy = -(weight_T * surrogate_T).sum()
    kl = logprob_T.new_zeros(())
    if reference_T is not None:
        log_ratio_T = (reference_T - logprob_T).clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP)
        kl = (log_ratio_T.exp() - log_ratio_T - 1).sum()
    with torch.no_grad():
        stats = {
            "loss/policy": policy.detach(),
            "loss/kl": kl.detach(),
            "ppo/clipped": (ratio_T * advantage_T > clipped_T * advantage_T).sum(),
            "correction/weight_mean": weight_T.sum(),
            "correction/truncated": (_ratio(proximal_T, behavior_T) > config.correction_cap).sum(),
            # How far behavior and proximal disagree: the effect of the lag on the logprobs (k1 estimator of their KL).
            "correction/kl_behavior_proximal": (behavior_T - proximal_T).sum(),
        }
    return policy + config.kl_coef * kl, stats


def _ratio(above_T: torch.Tensor, below_T: torch.Tensor) -> torch.Tensor:
    """Return exp(above - below), capped: infinity for a single token, times an advantage of zero, would be NaN."""
    return (above_T - below_T).clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP).exp()
