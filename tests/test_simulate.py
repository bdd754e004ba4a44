"""The simulator: replicas against a simulation of each round, pipelines against hand-made cases, and their bounds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncspec.bench.jobs import run_job
from asyncspec.bench.what_if import MOCKED
from asyncspec.config import load
from asyncspec.mock.timings import step_s
from asyncspec.simulate.pipeline import Group, Pipeline, seconds, simulate
from asyncspec.simulate.replica import Replica, RoundCosts
from asyncspec.simulate.rollout import finish_s
from asyncspec.simulate.workload import Acceptance, Lengths, emitted
from asyncspec.timing import timeline


def costs(slots, fixed=0.01, row=1e-3, slope=0.0, k=0, scale=1.0):
    live = np.arange(slots + 1.0)
    return RoundCosts(fixed + row * live, slope * live, np.full(slots + 1, k), np.full(slots + 1, scale))


def played(of_round, tokens, prompt):
    """Return when each response of a replica is done, playing each round: one token for each live response."""
    slots, now, done = len(of_round.base_N) - 1, 0.0, []
    waiting, live = [(n, i) for i, n in enumerate(tokens)], []
    while waiting or live:
        while waiting and len(live) < slots:
            n, i = waiting.pop(0)
            live.append([n, prompt, i])
        now += of_round.base_N[len(live)] + of_round.slope_N[len(live)] * sum(c for _, c, _ in live) / len(live)
        live = [[n - 1, c + 1, i] for n, c, i in live]
        done += [(now, i) for n, _, i in live if n == 0]
        live = [each for each in live if each[0]]
    return [at for at, _ in sorted(done, key=lambda each: each[1])]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=6), min_size=1, max_size=8),
    st.integers(1, 12),
    st.sampled_from([0.0, 1e-4]),
)
def test_a_replica_is_as_fast_as_one_that_plays_each_round(groups, slots, slope):
    """A stage takes the mean context in its middle, and a round that of its begin: half a token apart."""
    of_round = costs(slots, slope=slope)
    of_middle = of_round._replace(base_N=of_round.base_N - 0.5 * of_round.slope_N)
    replica, at, found = Replica(slots, of_middle), 0.0, {}
    for name, tokens in enumerate(groups):
        replica.submit(name, tokens, np.zeros(len(tokens)), 100.0)
    while replica.busy:
        at += replica.next_end()
        name, _ = replica.end()
        found[name] = at
    alone = played(of_round, [n for tokens in groups for n in tokens], 100.0)
    ends = np.cumsum([len(tokens) for tokens in groups])
    for name, (last, count) in enumerate(zip(ends, map(len, groups))):
        assert found[name] == pytest.approx(max(alone[last - count : last]))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(1.0, 50.0), min_size=1, max_size=20), st.lists(st.floats(0.001, 0.2), max_size=20))
def test_looking_ahead_and_stopping_in_between_change_nothing(tokens, pauses):
    straight, halting = Replica(8, costs(8)), Replica(8, costs(8))
    for replica in (straight, halting):
        for name, n in enumerate(tokens):
            replica.submit(name, [n], [0.0], 10.0)

    def ends(replica, pauses):
        at, found = 0.0, []
        for pause in pauses:
            if replica.busy and pause < replica.next_end():
                replica.advance(pause)
                at += pause
        while replica.busy:
            at += replica.next_end()
            found.append((replica.end()[0], at))
        return dict(found)

    expected = ends(straight, [])
    assert ends(halting, pauses) == {name: pytest.approx(at) for name, at in expected.items()}


def test_a_group_knows_the_oldest_version_of_its_tokens():
    replica = Replica(1, costs(1))
    replica.version = 3
    replica.submit(7, [10.0, 10.0], [0.0, 0.0], 5.0)
    replica.advance(0.05)
    replica.version = 4  # the second response begins under it
    replica.submit(8, [1.0], [0.0], 5.0)
    assert [(replica.next_end(), replica.end())[1] for _ in range(2)] == [(7, 3), (8, 4)]


def test_a_response_that_accepts_half_of_each_proposal_needs_as_many_rounds_as_the_sum_says():
    took = finish_s(costs(4, fixed=1.0, row=0.0, k=3), np.full(4, 30.0), np.full(4, 0.5), 10.0, 1)
    assert took == pytest.approx(30 / (1 + 0.5 + 0.25 + 0.125))


@pytest.mark.parametrize("spread", [0.0, 0.1, 0.2])
@pytest.mark.parametrize("k, length", [(3, 2.77), (7, 4.0), (1, 1.5)])
def test_acceptance_has_the_length_that_was_asked_for(k, length, spread):
    """Drawn too: all tokens over all verifications, within 4 standard errors of 20,000 sequences."""
    found = Acceptance.of_length(length, k, spread)
    assert found.length(k) == pytest.approx(length, rel=1e-6)
    rounds = 1 / emitted(found.draw(np.random.default_rng(0), 20_000), k)
    assert abs(rounds.mean() - 1 / length) < 4 * rounds.std() / 20_000**0.5 + 1e-9


def test_lengths_have_the_mean_that_was_asked_for():
    found = Lengths(6000, 0.8, 20480).draw(np.random.default_rng(0), 40_000)
    assert found.max() <= 20480 and abs(found.mean() - 6000) < 4 * found.std() / 200


def group(tokens, reward_s=0.0, logprob_s=0.0, trained=0.0):
    return Group(tokens, np.zeros(len(tokens)), 10.0, reward_s, logprob_s, trained)


def test_a_synchronous_step_is_the_sum_of_its_stages():
    plain = Pipeline(lag=0, generators=1, slots=2, costs=costs(2, fixed=1.0, row=0.0), update_s=3.0, delivery_s=0.5)
    found = simulate(plain, [[group([4.0, 2.0], 0.25, 2.0)]] * 3)
    assert seconds(found) == pytest.approx([4 + 0.25 + 2 + 3, *[0.5 + 4 + 0.25 + 2 + 3] * 2])
    assert found[1].parts == pytest.approx(
        {"prepare": 0.5, "exposed_generation": 4.0, "exposed_reward": 0.25, "exposed_logprob": 2.0, "train": 3.0}
    )
    assert [step.oldest for step in found] == [[0], [1], [2]]


def test_with_lag_1_a_step_takes_as_long_as_the_slower_stage():
    quick = Pipeline(lag=1, generators=1, slots=2, costs=costs(2, fixed=1.0, row=0.0), update_s=9.0)
    assert seconds(simulate(quick, [[group([4.0, 2.0])]] * 6), 2) == pytest.approx([9.0] * 4)
    slow = Pipeline(lag=1, generators=1, slots=2, costs=costs(2, fixed=1.0, row=0.0), update_s=1.0)
    found = simulate(slow, [[group([6.0, 6.0])]] * 8)
    assert seconds(found, 3) == pytest.approx([6.0] * 5)
    assert found[5].parts["exposed_generation"] == pytest.approx(5.0)
    assert all(min(step.oldest) >= s - 1 for s, step in enumerate(found))


def test_two_threads_on_one_core_take_twice_as_long():
    """Generation of 4 s and an update of 9 s at the same time: 4 s of each are done after 8 s."""
    shared = Pipeline(lag=1, generators=1, slots=2, costs=costs(2, fixed=1.0, row=0.0), update_s=9.0, cores=1)
    assert seconds(simulate(shared, [[group([4.0, 2.0])]] * 6), 2)[:3] == pytest.approx([13.0] * 3)


@settings(deadline=None, max_examples=40)
@given(
    st.floats(1.0, 4.0),
    st.integers(1, 4),
    st.integers(1, 4),
    st.lists(st.lists(st.floats(1.0, 40.0), min_size=2, max_size=2), min_size=2, max_size=6),
    st.floats(0.0, 30.0),
)
def test_no_synchronous_step_is_sped_up_beyond_its_bound(length, k, generators, groups, others):
    """With R the share of generation and a the tokens of a round, at most 1 / (R / a + 1 - R)."""
    length = min(length, k + 1)
    accept = Acceptance.of_length(length, k).mean

    def mean_s(k):
        of_round = costs(4, fixed=0.02, row=1e-3 * (1 + k), k=k)
        run = Pipeline(lag=0, generators=generators, slots=4, costs=of_round, update_s=others)
        work = [[Group(tokens, [accept, accept], 10.0, 0.0, 0.0, 0.0) for tokens in groups]] * 4
        found = simulate(run, work)
        return seconds(found, 1).mean(), np.mean([step.parts["exposed_generation"] for step in found[1:]])

    (without, exposed), (with_draft, _) = mean_s(0), mean_s(k)
    share = exposed / without
    assert without / with_draft <= 1 / (share / length + 1 - share) * (1 + 1e-9)


SIZES = ("steps=20", "engine.slots=64")


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        ("policy_lag=1", "mock.train_s=30", "deployment.generators=2"),
        ("policy_lag=0", "mock.train_s=30", "deployment.generators=1"),
        ("policy_lag=2", "mock.train_s=45", "mock.tokens_sigma=1.0", "deployment.generators=1"),
    ],
)
def test_the_pipeline_agrees_with_a_run_on_mocked_gpus(tmp_path, fields):
    """Within 5% of the mean step. Each mocked GPU is a replica, and the responses are those of the run."""
    rows = run_job(tmp_path / "run", *MOCKED, *SIZES, *fields)
    config = load("tiny", [*MOCKED, *SIZES, *fields])
    mock, scale = config.mock, config.mock.time_scale
    slots = config.engine.slots // mock.gpus
    rate = mock.acceptance if config.drafting else 1.0
    live, k = np.arange(slots + 1.0), mock.draft_length if config.drafting else 0
    of_round = RoundCosts(
        scale * np.array([step_s(mock, n, k) for n in live]),
        np.zeros(slots + 1),
        np.full(slots + 1, k),
        np.full(slots + 1, rate),
    )
    count = config.rl.groups_per_step
    run = Pipeline(
        lag=config.policy_lag,
        generators=config.deployment.generators * mock.gpus,
        slots=slots,
        costs=of_round,
        delivery_s=scale * mock.prepare_s,
        update_s=0.0,
        group_s=scale * mock.train_s / count,
    )
    work = [
        [
            group([n * mock.token_unit for n in record.response_tokens], 0.0, scale * mock.logprob_s / count)
            for record in sorted(done.groups, key=lambda g: g.place)
        ]
        for done in timeline.read(tmp_path / "run")
    ]
    measured = np.mean([row["time/step"] for row in rows[4:]])
    assert seconds(simulate(run, work), 4).mean() == pytest.approx(measured, rel=0.05)
