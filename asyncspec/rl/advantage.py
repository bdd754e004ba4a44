"""Advantages: by how much the reward of a response exceeds what was expected, from a group's or a step's rewards.

An estimator is a function of the responses of one group, or, if its attribute `whole_step` is true, of all groups of a
step:

    estimator(reward_R, group_R, length_R) -> advantage_R

    reward_R, advantage_R: float64; the rewards are shaped, see `shaped_rewards`.
    group_R: int64, the number of each response's group.
    length_R: int64, tokens of each response that the policy sampled.

A step's groups can be trained as they arrive only if its estimator looks at one group.

Shape suffixes: R responses, G responses of one group, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch

from asyncspec.config import RLConfig
from asyncspec.rl.loss import kl_estimate, sums
from asyncspec.wire.facts import sampled, sampled_lengths

Estimator = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

EPSILON = 1e-6  # added to a standard deviation in the denominator


def of_each_group(estimate: Callable[[torch.Tensor], torch.Tensor]) -> Estimator:
    """Return the estimator that applies a function of one group's rewards to each group."""

    @wraps(estimate)
    def estimator(reward_R, group_R, length_R):
        advantage_R = torch.empty_like(reward_R)
        for group in group_R.unique():
            advantage_R[group_R == group] = estimate(reward_R[group_R == group])
        return advantage_R

    return estimator


def whole_step(estimator: Estimator) -> Estimator:
    """Mark an estimator as one that gets all groups of a step."""
    estimator.whole_step = True
    return estimator


def _centered(reward_G: torch.Tensor) -> torch.Tensor:
    # Equal rewards give exactly zero: their mean may be rounded, and a division would amplify the error.
    return reward_G - reward_G.mean() if reward_G.max() > reward_G.min() else torch.zeros_like(reward_G)


@of_each_group
def grpo(reward_G: torch.Tensor) -> torch.Tensor:
    """Return (r - mean) / std within the group (arXiv 2402.03300)."""
    return _centered(reward_G) / (reward_G.std(unbiased=False) + EPSILON)


@of_each_group
def dr_grpo(reward_G: torch.Tensor) -> torch.Tensor:
    """Return r - mean within the group (Dr. GRPO, arXiv 2503.20783)."""
    return _centered(reward_G)


@of_each_group
def rloo(reward_G: torch.Tensor) -> torch.Tensor:
    """Return r minus the mean of the others in the group (RLOO, arXiv 2402.14740)."""
    return _centered(reward_G) * (len(reward_G) / max(1, len(reward_G) - 1))


@whole_step
def reinforce_plus_plus(reward_R, group_R, length_R) -> torch.Tensor:
    """Return (r - mean) / std over all response tokens of the step (REINFORCE++, arXiv 2501.03262).

    All tokens of a response have its reward, so a longer response counts more in mean and std.
    """
    return _whitened(reward_R, length_R)


@whole_step
def reinforce_plus_plus_baseline(reward_R, group_R, length_R) -> torch.Tensor:
    """Return r - mean within the group, then less its mean and over its std, taken over the step's response tokens.

    REINFORCE++-baseline, arXiv 2501.03262.
    """
    return _whitened(dr_grpo(reward_R, group_R, length_R), length_R)


def _whitened(value_R: torch.Tensor, length_R: torch.Tensor) -> torch.Tensor:
    if not value_R.max() > value_R.min():
        return torch.zeros_like(value_R)
    share_R = length_R.double() / length_R.sum()
    centered_R = value_R - (share_R * value_R).sum()
    return centered_R / ((share_R * centered_R**2).sum().sqrt() + EPSILON)


BUILT_IN: dict[str, Estimator] = {
    each.__name__: each for each in (grpo, dr_grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline)
}


def shaped_rewards(reward_R, arrays, config: RLConfig, longest: int) -> torch.Tensor:
    """Return rewards less the penalties that the configuration asks for, float64.

    Args:
        reward_R: float64.
        arrays: of a group: lengths, and with rl.kl_in=reward proximal and reference.
        longest: sampling.max_response_tokens.
    """
    if config.overlong_buffer:
        length_R = torch.tensor(arrays["lengths"]).long()
        reward_R = reward_R - overlong_penalty(length_R, longest, config)
    if config.kl_coef > 0 and config.kl_in == "reward":
        sampled_T, length_R = torch.from_numpy(sampled(arrays)), torch.from_numpy(sampled_lengths(arrays))
        proximal_T, reference_T = (torch.tensor(arrays[name])[sampled_T].double() for name in ("proximal", "reference"))
        kl_T = kl_estimate(proximal_T, reference_T, config.kl_estimator)
        reward_R = reward_R - config.kl_coef * sums(kl_T, length_R)
    return reward_R


def overlong_penalty(length_R: torch.Tensor, longest: int, config: RLConfig) -> torch.Tensor:
    """Return the soft overlong punishment (DAPO, arXiv 2503.14476), positive: 0 up to the buffer, then growing in
    proportion to the tokens in it.
    """
    inside_R = (length_R - (longest - config.overlong_buffer)).clamp(0, config.overlong_buffer)
    return config.overlong_penalty * inside_R.double() / config.overlong_buffer
