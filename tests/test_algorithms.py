"""Advantages, losses, aggregation, corrections and KL, compared with the papers' formulas, written out response by
response in float64; and their gradients, which do not depend on how a step is divided.
"""

import itertools
import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch
from groups import copied, first_gradients, plain_logprobs, random_group
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.config import Config, OptimizerConfig, RLConfig, TrainerConfig, learning
from asyncspec.config.fields import describe
from asyncspec.config.sections import SamplingConfig
from asyncspec.rl import advantage as estimators
from asyncspec.rl import loss as losses
from asyncspec.rl.loss import Tokens, divisor, policy_loss

EXACT = dict(atol=1e-10, rtol=1e-10)
LONGEST = 30  # sampling.max_response_tokens
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum")

# A difference that is only a rounding error would be amplified by the division by the deviation.
eighths = st.integers(-80, 80).map(lambda number: number / 8)
groups_of_rewards = st.lists(
    st.lists(st.tuples(eighths, st.integers(1, 20)), min_size=2, max_size=6), min_size=1, max_size=5
)


# Advantages.
def expected_advantages(kind, groups):
    """groups: of each group, [(reward, tokens)]. Returns all advantages."""
    if kind in ("grpo", "dr_grpo", "rloo"):
        return [each for group in groups for each in of_group(kind, [reward for reward, _ in group])]
    if kind == "reinforce_plus_plus":
        values = [reward for group in groups for reward, _ in group]
    else:
        values = [each for group in groups for each in of_group("dr_grpo", [reward for reward, _ in group])]
    lengths = [length for group in groups for _, length in group]
    tokens = [value for value, length in zip(values, lengths) for _ in range(length)]
    mean, deviation = statistics.fmean(tokens), statistics.pstdev(tokens)
    return [(value - mean) / (deviation + 1e-6) for value in values]


def of_group(kind, rewards):
    mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
    if kind == "rloo":
        rest = sum(rewards)
        return [reward - (rest - reward) / (len(rewards) - 1) for reward in rewards]
    return [(reward - mean) / (deviation + 1e-6 if kind == "grpo" else 1.0) for reward in rewards]


@given(groups_of_rewards, st.sampled_from(sorted(estimators.BUILT_IN)))
def test_advantages_are_the_papers(groups, kind):
    reward_R = torch.tensor([reward for group in groups for reward, _ in group], dtype=torch.float64)
    length_R = torch.tensor([length for group in groups for _, length in group])
    group_R = torch.arange(len(groups)).repeat_interleave(torch.tensor([len(group) for group in groups]))
    found_R = estimators.BUILT_IN[kind](reward_R, group_R, length_R)
    torch.testing.assert_close(found_R, torch.tensor(expected_advantages(kind, groups), dtype=torch.float64), **EXACT)


def test_an_estimator_of_groups_looks_at_no_other_group():
    g = torch.Generator().manual_seed(0)
    reward_R, group_R = torch.rand(12, generator=g, dtype=torch.float64), torch.arange(12) // 4
    ones_R = torch.ones(12, dtype=torch.int64)
    for kind, estimator in estimators.BUILT_IN.items():
        alone = [estimator(reward_R[rows], group_R[rows], ones_R[rows]) for rows in torch.arange(12).view(3, 4)]
        same = torch.equal(torch.cat(alone), estimator(reward_R, group_R, ones_R))
        assert same != getattr(estimator, "whole_step", False), kind


def test_the_configuration_knows_the_names_of_all_algorithms():
    assert set(learning.ESTIMATORS) == set(estimators.BUILT_IN) and set(learning.LOSSES) == set(losses.BUILT_IN)
    of_steps = {name for name, each in estimators.BUILT_IN.items() if getattr(each, "whole_step", False)}
    assert of_steps == set(learning.STEP_ESTIMATORS)
    fields = {field: metadata["choices"] for field, _, metadata in describe(RLConfig)}
    assert fields["loss_aggregation"] == AGGREGATIONS


# Losses.
def response_loss(kind, logprob, proximal, advantage, c):
    """Return the losses of one response's tokens, a list."""
    ratios = [(a - b).exp() for a, b in zip(logprob, proximal)]
    if kind == "gspo":
        ratios = [(logprob - proximal).mean().exp()] * len(logprob)
    low, high = 1 - c.clip_low, 1 + c.clip_high
    if kind == "cispo":
        return [-min(max(float(r.detach()), low), high) * advantage * p for r, p in zip(ratios, logprob)]
    bounded = []
    for r in ratios:
        if advantage >= 0:
            r = r if r < high else torch.tensor(high, dtype=torch.float64)
        else:
            r = r if r > low else torch.tensor(low, dtype=torch.float64)
            if kind == "ppo" and c.clip_dual and r > c.clip_dual:
                r = torch.tensor(c.clip_dual, dtype=torch.float64)
        bounded.append(-r * advantage)
    return bounded


