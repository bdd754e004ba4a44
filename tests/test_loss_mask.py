"""Tokens of environments are context: no loss, metric or version is about them."""

import numpy as np
import pytest
import torch
from groups import copied, first_gradients, plain_logprobs, random_group
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.config import Config, OptimizerConfig, RLConfig, TrainerConfig
from asyncspec.rl.accumulate import GradientAccumulator
from asyncspec.rl.advantage import BUILT_IN, shaped_rewards
from asyncspec.rl.loss import BUILT_IN as LOSSES
from asyncspec.rl.loss import Tokens, divisor, policy_loss
from asyncspec.rl.observed import logprob_gap, observed
from asyncspec.wire.facts import GroupRecord, sampled, sampled_lengths
from asyncspec.wire.messages import Group


def masked(ticket_id, prompt, lengths, seed):
    """Return a random group of which an environment wrote some tokens, never the last one of a response."""
    group, arrays = random_group(ticket_id, prompt, lengths, seed)
    rng = np.random.default_rng(seed)
    arrays["reference"] = (-rng.random(sum(lengths))).astype(np.float32)
    mask = rng.random(sum(lengths)) < 0.6
    mask[np.cumsum(lengths) - 1] = True
    arrays["loss_mask"] = mask.astype(np.uint8)
    arrays["versions"] = np.where(mask, 0, -1).astype(np.int32)
    return group, arrays


def noised(arrays):
    """Return arrays whose logprobs of an environment's tokens are others."""
    mask = sampled(arrays)
    return arrays | {name: np.where(mask, arrays[name], -7.0).astype(np.float32) for name in ("behavior", "proximal")}


GROUPS = [((1, 2, 3), [5, 1, 9, 4]), ((4, 2), [3, 12, 2, 7]), ((5,), [6, 6, 8, 1])]


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_the_gradient_is_that_of_the_sampled_tokens_alone(small_shape, small_policy, loss, aggregation):
    model = copied(small_shape, small_policy)
    batches = [masked(i, prompt, lengths, 10 + i) for i, (prompt, lengths) in enumerate(GROUPS)]
    rl = RLConfig(advantage_estimator="dr_grpo", loss_type=loss, loss_aggregation=aggregation, kl_coef=0.1)
    rl.correction_level = "sequence" if loss == "gspo" else "token"
    found, total, tokens = [], 0.0, 0
    for tokens_per_pass in (1 << 20, 40, 1):
        trainer = TrainerConfig(optimizer=OptimizerConfig(max_grad_norm=1e9), tokens_per_pass=tokens_per_pass)
        config = Config(rl=rl, trainer=trainer)
        found.append(first_gradients(model, config, [(group, noised(arrays)) for group, arrays in batches]))
    for group, arrays in batches:
        mask, length_R = torch.from_numpy(sampled(arrays)), torch.from_numpy(sampled_lengths(arrays))
        advantage_R = torch.tensor(group.rewards) - float(np.mean(group.rewards))
        logprob_T = plain_logprobs(model, list(group.ticket.prompt_tokens), arrays)[mask]
        values = [torch.from_numpy(arrays[name])[mask] for name in ("proximal", "behavior", "reference")]
        about = Tokens(values[0], values[1], advantage_R.repeat_interleave(length_R), length_R, values[2])
        total = total + policy_loss(logprob_T, about, rl, LOSSES[loss])[0]
        tokens += int(mask.sum())
    model.zero_grad()
    (total / divisor(rl, tokens, 12, Config().sampling.max_response_tokens)).backward()
    for grads, _ in found:
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-3, atol=1e-6)


@given(st.integers(0, 10**6), st.sampled_from(["token", "sequence"]))
def test_what_is_observed_is_about_sampled_tokens(seed, level):
    batches = [masked(i, prompt, lengths, seed + i) for i, (prompt, lengths) in enumerate(GROUPS)]
    alone = []
    for group, arrays in batches:
        mask = sampled(arrays)
        kept = {name: arrays[name][mask] for name in ("tokens", "behavior", "proximal", "reference", "versions")}
        alone.append((group, kept | {"lengths": sampled_lengths(arrays).astype(np.int32)}))
    config = RLConfig(correction_level=level, kl_coef=0.2, kl_in="reward")
    noisy = [(group, noised(arrays)) for group, arrays in batches]
    assert observed(0, noisy, config) == pytest.approx(observed(0, alone, config))
    for (group, arrays), (_, kept) in zip(noisy, alone):
        np.testing.assert_array_equal(logprob_gap(arrays), logprob_gap(kept))
        reward_R = torch.tensor(group.rewards, dtype=torch.float64)
        assert torch.equal(*(shaped_rewards(reward_R, each, config, 320) for each in (arrays, kept)))
        made, plain = GroupRecord.of(group, arrays), GroupRecord.of(group, kept)
        assert made.response_tokens == plain.response_tokens and made.version_min == 0 == made.version_max
        assert made.environment_tokens == int((arrays["loss_mask"] == 0).sum())


def test_every_estimator_counts_sampled_tokens(small_shape, small_policy):
    group, arrays = masked(0, (1, 2), [5, 9], 1)
    other = masked(1, (1, 2), [5, 9], 2)
    lengths = torch.from_numpy(np.concatenate([sampled_lengths(arrays), sampled_lengths(other[1])]))
    rewards = torch.tensor([*group.rewards, *other[0].rewards], dtype=torch.float64)
    number = torch.tensor([0, 0, 1, 1])
    model = copied(small_shape, small_policy)
    for name, estimator in BUILT_IN.items():
        accumulator = GradientAccumulator(model, Config(rl=RLConfig(advantage_estimator=name)))
        found = np.concatenate(accumulator.advantages([(group, arrays), other]))
        np.testing.assert_allclose(found, estimator(rewards, number, lengths).float().numpy())


def test_a_group_of_episodes_survives_the_wire():
    from asyncspec.wire.codec import decode, encode

    group, arrays = masked(0, (1, 2), [5, 9], 1)
    message, back = decode([bytes(frame) for frame in encode(group, arrays)])
    assert isinstance(message, Group) and back["loss_mask"].dtype == np.uint8
    assert all((back[name] == arrays[name]).all() for name in arrays)
