"""The metrics that everybody knows: what each one is, on numbers worked out by hand or by plain code."""

import json
import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from groups import accumulate, copied, group_of, padded, random_group, ticket_of
from hypothesis import given
from hypothesis import strategies as st

from asyncspec import catalog
from asyncspec.catalog import KNOWN_AS
from asyncspec.config import Config, RLConfig
from asyncspec.models import experts, head
from asyncspec.models.policy import build, hidden_states
from asyncspec.models.shape import Experts
from asyncspec.rl import loss as losses
from asyncspec.rl.accumulate import GradientAccumulator
from asyncspec.rl.loss import Tokens, policy_loss
from asyncspec.rl.observed import observed, same_version_gaps
from asyncspec.timing.metrics import step_row
from asyncspec.wire import messages as m


def tokens_of(ratio, advantage):
    """Tokens of one response each, with these ratios policy / proximal; and the policy's logprobs."""
    proximal_T = torch.full((len(ratio),), -2.0, dtype=torch.float64)
    advantage_T = torch.tensor(advantage, dtype=torch.float64)
    tokens = Tokens(proximal_T, proximal_T, advantage_T, torch.ones(len(ratio), dtype=torch.int64))
    return (proximal_T + torch.tensor(ratio, dtype=torch.float64).log()).requires_grad_(), tokens


@pytest.mark.parametrize(
    "config, ratio, advantage, low, high",
    [
        # PPO clips only where more of the same would raise the objective.
        (RLConfig(), [0.5, 0.5, 1.0, 2.0, 2.0], [1.0, -1.0, 1.0, 1.0, -1.0], 1, 1),
        (RLConfig(clip_dual=3.0), [0.5, 4.0, 2.0], [-1.0, -1.0, -1.0], 1, 1),  # the dual clip is an upper bound
        (RLConfig(loss_type="gspo"), [0.5, 2.0, 2.0], [-1.0, 1.0, -1.0], 1, 1),
        (
            RLConfig(loss_type="cispo"),
            [0.5, 0.5, 1.0, 2.0],
            [1.0, -1.0, 1.0, -1.0],
            2,
            1,
        ),  # whatever the sign
    ],
)
def test_a_clipped_token_counts_on_the_side_of_its_bound(config, ratio, advantage, low, high):
    logprob_T, tokens = tokens_of(ratio, advantage)
    _, stats = policy_loss(logprob_T, tokens, config, losses.BUILT_IN[config.loss_type])
    found = [int(stats[name]) for name in ("clip_ratio/low_mean", "clip_ratio/high_mean", "ppo/clipped")]
    assert found == [low, high, low + high]


@given(st.sampled_from(sorted(losses.BUILT_IN)), st.integers(0, 10**6), st.sampled_from([0.0, 1.5]))
def test_the_two_sides_are_all_that_is_clipped(kind, seed, dual):
    g = torch.Generator().manual_seed(seed)
    ratio, advantage = (0.5 + 2 * torch.rand(9, generator=g)).tolist(), torch.randn(9, generator=g).tolist()
    logprob_T, tokens = tokens_of(ratio, advantage)
    config = RLConfig(loss_type=kind, clip_dual=dual)
    _, stats = policy_loss(logprob_T, tokens, config, losses.BUILT_IN[kind])
    assert stats["clip_ratio/low_mean"] + stats["clip_ratio/high_mean"] == stats["ppo/clipped"]
    # A ratio within the bounds is never clipped.
    assert stats["ppo/clipped"] <= sum(not 1 - config.clip_low <= each <= 1 + config.clip_high for each in ratio)


def given_group(ticket_id, rewards, lengths, gaps, version=0):
    """A group whose tokens' logprobs differ by these gaps, proximal less behavior."""
    behavior = np.full(len(gaps), -1.0, np.float32)
    arrays = {
        "tokens": np.zeros(len(gaps), np.int32),
        "behavior": behavior,
        "proximal": behavior + np.array(gaps, np.float32),
        "versions": np.full(len(gaps), version, np.int32),
        "lengths": np.array(lengths, np.int32),
    }
    return group_of(ticket_of(ticket_id), rewards), arrays


GROUPS = (
    given_group(0, [1.0, 0.0], [2, 1], [0.0, 0.5, -0.25], version=4),
    given_group(1, [3.0, 3.0], [1, 1], [1.0, 0.0], version=5),
)


def test_the_gap_of_generator_and_trainer_is_taken_over_all_tokens():
    found = observed(5, GROUPS, RLConfig())
    ratios = [math.exp(gap) for gap in (0.0, 0.5, -0.25, 1.0, 0.0)]
    expected = {
        "lag/mean": 3 / 5,
        "lag/max": 1.0,
        "reward_std": (math.sqrt(0.5) + 0.0) / 2,
        "sampling/importance_sampling_ratio/min": min(ratios),
        "sampling/importance_sampling_ratio/mean": sum(ratios) / 5,
        "sampling/importance_sampling_ratio/max": math.e,
        "sampling/sampling_logp_difference/mean": 1.75 / 5,
        "sampling/sampling_logp_difference/max": 1.0,
    }
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_generator_with_other_weights_than_it_names_is_found():
    """Only tokens that their own version has scored count."""
    right, arrays = given_group(0, [1.0], [3], [1e-4, -1e-4, 5.0])
    arrays["versions"][2] = 3  # an older one
    wrong, others = given_group(1, [1.0], [2], [1.0, -2.0])
    groups = [
        (msgspec.structs.replace(right, proximal_version=0), arrays),
        (msgspec.structs.replace(wrong, proximal_version=0, generator="generator1"), others),
        given_group(2, [1.0], [1], [9.0], version=4),
    ]
    found = same_version_gaps(groups)
    assert found == {"generator0": pytest.approx(1e-4, rel=1e-2), "generator1": pytest.approx(1.5)}
    metrics = observed(0, groups, RLConfig())
    assert metrics["sampling/same_version_gap"] == pytest.approx(1.5) and metrics["sampling/same_version_far"] == 0.5