def weights(proximal, behavior, c):
    """Return the importance weights of one response's tokens."""
    logs = (proximal - behavior).tolist()
    found = [math.exp(each) for each in logs]
    if c.correction_level == "sequence":
        found = [math.exp(sum(logs))] * len(logs)
    if c.correction_action == "none":
        return [1.0] * len(logs)
    if c.correction_action == "mask":
        return [w if c.correction_low <= w <= c.correction_high else 0.0 for w in found]
    return [min(max(w, c.correction_low), c.correction_high) for w in found]


def kl(logprob, reference, kind):
    d = logprob - reference
    return {"k1": d, "k2": d * d / 2, "k3": (-d).exp() - 1 + d}[kind]


def expected_loss(responses, c):
    """responses: of each one, (logprob, proximal, behavior, reference, entropy, advantage)."""
    of_responses = []
    for logprob, proximal, behavior, reference, entropy, advantage in responses:
        policy = response_loss(c.loss_type, logprob, proximal, advantage, c)
        total = [w * each for w, each in zip(weights(proximal, behavior, c), policy)]
        if c.kl_in == "loss":
            total = [a + c.kl_coef * b for a, b in zip(total, kl(logprob, reference, c.kl_estimator))]
        of_responses.append([a - c.entropy_coef * b for a, b in zip(total, entropy)])
    tokens = [each for response in of_responses for each in response]
    count = len(of_responses)
    return {
        "token-sum": sum(tokens),
        "token-mean": sum(tokens) / len(tokens),
        "seq-mean-token-mean": sum(sum(each) / len(each) for each in of_responses) / count,
        "seq-mean-token-sum": sum(sum(each) for each in of_responses) / count,
        "seq-mean-token-sum-norm": sum(sum(each) / LONGEST for each in of_responses) / count,
    }[c.loss_aggregation]


settings_of = st.builds(
    RLConfig,
    loss_type=st.sampled_from(sorted(losses.BUILT_IN)),
    loss_aggregation=st.sampled_from(AGGREGATIONS),
    clip_low=st.sampled_from([0.1, 0.2, 1.0]),
    clip_high=st.sampled_from([0.1, 0.28]),
    clip_dual=st.sampled_from([0.0, 1.2, 3.0]),
    correction_level=st.sampled_from(["token", "sequence"]),
    correction_action=st.sampled_from(["truncate", "mask", "none"]),
    correction_low=st.sampled_from([0.0, 0.7]),
    correction_high=st.sampled_from([1.1, 2.0]),
    kl_coef=st.sampled_from([0.0, 0.3]),
    kl_estimator=st.sampled_from(["k1", "k2", "k3"]),
    kl_in=st.sampled_from(["loss", "reward"]),
    entropy_coef=st.sampled_from([0.0, 0.2]),
)


@given(settings_of, st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 10**6))
def test_losses_and_their_gradients_are_the_papers(c, lengths, seed):
    if c.loss_type == "gspo" and c.correction_level == "token":
        # GSPO has one ratio for a response. With different weights of its tokens, the gradient stays with the token.
        c = replace(c, correction_level="sequence")
    g = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    logprob_T = -3 * torch.rand(n, generator=g, dtype=torch.float64)
    noise = [0.4 * torch.randn(n, generator=g, dtype=torch.float64) for _ in range(3)]
    proximal_T, behavior_T, reference_T = (logprob_T + each for each in noise)
    entropy_T = torch.rand(n, generator=g, dtype=torch.float64).requires_grad_()
    advantage_R = torch.randn(len(lengths), generator=g, dtype=torch.float64)
    length_R, leaf_T = torch.tensor(lengths), logprob_T.clone().requires_grad_()
    expected = expected_loss(
        list(
            zip(
                *(each.split(lengths) for each in (leaf_T, proximal_T, behavior_T, reference_T, entropy_T)),
                advantage_R.tolist(),
            )
        ),
        c,
    )
    expected_grads = torch.autograd.grad(expected, [leaf_T, entropy_T], allow_unused=True)
    tokens = Tokens(proximal_T, behavior_T, advantage_R.repeat_interleave(length_R), length_R, reference_T)
    logprob_T.requires_grad_()
    total, stats = policy_loss(logprob_T, tokens, c, losses.BUILT_IN[c.loss_type], entropy_T)
    found = total / divisor(c, n, len(lengths), LONGEST)
    torch.testing.assert_close(found, expected, **EXACT)
    found_grads = torch.autograd.grad(found, [logprob_T, entropy_T], allow_unused=True)
    for found_T, expected_T in zip(found_grads, expected_grads):  # None: the loss does not depend on it
        one, other = (torch.zeros(n, dtype=torch.float64) if each is None else each for each in (found_T, expected_T))
        torch.testing.assert_close(one, other, **EXACT)
    assert set(stats) == set(losses.REPORTED)


