"""What a report says should be changed: what stands out, with its evidence, and nothing that may be noise."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncspec.config import Config
from asyncspec.report.advice import advice, replayed
from asyncspec.report.changes import CHANCE, change, fall
from asyncspec.report.run import Run
from asyncspec.timing.attribution import PARTS


def run_of(**metrics):
    """A run of ten equal steps with these seconds of parts, and these other metrics."""
    parts = {f"time/{part}": metrics.pop(part, 0.0) for part in PARTS}
    row = {**parts, "time/step": sum(parts.values()), **{name.replace("__", "/"): v for name, v in metrics.items()}}
    return Run("run", Config(), [row] * 10, [], [])


@pytest.mark.parametrize(
    "run, said",
    [
        (run_of(train=9.5, exposed_generation=0.5), "Training takes 95% of a step, so generation is hidden already."),
        (
            run_of(train=5.0, exposed_generation=5.0),
            "The largest part besides training is exposed generation: 5.00 s of a step of 10.0",
        ),
        (run_of(train=5.0, recovery=5.0), "Recovery takes 50% of a step"),
        (run_of(train=1.0, groups__without_signal=0.75), "75% of the groups have equal rewards"),
        (run_of(train=1.0, tokens__truncated=0.2), "20% of the responses are cut off"),
        (run_of(train=1.0, correction__truncated=0.05), "5.0% of the importance weights are outside"),
    ],
)
def test_advice_names_what_stands_out(run, said):
    assert any(line.startswith(said) for line in advice(run, replayed(run))), advice(run, replayed(run))


def test_advice_names_only_what_stands_out():
    run = run_of(train=1.0, groups__without_signal=0.1, tokens__truncated=0.01, correction__truncated=0.001)
    assert len(advice(run, replayed(run))) == 1


@pytest.mark.parametrize("reward, word", [(0.1, "easier prompts"), (0.9, "harder prompts"), (7.0, "easier or harder")])
def test_groups_without_signal_ask_for_another_difficulty(reward, word):
    run = run_of(train=1.0, groups__without_signal=0.43, reward__mean=reward)
    (line,) = [line for line in advice(run, {}) if "teach nothing" in line]
    assert line.startswith("43% of the groups") and word in line and "rl.dynamic_sampling=replace" in line


def course(seed=0, steps=120, config=None, **ways):
    """A run whose metrics go from one value to another at half of its steps, with a little noise."""
    g, rows = np.random.default_rng(seed), []
    for step in range(steps):
        row = {"step": step, "time/step": 1.0, "time/train": 1.0}
        for name, (before, after) in ways.items():
            value = before if step < steps // 2 else after
            row[name.replace("__", "/")] = value * (1 + 0.02 * g.normal())
        rows.append(row)
    return Run("run", config or Config(), rows, [], [])


@pytest.mark.parametrize(
    "ways, said",
    [
        (dict(spec__acceptance_length=(2.9, 2.4)), "The acceptance length fell from "),
        (dict(entropy=(0.9, 0.1)), "The entropy collapsed from "),
        (
            dict(sampling__sampling_logp_difference__mean=(0.01, 0.05)),
            "The logprobs of trainer and generator grew apart, from ",
        ),
        (dict(kl=(0.05, 0.4)), "The KL from the reference policy grew from "),
    ],
)
def test_advice_names_what_changed_and_since_when(ways, said):
    said_of = {seed: advice(course(seed, **ways), {})[1:] for seed in range(5)}
    for lines in said_of.values():
        (line,) = lines
        assert line.startswith(said)
        told = [float(number) for number in re.findall(r"[0-9.]+[0-9]", line.partition("from ")[2])[:2]]
        assert told == pytest.approx(next(iter(ways.values())), rel=0.05)
        assert abs(int(line.split("since step ")[1].split(":")[0].split(" ")[0]) - 60) <= 6


@pytest.mark.parametrize(
    "ways",
    [
        dict(spec__acceptance_length=(2.4, 2.9)),
        dict(entropy=(0.9, 0.7)),  # it falls in every run that learns
        dict(kl=(0.001, 0.01)),
        dict(sampling__sampling_logp_difference__mean=(0.05, 0.01)),
    ],
)
def test_a_change_for_the_better_or_a_small_one_needs_no_advice(ways):
    assert len(advice(course(**ways), {})) == 1


def test_the_cure_for_a_draft_depends_on_whether_it_is_adapted():
    config = Config()
    config.draft.adapt = False
    ways = dict(spec__acceptance_length=(2.9, 2.4))
    assert "draft.adapt=true" in advice(course(config=config, **ways), {})[1]
    assert "draft.lr" in advice(course(**ways), {})[1]


def test_a_score_that_falls_while_the_reward_rises_is_overfitting():
    run = course(reward__mean=(0.3, 0.8))
    scores = [0.3, 0.4, 0.5, 0.6, 0.66, 0.7, 0.71, 0.7, 0.64, 0.55, 0.5, 0.45]
    for step, row in enumerate(run.rows):
        row |= {"eval/score": scores[step // 10], "eval/policy_version": step // 10 * 10}
    (line,) = advice(run, {})[1:]
    assert line.startswith("The held-out score fell from 0.700 to 0.5") and "overfits" in line
    for row in run.rows:
        row["reward/mean"] = 0.5
    assert len(advice(run, {})) == 1


# Noise is no evidence.
NOISES = {
    "normal": lambda g, n: g.normal(size=n),
    "heavy tails": lambda g, n: g.standard_cauchy(n),
    "shares of few": lambda g, n: g.binomial(16, 0.3, n) / 16,
    "mostly zero": lambda g, n: g.exponential(size=n) * (g.random(n) < 0.1),
}


def remembering(g, n, share):
    """Noise in which each step remembers a share of the one before."""
    noise, values = g.normal(size=n + 50), np.zeros(n + 50)
    for step in range(1, n + 50):
        values[step] = share * values[step - 1] + noise[step]
    return values[50:]


@pytest.mark.parametrize("kind", NOISES)
@pytest.mark.parametrize("steps", [21, 60, 120])
def test_a_change_is_found_in_no_more_than_the_stated_share_of_stationary_series(kind, steps):
    """Of 500 series, half of one is expected at most. Seven would come by chance once in a million times."""
    g = np.random.default_rng(7)
    found = sum(change(np.arange(steps), NOISES[kind](g, steps)) is not None for _ in range(500))
    assert found <= 500 * CHANCE + 5.5


@pytest.mark.parametrize("share, most", [(0.5, 0.02), (0.9, 0.05)])
def test_noise_that_wanders_is_rarely_taken_for_a_change(share, most):
    g = np.random.default_rng(7)
    found = [change(np.arange(60), remembering(g, 60, share)) is not None for _ in range(500)]
    assert np.mean(found) <= most


@pytest.mark.parametrize("evaluations", [12, 20])
def test_evaluations_that_differ_by_chance_do_not_fall(evaluations):
    g = np.random.default_rng(7)
    found = [fall((g.binomial(256, 0.5, evaluations) / 256).tolist()) is not None for _ in range(1000)]
    assert np.mean(found) < 0.01


@given(st.integers(0, 10**6), st.floats(1.0, 1e6), st.integers(90, 150), st.integers(0, 20))
@settings(max_examples=50, deadline=None)
def test_a_step_of_many_spreads_is_always_found_whatever_the_unit_and_with_gaps(seed, unit, steps, gaps):
    g = np.random.default_rng(seed)
    values = unit * (5 + g.normal(size=steps) * 0.1 + 3 * (np.arange(steps) >= steps // 2))
    values[g.choice(steps, min(gaps, steps - 27), replace=False)] = np.nan
    found = change(np.arange(steps) + 100, values)
    assert found is not None and found.after > found.before
    assert abs(found.since - 100 - steps // 2) <= 25


def test_few_or_equal_values_say_nothing():
    assert change(np.arange(20), np.arange(20.0)) is None
    assert change(np.arange(60), np.ones(60)) is None
    assert change(np.arange(60), np.full(60, np.nan)) is None
    assert fall([0.9, 0.8, 0.1]) is None and fall([]) is None