def test_weights_of_responses_are_products_and_no_bound_hides_the_tail():
    groups = [given_group(0, [1.0, 0.0], [2, 1], [2.0, 2.0, -3.0])]
    found = observed(0, groups, RLConfig(correction_level="sequence", correction_high=1.5))
    assert found["sampling/importance_sampling_ratio/max"] == pytest.approx(math.exp(4), rel=1e-6)
    assert found["sampling/importance_sampling_ratio/min"] == pytest.approx(math.exp(-3), rel=1e-6)
    far = observed(0, [given_group(0, [1.0], [1], [900.0])], RLConfig())
    assert math.isfinite(far["sampling/importance_sampling_ratio/max"])


def test_the_entropy_is_exact_without_a_bonus_and_has_no_gradient(small_policy, small_shape):
    group, arrays = random_group(0, [2, 3], [3, 9, 1], 1)
    accumulator = GradientAccumulator(copied(small_shape, small_policy), Config())
    accumulate(accumulator, [(group, arrays)])
    grads = [parameter.grad.clone() for parameter in accumulator.model.parameters()]
    found = accumulator.step()["loss/entropy"]
    # The same step with the entropies never computed.
    plain = GradientAccumulator(copied(small_shape, small_policy), Config())
    before, head_of = head.chosen, []
    head.chosen = lambda *args, **kwargs: (
        head_of.append(before(*args[:-1], entropy=False)._replace(entropy_T=torch.zeros(13))) or head_of[-1]
    )
    try:
        accumulate(plain, [(group, arrays)])
    finally:
        head.chosen = before
    assert head_of and all(map(torch.equal, grads, (each.grad for each in plain.model.parameters())))
    tokens_GL, mask_GL = padded(group.ticket.prompt_tokens, arrays)
    logits = small_policy.lm_head(hidden_states(small_policy, tokens_GL))[:, :-1][mask_GL[:, 1:]]
    expected = torch.distributions.Categorical(logits=logits).entropy().mean()
    assert found == pytest.approx(float(expected), rel=1e-5)


def record(ticket_id, lengths):
    return m.GroupRecord(
        ticket_id, "generator0", 0.5, True, lengths, 0, 0, 0, 1, 0, 0, 1, 0, [m.Phase("generate", 0.0, 1.0)]
    )


@pytest.mark.parametrize("kl", [False, True])
def test_each_well_known_name_has_the_number_of_ours(kl):
    stats = {"loss/kl": 0.25, "loss/entropy": 1.5, "ppo/clipped": 0.125, "grad/norm": 2.0, "optimizer/lr": 1e-4}
    done = m.StepDone(3, 0.0, 2.0, [], {}, stats, [record(0, [3, 7]), record(1, [5, 9])])
    row = step_row(done, {}, {}, kl)
    assert ("kl" in row) == kl
    assert all(row[known] == row[ours] for ours, known in KNOWN_AS if kl or known != "kl")
    assert row["completions/min_length"] == 3 and row["completions/max_length"] == 9
    assert row["completions/mean_length"] == 6.0 and row["completions/clipped_ratio"] == 0.5
    json.dumps(row)


def test_the_catalog_has_every_well_known_name():
    known = {metric.name for metric in catalog.METRICS}
    assert {name for pair in KNOWN_AS for name in pair} <= known
    assert set(losses.REPORTED) | set(observed(5, GROUPS, RLConfig())) <= known


def test_the_load_of_experts_is_that_of_the_tokens_that_the_routers_sent(small_shape):
    model, chosen = build(replace(small_shape, model_type="qwen3_moe", experts=Experts(8, 2, 24, normed=True))), []
    model.init_states()
    for layer in model.layers.values():
        layer.moe.router.register_forward_hook(lambda _, given, found: chosen.append(found[1].flatten().tolist()))
    experts.reset(model)
    hidden_states(model, torch.randint(0, small_shape.vocab_size, (2, 9)))
    count = model.layers["0"].moe.router.num_experts
    loads = [[each.count(expert) for expert in range(count)] for each in chosen]
    assert len(loads) == len(model.layers)
    assert experts.balance(model, None) == {
        "experts/max_violation": pytest.approx(np.mean([max(each) / np.mean(each) - 1 for each in loads])),
        "experts/unused": pytest.approx(np.mean([n == 0 for each in loads for n in each])),
    }
    experts.reset(model)
    assert experts.balance(model, None) == {}