@given(st.integers(0, 10**6), st.sampled_from(["k1", "k3"]))
def test_two_estimates_of_the_kl_have_no_bias(seed, kind):
    g = torch.Generator().manual_seed(seed)
    policy_V, reference_V = (torch.randn(7, generator=g, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    exact = (policy_V.exp() * (policy_V - reference_V)).sum()
    found = (policy_V.exp() * losses.kl_estimate(policy_V, reference_V, kind)).sum()
    torch.testing.assert_close(found, exact, **EXACT)


@pytest.mark.parametrize("kind", losses.BUILT_IN)
def test_on_policy_every_loss_has_the_gradient_of_the_policy_gradient(kind):
    same_T, length_R = -torch.rand(9, dtype=torch.float64), torch.tensor([4, 2, 3])
    advantage_T = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64).repeat_interleave(length_R)
    logprob_T = same_T.clone().requires_grad_()
    tokens = Tokens(same_T, same_T, advantage_T, length_R)
    policy_loss(logprob_T, tokens, RLConfig(loss_type=kind), losses.BUILT_IN[kind])[0].backward()
    torch.testing.assert_close(logprob_T.grad, -advantage_T)


def test_a_weight_that_is_not_a_number_stays_visible():
    nan_T = torch.full((3,), math.nan)
    for level, action in itertools.product(("token", "sequence"), ("truncate", "mask")):
        c = RLConfig(correction_level=level, correction_action=action)
        assert losses.correction(Tokens(nan_T, nan_T, nan_T, torch.tensor([3])), c)[0].isnan().all()


# Rewards that are shaped.
@given(st.lists(st.integers(1, LONGEST), min_size=1, max_size=9), st.integers(1, LONGEST), st.floats(0, 5))
def test_the_overlong_penalty_is_dapos(lengths, buffer, penalty):
    c = RLConfig(overlong_buffer=buffer, overlong_penalty=penalty)
    zero_R = torch.zeros(len(lengths), dtype=torch.float64)
    found_R = estimators.shaped_rewards(zero_R, {"lengths": np.array(lengths, np.int32)}, c, LONGEST)
    begin = LONGEST - buffer
    expected = [0.0 if length <= begin else (begin - length) / buffer * penalty for length in lengths]
    torch.testing.assert_close(found_R, torch.tensor(expected, dtype=torch.float64), **EXACT)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_kl_in_the_reward_is_summed_over_the_response(kind):
    g = np.random.default_rng(0)
    lengths, reward_R = [3, 1, 4], torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)
    proximal, reference = -g.random(8), -g.random(8)
    c = RLConfig(kl_coef=0.3, kl_in="reward", kl_estimator=kind)
    arrays = {"lengths": np.array(lengths, np.int32), "proximal": proximal, "reference": reference}
    found_R = estimators.shaped_rewards(reward_R, arrays, c, LONGEST)
    each = kl(torch.from_numpy(proximal), torch.from_numpy(reference), kind).split(lengths)
    expected = [float(r) - 0.3 * float(part.sum()) for r, part in zip(reward_R, each)]
    torch.testing.assert_close(found_R, torch.tensor(expected, dtype=torch.float64), **EXACT)


# Whole steps.
ALGORITHMS = {
    "rloo, seq-mean-token-mean": RLConfig(advantage_estimator="rloo", loss_aggregation="seq-mean-token-mean"),
    "dr_grpo, seq-mean-token-sum-norm": RLConfig(
        advantage_estimator="dr_grpo", loss_aggregation="seq-mean-token-sum-norm", clip_dual=1.5
    ),
    "reinforce_plus_plus, cispo, token-sum": RLConfig(
        advantage_estimator="reinforce_plus_plus", loss_type="cispo", loss_aggregation="token-sum"
    ),
    "reinforce_plus_plus_baseline, gspo": RLConfig(
        advantage_estimator="reinforce_plus_plus_baseline",
        loss_type="gspo",
        loss_aggregation="seq-mean-token-sum",
        correction_level="sequence",
        correction_action="mask",
        correction_low=0.3,
        correction_high=3.0,
    ),
    "kl in the reward, overlong, mask_truncated": RLConfig(
        kl_coef=0.2, kl_in="reward", kl_estimator="k1", overlong_buffer=25, mask_truncated=True
    ),
}


@pytest.fixture
def trainable(small_policy, small_shape):
    return copied(small_shape, small_policy)


