"""Mock GPUs: their configured figures, and a run with them."""

import time

import pytest
import torch
from runs import Running, rows
from runs import check_finished as check

from asyncspec.config import load
from asyncspec.engine.protocol import Request
from asyncspec.mock import timings
from asyncspec.mock.engine import MockEngine
from asyncspec.timing.metrics import summed


def test_the_mock_deployments_figures_reproduce_the_published_synchronous_step():
    """arXiv 2604.26779, RL-Think on 32 GPUs: 133.6 s of generation without speculation, 87.0 s with."""
    config = load("mock_rl_think_8b")
    lengths = [timings.response_tokens(config.mock, seed) for seed in range(96 * 16)]
    assert timings.generation_s(config.mock, lengths, 32, 0) == pytest.approx(133.6, rel=0.02)
    assert timings.generation_s(config.mock, lengths, 32, config.mock.draft_length) == pytest.approx(87.0, rel=0.02)


def test_the_mock_engine_takes_the_configured_time_and_stamps_versions():
    config = load("mock_rl_think_8b", ["mock.time_scale=0.03", "speculation.method=none", "engine.slots=64"])
    engine, seeds = MockEngine(config), list(range(48))
    expected = (
        timings.generation_s(
            config.mock, [timings.response_tokens(config.mock, seed) for seed in seeds], config.mock.gpus, 0
        )
        * 0.03
    )
    engine.submit(Request(1, [1], seeds, 0))
    start, done = time.monotonic(), []
    while engine.live or engine.waiting:
        done += engine.poll()
        if engine.version == 0 and time.monotonic() - start > expected / 4:
            engine.load_policy({"weight": torch.ones(config.mock.weights)}, 1)
    # a sleep is never shorter than asked, but longer on a busy machine
    assert 0.95 * expected < time.monotonic() - start < 5 * expected
    assert sorted(c.sample for c in done) == seeds
    for c in done:
        assert len(c.versions) == len(c.tokens) and torch.all(c.versions.diff() >= 0)
    assert {v for c in done for v in c.versions.tolist()} == {0, 1} and not any(c.reached_at for c in done)


def test_the_mock_engines_acceptance_by_position_gives_its_acceptance_length():
    config = load("mock_rl_think_8b", ["mock.time_scale=0.0001", "engine.slots=64"])
    engine, done = MockEngine(config), []
    engine.submit(Request(1, [1], list(range(32)), 0))
    while engine.live or engine.waiting:
        done += engine.poll()
    reached, accepted = summed(c.reached_at for c in done), summed(c.accepted_at for c in done)
    assert len(reached) == config.mock.draft_length and reached[0] == sum(c.verifications for c in done)
    assert 1 + sum(accepted) / reached[0] == pytest.approx(config.mock.acceptance, rel=0.01)  # rounded per sample


@pytest.mark.slow
def test_a_run_with_mocked_gpus_keeps_its_lag_and_its_ledger(tmp_path):
    run = Running(
        tmp_path / "run",
        "--config",
        "mock_rl_think_8b",
        "--run-dir",
        str(tmp_path / "run"),
        "--steps",
        "4",
        "rl.groups_per_step=16",
        "deployment.nodes=",
        "deployment.generators=2",
        "trainer.ranks=2",
        "deployment.logprobs=2",
        "mock.time_scale=0.01",
        "speculation.method=ngram",
        "deployment.faults=generator1:work:100:kill",
    )
    run.end()
    check(tmp_path / "run", 4)
    assert rows(tmp_path / "run")[-1]["recovery/generators_lost"] == 1
