"""What a run's learning says should be changed: sentences with their evidence. See advice.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from asyncspec.report.changes import Change, change, fall
from asyncspec.report.run import Run
from asyncspec.timing.metrics import scores_by_version

MUCH, MANY, SOME, FEW = 0.5, 0.3, 0.1, 0.01  # shares from which a fault is named
COLLAPSED = 0.3  # of the first entropy
FAR = 0.1  # nats of KL per token from which the policy is another one than the reference


def learning(run: Run) -> list[str]:
    """Return the advice about what the policy learns from."""
    parts: tuple[Callable[[Run], Iterator[str]], ...] = (_shares, _overfitting, _entropy, _gap, _kl, _acceptance)
    return [line for part in parts for line in part(run)]


def _shares(run: Run) -> Iterator[str]:
    if (share := _mean(run, "groups/without_signal")) >= MANY:
        yield (
            f"{share:.0%} of the groups have equal rewards and teach nothing: use {_difficulty(run)} prompts, a larger "
            "rl.group_size, or rl.dynamic_sampling=replace."
        )
    if (share := _mean(run, "tokens/truncated")) >= SOME:
        yield f"{share:.0%} of the responses are cut off: raise sampling.max_response_tokens, or rl.overlong_buffer."
    if (share := _mean(run, "ppo/clipped")) >= MUCH:
        yield f"{share:.0%} of the tokens are clipped: lower trainer.optimizer.lr or policy_lag."


def _difficulty(run: Run) -> str:
    """Say which prompts would have more signal. Rewards need not be 0 or 1."""
    rewards = run.series("reward/mean")
    rewards = rewards[np.isfinite(rewards)]
    if not len(rewards) or rewards.min() < 0 or rewards.max() > 1:
        return "easier or harder"
    return "easier" if rewards.mean() < 0.5 else "harder"


def _overfitting(run: Run) -> Iterator[str]:
    rose = _change(run, "reward/mean")
    fell = fall(list(scores_by_version(run.rows).values()))
    if rose is not None and rose.after > rose.before and fell is not None:
        yield (
            f"The held-out score fell from {fell[0]:.3f} to {fell[1]:.3f} while the reward rose from {rose.before:.3f} "
            f"to {rose.after:.3f}: the policy overfits. Use more prompts, fewer steps, or rl.kl_coef; check what the "
            "reward really rewards in the rollouts."
        )


def _entropy(run: Run) -> Iterator[str]:
    found = _change(run, "entropy")
    if found is not None and found.after < COLLAPSED * found.before:
        yield (
            f"The entropy collapsed {_told(found)} nats: rollouts of a group become alike. Raise rl.clip_high or "
            "rl.entropy_coef, or lower trainer.optimizer.lr."
        )


def _gap(run: Run) -> Iterator[str]:
    lower = "lower policy_lag" if run.config.policy_lag else "have trainer and engine compute in the same dtype"
    found = _change(run, "sampling/sampling_logp_difference/mean")
    if found is not None and found.after > found.before:
        yield f"The logprobs of trainer and generator grew apart, {_told(found)} nats per token: {lower}."
    if (share := _mean(run, "correction/truncated")) >= FEW:
        largest = run.series("sampling/importance_sampling_ratio/max")[run.steady]
        tail = f", up to {np.nanmax(largest):.3g}" if np.isfinite(largest).any() else ""
        yield (
            f"{share:.1%} of the importance weights are outside rl.correction_low and rl.correction_high{tail}: "
            f"{lower}, or set rl.correction_action=mask."
        )


def _kl(run: Run) -> Iterator[str]:
    found = _change(run, "kl")
    if found is not None and found.after > max(FAR, found.before):
        yield (
            f"The KL from the reference policy grew {_told(found)} nats per token: raise rl.kl_coef, or lower "
            "trainer.optimizer.lr."
        )


def _acceptance(run: Run) -> Iterator[str]:
    found = _change(run, "spec/acceptance_length") if run.config.drafting else None
    if found is not None and found.after < found.before:
        adapted = bool(run.config.draft_trainer)
        cure = "raise draft.lr, or train the draft anew" if adapted else "set draft.adapt=true, or train a draft"
        yield f"The acceptance length fell {_told(found)}: {cure} (asyncspec draft train)."


def _told(found: Change) -> str:
    return f"from {found.before:.3g} to {found.after:.3g} since step {found.since}"


def _change(run: Run, key: str) -> Change | None:
    return change(run.series("step")[run.steady], run.series(key)[run.steady])


def _mean(run: Run, key: str) -> float:
    """Return a metric's mean over the steady steps, 0 if the run does not have it."""
    values = run.series(key)[run.steady]
    return float(np.nanmean(values)) if np.isfinite(values).any() else 0.0
