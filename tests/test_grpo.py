"""The loss and its accumulation."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from groups import accumulate, copied, first_gradients, plain_logprobs
from groups import random_group as group
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.config import Config, OptimizerConfig, RLConfig, TrainerConfig
from asyncspec.models import policy
from asyncspec.rl import advantage as estimators
from asyncspec.rl.accumulate import GradientAccumulator
from asyncspec.rl.learner import Learner
from asyncspec.rl.loss import Tokens, policy_loss

rewards = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


def group_advantages(values, kind):
    """Return the advantages of one group of responses of one token each."""
    ones = torch.ones(len(values), dtype=torch.int64)
    return estimators.BUILT_IN[kind](torch.tensor(values, dtype=torch.float64), 0 * ones, ones).float()


@given(rewards, st.sampled_from(sorted(estimators.BUILT_IN)))
def test_advantages_sum_to_zero_and_follow_rewards(values, kind):
    advantages = group_advantages(values, kind)
    assert abs(float(advantages.sum())) < 1e-3 * max(1.0, float(advantages.abs().max())) * len(values)
    order = np.argsort(values, kind="stable")
    assert (np.diff(advantages.numpy()[order]) >= -1e-4).all()


@pytest.mark.parametrize("kind", estimators.BUILT_IN)
def test_a_group_without_signal_has_no_advantage(kind):
    assert group_advantages([0.1, 0.1, 0.1], kind).tolist() == [0, 0, 0]


def loss_of(logprob, proximal, behavior, advantage, reference, config):
    """Return the loss of one response."""
    return policy_loss(logprob, Tokens(proximal, behavior, advantage, torch.tensor([len(logprob)]), reference), config)


@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_a_token_with_far_apart_logprobs_leaves_the_gradient_finite(advantage):
    logprob = torch.tensor([-1.0, -0.5], requires_grad=True)
    far = torch.tensor([-200.0, -0.5])
    loss, _ = loss_of(logprob, far, 2 * far, torch.full((2,), advantage), far, RLConfig(kl_coef=0.1))
    loss.backward()
    assert loss.isfinite() and logprob.grad.isfinite().all()


def loss_inputs(seed, n=20):
    g = torch.Generator().manual_seed(seed)
    logprob = -torch.rand(n, generator=g).mul(3)
    return (
        logprob.clone().requires_grad_(),
        logprob + 0.3 * torch.randn(n, generator=g),
        logprob + 0.5 * torch.randn(n, generator=g),
        torch.randn(n, generator=g),
    )


@given(st.integers(0, 10**6))
def test_on_policy_gradient_is_the_policy_gradient(seed):
    logprob, _, _, advantage = loss_inputs(seed)
    same = logprob.detach()
    loss, _ = loss_of(logprob, same, same, advantage, None, RLConfig())
    loss.backward()
    torch.testing.assert_close(logprob.grad, -advantage)


@given(st.integers(0, 10**6))
def test_the_importance_weight_is_truncated_and_clipped_tokens_have_no_gradient(seed):
    logprob, proximal, behavior, advantage = loss_inputs(seed)
    cfg = RLConfig(correction_high=1.5)
    loss_of(logprob, proximal, behavior, advantage, None, cfg)[0].backward()
    ratio = (logprob.detach() - proximal).exp()
    weight = (proximal - behavior).exp().clamp(max=1.5)
    live = torch.where(advantage > 0, ratio < 1 + cfg.clip_high, ratio > 1 - cfg.clip_low)
    torch.testing.assert_close(logprob.grad, torch.where(live, -weight * advantage * ratio, 0.0))


def test_kl_is_zero_at_the_reference_and_positive_elsewhere():
    logprob, proximal, behavior, advantage = loss_inputs(0)
    cfg = RLConfig(kl_coef=0.1)
    assert loss_of(logprob, proximal, behavior, advantage, logprob.detach(), cfg)[1]["loss/kl"] == 0
    assert loss_of(logprob, proximal, behavior, advantage, proximal, cfg)[1]["loss/kl"] > 0


def config_of(rl=None, optimizer=None, tokens_per_pass=1 << 20):
    trainer = TrainerConfig(optimizer=optimizer or OptimizerConfig(), tokens_per_pass=tokens_per_pass)
    return Config(rl=rl or RLConfig(), trainer=trainer)


def gradients(model, batches, tokens_per_pass=1 << 20):
    config = config_of(RLConfig(advantage_estimator="dr_grpo"), OptimizerConfig(lr=1e-3), tokens_per_pass)
    return first_gradients(model, config, batches)


@pytest.fixture
def trainable(small_policy, small_shape):
    return copied(small_shape, small_policy)


def test_streaming_groups_does_not_change_the_gradient(trainable):
    check_gradient(trainable)


@pytest.mark.parametrize("keep", [None, 0, 3])
def test_a_pass_keeps_distributions_only_on_request(trainable, keep):
    accumulator = GradientAccumulator(trainable, config_of(tokens_per_pass=8), keep=keep)
    passes = accumulate(accumulator, [group(0, [2, 3], [3, 4, 5], 1)])
    assert len(passes) == 3 and all((each is not None) == (keep is not None) for each in passes)
    for row, scores in passes if keep is not None else ():
        T, V = len(row.token_T), trainable.config.vocab_size
        assert scores.chosen.kept_TM.shape == (T, keep or V) and (scores.chosen.token_TM is None) == (keep == 0)
        assert not scores.chosen.kept_TM.requires_grad and not scores.features_LE.requires_grad


def test_other_families_learn(other):
    """The gradient equals the explicit one, is bitwise repeatable, and makes the rewarded response likelier than the
    other.
    """
    shape, model = other
    check_gradient(copied(shape, model))
    batches = [group(0, [2, 3], [3, 9, 1], 1), group(1, [4], [7, 2], 2)]
    (first, _), (second, _) = (gradients(copied(shape, model), batches) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    trained = copied(shape, model)
    accumulator = GradientAccumulator(
        trained, config_of(RLConfig(correction_action="none"), OptimizerConfig(lr=3e-3, warmup_steps=0))
    )
    said = []
    for _ in range(3):
        group_, arrays = group(0, [2, 3], [6, 6], 1)
        group_.rewards[:] = [1.0, 0.0]
        arrays["proximal"] = plain_logprobs(trained, group_.ticket.prompt_tokens, arrays).detach().numpy()
        said.append(float(arrays["proximal"][:6].sum() - arrays["proximal"][6:].sum()))
        accumulate(accumulator, [(group_, arrays)])
        accumulator.step()
    assert said[0] < said[1] < said[2]


def check_gradient(trainable):
    """Compare the explicit loss over all groups at once with groups added one by one, in both orders."""
    batches = [group(0, [2, 3], [3, 9, 1], 1), group(1, [4], [7, 2], 2), group(2, [5, 5, 2], [4, 4, 4, 12], 3)]
    streamed, stats = gradients(trainable, batches)
    reversed_, _ = gradients(trainable, batches[::-1])
    total, loss = sum(int(a["lengths"].sum()) for _, a in batches), 0.0
    for group_, arrays in batches:
        logprob = plain_logprobs(trainable, group_.ticket.prompt_tokens, arrays)
        lengths = torch.from_numpy(arrays["lengths"].astype(np.int64))
        part, _ = loss_of(
            logprob,
            torch.from_numpy(arrays["proximal"]),
            torch.from_numpy(arrays["behavior"]),
            group_advantages(group_.rewards, "dr_grpo").repeat_interleave(lengths),
            None,
            RLConfig(),
        )
        loss = loss + part / total
    trainable.zero_grad()
    loss.backward()
    whole = {n: p.grad.clone() for n, p in trainable.named_parameters()}
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in whole.values()]))
    clip = min(1.0, 1.0 / (float(norm) + 1e-6))
    for name in whole:
        torch.testing.assert_close(streamed[name], whole[name] * clip, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(streamed[name], reversed_[name], atol=1e-6, rtol=1e-4)
    assert stats["grad/norm"] == pytest.approx(float(norm), rel=1e-4)


def test_a_gradient_that_is_not_finite_changes_nothing(trainable):
    before = {n: p.clone() for n, p in trainable.named_parameters()}
    accumulator = GradientAccumulator(trainable, Config())
    group_, arrays = group(0, [2], [3, 3], 1)
    arrays["behavior"] = np.full(6, np.nan, np.float32)
    accumulate(accumulator, [(group_, arrays)])
    with pytest.raises(FloatingPointError, match="the step was not taken"):
        accumulator.step()
    for name, parameter in trainable.named_parameters():
        assert torch.equal(parameter, before[name])


def test_a_step_without_a_finite_gradient_is_skipped_saved_and_reported(tmp_path, trainable):
    """A NaN in the data must not reach a weight."""
    from asyncspec import config as configuration

    model, said, config = trainable, [], configuration.Config()
    learner = Learner(config, tmp_path, "cpu")
    learner.accumulator = GradientAccumulator(model, config)
    group_, arrays = group(0, [2, 3], [3, 4], 1)
    bad = {**arrays, "behavior": np.full_like(arrays["behavior"], np.nan)}
    before = {name: p.clone() for name, p in model.named_parameters()}

    def step(number, arrays):
        accumulate(learner.accumulator, [(group_, arrays)])
        return learner.take_step(number, [(group_, arrays)], learner.update, said.append)[0]

    assert step(7, bad) == {"grad/skipped": 1}
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert "step 7 left the policy as it was" in said[0]
    kept = np.load(tmp_path / "skipped" / "step-7.npz")
    assert np.isnan(kept[f"{group_.ticket.ticket_id}/behavior"]).all() and '"ticket_id"' in str(kept["groups"])
    step(8, bad)
    assert np.isfinite(step(9, arrays)["grad/norm"])
    for number in (10, 11):
        step(number, bad)
    with pytest.raises(FloatingPointError, match="3 steps in a row"):
        step(12, bad)


def test_dividing_a_group_does_not_change_its_gradient(trainable):
    batches = [group(0, [2, 3], [3, 9, 1], 1), group(1, [4], [7, 2], 2)]
    whole, stats = gradients(trainable, batches)
    divided, stats_divided = gradients(trainable, batches, tokens_per_pass=12)
    for name in whole:
        torch.testing.assert_close(divided[name], whole[name], atol=1e-6, rtol=1e-4)
    assert stats_divided == pytest.approx(stats, rel=1e-4)


def test_logprobs_do_not_depend_on_how_a_group_is_divided():
    from asyncspec.config import load
    from asyncspec.rl.scorer import Scorer

    group_, arrays = group(0, [2, 3], [3, 9, 1, 14], 1)
    found = []
    for most in (1 << 20, 20):
        scorer = Scorer(load("tiny", ["rl.kl_coef=0.1", f"trainer.tokens_per_pass={most}"]), "cpu")
        scorer.load()
        scorer.supervising = True
        assert scorer.add(group_, arrays) is not None and scorer.passes(group_, arrays) == (1 if most > 20 else 2)
        found.append(scorer.collect(27))
    assert scorer.scores == ["proximal", "reference"] and found[0].shape == (1, 2, 27) and (found[0] < 0).all()
    np.testing.assert_allclose(found[1], found[0], atol=1e-5)


# Weight decay, as its help says.
def test_weight_decay_is_for_matrices_only(small_shape):
    from asyncspec.rl.optimizer import decayed

    for tied in (False, True):
        model = policy.build(replace(small_shape, tied=tied))
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        matrices, others = decayed(model, 0.1)
        assert matrices["weight_decay"] == 0.1 and "weight_decay" not in others
        assert {names[id(p)] for p in others["params"]} == {
            name for name in names.values() if "norm" in name or name == "tok_embeddings.weight"
        }
        assert len(matrices["params"]) + len(others["params"]) == len(names)