def batches_of(rl):
    found = [random_group(0, [2, 3], [3, 9, 1], 1), random_group(1, [4], [7, 2], 2)]
    found.append(random_group(2, [5, 5, 2], [4, 4, 4, 12], 3))
    for group, arrays in found:
        group.truncated[0] = True
        if rl.kl_coef:
            arrays["reference"] = arrays["behavior"][::-1].copy()
    return found


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_gradient_is_the_explicit_one_however_a_step_is_divided(trainable, name):
    """Tolerance: float32 sums in another order."""
    rl = ALGORITHMS[name]
    batches = batches_of(rl)
    found = {}
    for order, most in ((1, 1 << 20), (1, 16), (-1, 16)):
        config = Config(rl=rl, trainer=TrainerConfig(tokens_per_pass=most))
        config.sampling = SamplingConfig(max_response_tokens=LONGEST)
        config.trainer.optimizer.max_grad_norm = 1e9
        found[order, most] = first_gradients(trainable, config, batches[::order])
    trainable.zero_grad()
    explicit(trainable, rl, batches).backward()
    expected = {n: p.grad.clone() for n, p in trainable.named_parameters()}
    largest = max(float(grad.abs().max()) for grad in expected.values())
    for grads, stats in found.values():
        assert stats == pytest.approx(found[1, 1 << 20][1], rel=1e-4)
        for each, grad in expected.items():
            torch.testing.assert_close(grads[each], grad, atol=1e-5 * largest, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_gpu_has_the_gradient_of_a_cpu(trainable, name):
    """Tolerance: float32 sums in another order. Entropies too."""
    rl = replace(ALGORITHMS[name], entropy_coef=0.1)
    found = []
    for device in ("cpu", "cuda:0"):
        config = Config(rl=rl, trainer=TrainerConfig(optimizer=OptimizerConfig(kind="muon", max_grad_norm=1e9)))
        grads, stats = first_gradients(trainable.to(device), config, batches_of(rl))
        found.append(({n: grad.cpu() for n, grad in grads.items()}, stats))
    (expected, cpu_stats), (grads, stats) = found
    largest = max(float(grad.abs().max()) for grad in expected.values())
    for each, grad in expected.items():
        torch.testing.assert_close(grads[each], grad, atol=1e-4 * largest, rtol=1e-3)
    assert stats == pytest.approx(cpu_stats, rel=1e-3, abs=1e-5)


def explicit(model, rl, batches):
    """Return the loss of a step over all groups at once, with the formulas above."""
    rewards = []
    for group, arrays in batches:
        each = torch.tensor(group.rewards, dtype=torch.float64)
        rewards.append(estimators.shaped_rewards(each, arrays, rl, LONGEST).tolist())
    groups = [list(zip(each, arrays["lengths"].tolist())) for each, (_, arrays) in zip(rewards, batches)]
    advantages, responses = iter(expected_advantages(rl.advantage_estimator, groups)), []
    for group, arrays in batches:
        lengths = arrays["lengths"].tolist()
        logprob = plain_logprobs(model, group.ticket.prompt_tokens, arrays).split(lengths)
        others = [torch.from_numpy(arrays[name]).split(lengths) for name in ("proximal", "behavior")]
        reference = torch.from_numpy(arrays.get("reference", arrays["proximal"])).split(lengths)
        for index, tokens in enumerate(zip(logprob, *others, reference)):
            advantage = next(advantages)
            if not (rl.mask_truncated and group.truncated[index]):
                responses.append((*tokens, torch.zeros(lengths[index]), advantage))
    return expected_loss(responses, rl)


def test_a_step_of_truncated_responses_alone_changes_nothing(trainable):
    group, arrays = random_group(0, [2, 3], [3, 9], 1)
    group.truncated[:] = [True, True]
    before = {n: p.detach().clone() for n, p in trainable.named_parameters()}
    from asyncspec.rl.accumulate import GradientAccumulator

    accumulator = GradientAccumulator(trainable, Config(rl=RLConfig(mask_truncated=True)))
    assert accumulator.add(group, arrays) == [] and accumulator.flush() == []
    assert accumulator.step()["grad/norm"] == 0
    assert all(torch.equal(before[n], p) for n, p in trainable.named_parameters())


def test_an_estimator_of_the_step_trains_once_all_groups_are_there(trainable):
    from asyncspec.rl.accumulate import GradientAccumulator

    for name, early in (("grpo", True), ("reinforce_plus_plus", False)):
        config = Config(rl=RLConfig(advantage_estimator=name), trainer=TrainerConfig(tokens_per_pass=10))
        accumulator = GradientAccumulator(trainable, config)
        rounds = [accumulator.add(*each) for each in batches_of(config.rl)]
        assert any(rounds) == early and accumulator.flush()
        accumulator.clear()
        assert accumulator.flush() == []
