"""The optimizers and the learning rate: which parameter has which, the schedules, and a step after a restart."""

import json
import math

import pytest
import torch
from groups import accumulate, copied, random_group

from asyncspec.config import Config, OptimizerConfig, RLConfig, TrainerConfig, resolve_path, work
from asyncspec.launch import estimate
from asyncspec.ledger import checkpoint
from asyncspec.models import policy
from asyncspec.rl.accumulate import GradientAccumulator
from asyncspec.rl.optimizer import learning_rate, make_optimizers

STEPS = 12


def test_the_learning_rate_warms_up_and_falls_to_zero_at_the_end():
    for schedule in ("constant", "linear", "cosine"):
        config = OptimizerConfig(lr=0.5, warmup_steps=4, schedule=schedule)
        found = [learning_rate(config, updates, STEPS) for updates in range(STEPS + 1)]
        assert found[:5] == [0.125, 0.25, 0.375, 0.5, 0.5]
        rest = {
            "constant": [0.5] * 8,
            "linear": [0.5 * (12 - updates) / 8 for updates in range(5, 13)],
            "cosine": [0.25 * (1 + math.cos(math.pi * (updates - 4) / 8)) for updates in range(5, 13)],
        }[schedule]
        assert found[5:] == pytest.approx(rest, abs=1e-15)
        assert learning_rate(config, 100, STEPS) == (0.5 if schedule == "constant" else 0)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_warm_up_longer_than_the_run_and_none_at_all_are_possible(schedule):
    assert learning_rate(OptimizerConfig(lr=1e-3, warmup_steps=0, schedule=schedule), 0, 1) == 1e-3
    config = OptimizerConfig(lr=1.0, warmup_steps=10, schedule=schedule)
    assert [learning_rate(config, updates, 5) for updates in (0, 4, 9)] == [0.1, 0.5, 1.0]


def names_of(model, optimizer):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]}


def test_muon_gets_the_matrices_of_the_layers_and_adamw_the_rest(other):
    model = copied(*other)
    muon, adamw = make_optimizers(model, OptimizerConfig(kind="muon", weight_decay=0.1))
    matrices = {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and not name.startswith(("lm_head", "tok_embeddings"))
    }
    assert names_of(model, muon) == matrices and any("attention" in name for name in matrices)
    assert names_of(model, adamw) == {name for name, _ in model.named_parameters()} - matrices
    assert muon.param_groups[0]["weight_decay"] == 0.1


def test_a_step_of_muon_is_an_orthogonal_matrix_of_the_size_of_adamws(small_policy, small_shape):
    """Newton-Schulz iterations bring singular values near 1, between 0.5 and 1.5."""
    model = copied(small_shape, small_policy)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    config = Config(trainer=TrainerConfig(optimizer=OptimizerConfig(kind="muon", lr=0.01, warmup_steps=0)))
    accumulator = GradientAccumulator(model, config)
    accumulate(accumulator, [random_group(0, [2, 3], [9, 14, 7], 1), random_group(1, [4], [13, 12], 2)])
    accumulator.step()
    muon = names_of(model, accumulator.optimizers[0])
    for name, parameter in model.named_parameters():
        step = parameter.detach() - before[name]
        if name in muon:
            scale = 0.01 * 0.2 * max(step.shape) ** 0.5
            largest = torch.linalg.svdvals(step / scale)[0]
            assert 0.5 < largest < 1.5, name
        assert float((step**2).mean().sqrt()) < 0.02


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_estimated_memory_of_the_optimizer_is_what_it_keeps(other, tmp_path, kind):
    """Tolerance: the estimate counts one number of each norm and bias, as of a matrix."""
    shape, model = other
    policy.save(copied(shape, model), shape, tmp_path, resolve_path("asset:tiny/policy"))
    config = Config(trainer=TrainerConfig(optimizer=OptimizerConfig(kind=kind)))
    trained = copied(shape, model)
    accumulator = GradientAccumulator(trained, config)
    kept = sum(each.numel() for name, each in accumulator.state()["moments"].items() if not name.endswith("/step"))
    vectors = sum(parameter.numel() for parameter in trained.parameters() if parameter.ndim == 1)
    found = estimate.moments(config, json.loads((tmp_path / "config.json").read_text())) / 4
    assert 0 <= kept - found <= vectors
    config.model.path, config.speculation.method = str(tmp_path), "none"
    whole = sum(parameter.numel() for parameter in trained.parameters())
    assert 0 <= 4 * (whole + kept) - work.checkpoint_bytes(config) <= 4 * vectors


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_training_continues_from_a_checkpoint_at_the_same_point_of_the_schedule(
    tmp_path, small_policy, small_shape, kind
):
    """Five steps in a row and two, a checkpoint and three more give the same weights, bit for bit."""
    optimizer = OptimizerConfig(kind=kind, schedule="cosine", warmup_steps=2)
    config = Config(steps=5, rl=RLConfig(), trainer=TrainerConfig(optimizer=optimizer))

    def trained(accumulator, numbers):
        for number in numbers:
            accumulate(accumulator, [random_group(0, [2, 3], [3, 9, 1], number)])
            rates.append(accumulator.step()["optimizer/lr"])
        return accumulator

    rates: list[float] = []
    whole = trained(GradientAccumulator(copied(small_shape, small_policy), config), range(5))
    half = trained(GradientAccumulator(copied(small_shape, small_policy), config), range(2))
    writer = checkpoint.Checkpoints(tmp_path, "trainer", 1)
    writer.save(2, {"trainer": half.state()})
    assert writer.saved(wait=True) == 2
    resumed = GradientAccumulator(copied(small_shape, small_policy), config)
    state = {"trainer": resumed.state()}
    checkpoint.load(checkpoint.where(tmp_path, "trainer", 2), state)
    resumed.restore(state["trainer"])
    trained(resumed, range(2, 5))
    assert rates[:5] == rates[5:] and rates[0] < rates[1] > rates[4]
    for one, other in zip(whole.model.parameters(), resumed.model.parameters()):
        assert torch.equal(one, other)
