"""The statistics of an evaluation: pass@k is what counting gives, and intervals hold the truth as often as they say."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.timing.evaluation import fields, interval, names, pass_at, summary

RUNS = 1000
# An interval of 95% misses the truth in 5% of the runs, and in up to 8% where prompts differ much and p is near 0 or 1.
MOST_MISSED = 0.08


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_that_have_a_solved_one(solved, data):
    k = data.draw(st.integers(1, len(solved)))
    chosen = [any(choice) for choice in itertools.combinations(solved, k)]
    assert pass_at(k, len(solved), sum(solved)) == pytest.approx(sum(chosen) / len(chosen), abs=1e-12)


def test_pass_at_k_is_exact_where_binomial_coefficients_are_beyond_floating_point():
    exact = 1 - math.comb(9000, 1000) / math.comb(10_000, 1000)
    assert pass_at(1000, 10_000, 1000) == pytest.approx(exact, abs=1e-12)
    assert pass_at(1, 10_000, 1) == pytest.approx(1e-4, rel=1e-9)


def missed(draw, truth, share):
    """Return the share of runs whose interval does not hold the truth.

    Args:
        draw: callable(generator) that returns the statistic of each prompt, and the number of draws.
    """
    rng, out = np.random.default_rng(0), 0
    for _ in range(RUNS):
        values, draws = draw(rng)
        low, high = interval(values, draws, share)
        out += not low <= truth <= high
    return out / RUNS


@pytest.mark.parametrize("solved, prompts", [(0.5, 30), (0.9, 64), (0.03, 256), (0.98, 256)])
def test_the_interval_of_a_share_holds_the_truth_with_one_rollout_a_prompt(solved, prompts):
    assert missed(lambda rng: (rng.binomial(1, solved, prompts).tolist(), prompts), solved, True) <= MOST_MISSED


@pytest.mark.parametrize("a, b, prompts", [(1.0, 1.0, 40), (0.4, 0.4, 64), (6.0, 2.0, 128), (0.1, 3.0, 100)])
@pytest.mark.parametrize("k", [1, 4])
def test_the_interval_holds_the_truth_although_samples_of_a_prompt_are_alike(a, b, prompts, k):
    """Each prompt has a probability of its own, from a beta distribution."""
    samples, truth = 8, 1 - math.prod((b + i) / (a + b + i) for i in range(k))

    def draw(rng):
        solved = rng.binomial(samples, rng.beta(a, b, prompts))
        return [pass_at(k, samples, int(c)) for c in solved], prompts * (samples // k)

    assert missed(draw, truth, True) <= MOST_MISSED


def test_samples_that_are_taken_for_independent_would_give_an_interval_that_is_too_short():
    def draw(rng):
        solved = rng.binomial(8, rng.beta(0.4, 0.4, 64))
        return [float(i < c) for c in solved for i in range(8)], 8 * 64

    assert missed(draw, 0.5, True) > 0.3


def test_the_interval_of_rewards_of_any_size_holds_the_truth():
    def draw(rng):
        return (rng.normal(3, 2, 50) + rng.normal(0, 1, 50)).tolist(), 50

    assert missed(draw, 3.0, False) <= MOST_MISSED


def test_an_interval_has_a_width_when_all_prompts_are_solved_and_is_unknown_for_one_prompt():
    low, high = interval([1.0] * 20, 20, True)
    assert 0.8 < low < 0.85 and high == 1
    assert interval([0.0] * 20, 80, True) == pytest.approx((0, 1 - low))
    assert interval([0.5] * 4, 16, True)[0] > 0.15
    assert interval([1.0], 4, True) is None


def test_rollouts_whose_reward_failed_are_no_samples():
    rewards = [[1.0, None, 0.0, 1.0], [None, None, None, 0.0], [None] * 4]
    found = summary(rewards, [1, 2, 4])
    assert found["score"] == pytest.approx((2 / 3 + 0) / 2) and found["solved"] == found["score"]
    assert found["pass@1"] == pytest.approx(found["score"])
    assert found["pass@2"] == 1.0 and found["pass@2_low"] is None  # only the first prompt has two samples
    assert found["pass@4"] is None
    assert (found["prompts"], found["left_out"], found["failed"]) == (2, 1, 8)


def test_an_evaluation_without_any_reward_has_no_score():
    found = summary([[None, None]], [1])
    assert (found["score"], found["solved"], found["pass@1"], found["failed"]) == (None, None, None, 2)


def test_overall_fields_are_of_all_prompts_and_each_named_set_has_its_own():
    found = fields({"easy": [[1.0], [1.0], [1.0]], "hard": [[0.0]]}, [1])
    assert (found["eval/score"], found["eval/easy/score"], found["eval/hard/score"]) == (0.75, 1.0, 0.0)
    assert found["eval/hard/prompts"] == 1 and names(found) == ["easy", "hard"]
    alone = fields({"": [[0.5], [2.0]]}, [1])
    assert (alone["eval/score"], alone["eval/solved"]) == (1.25, 0.5) and names(alone) == []
    assert alone["eval/score_low"] < 0  # no share, since a reward is neither 0 nor 1
