"""Several optimizer steps a batch: what they learn, and that one batch is one version."""

import os
import signal

import pytest
import torch
from groups import accumulate, copied, random_group
from runs import Running, check_finished, rows

from asyncspec.actors.base import StopRequested
from asyncspec.actors.trainer import Trainer, _Step
from asyncspec.actors.trainer_team import TrainerTeam
from asyncspec.config import Config, OptimizerConfig, RLConfig, TrainerConfig
from asyncspec.rl.accumulate import GradientAccumulator
from asyncspec.rl.learner import Learner, merged
from asyncspec.rl.optimizer import learning_rate

OPTIMIZER = OptimizerConfig(schedule="linear", warmup_steps=2, lr=1e-3)


def trainer_of(tmp_path, shape, policy, rl):
    """Return a trainer that has taken the groups of a step, without its process."""
    config = Config(steps=2, rl=rl, trainer=TrainerConfig(optimizer=OPTIMIZER))
    learner = Learner(config, tmp_path, "cpu")
    learner.model = copied(shape, policy)
    learner.accumulator = GradientAccumulator(learner.model, config)
    trainer = object.__new__(Trainer)
    trainer.config, trainer.learner, trainer.mtp, trainer.stopping, trainer.step = config, learner, None, "", _Step()
    trainer.outboxes, trainer.waited, trainer.said = [], 0, []
    trainer.wait = trainer.pump = lambda *_: None
    trainer.delay = trainer.fault = lambda *_, **__: None
    trainer._notice = trainer.said.append
    trainer.team = TrainerTeam(trainer, learner)
    return trainer


def groups():
    return [random_group(i, [2, 3], [3, 9, 1 + i], i) for i in range(4)]


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus"])
@pytest.mark.parametrize("size,iterations", [(2, 1), (0, 3), (1, 2), (2, 2)])
def test_a_batch_gives_the_weights_of_its_optimizer_steps(
    tmp_path, small_shape, small_policy, estimator, size, iterations
):
    """The reference takes the steps one by one, with advantages from the whole batch."""
    rl = RLConfig(groups_per_step=4, mini_batch_size=size, num_iterations=iterations, advantage_estimator=estimator)
    trainer, batch = trainer_of(tmp_path, small_shape, small_policy, rl), groups()
    for group, arrays in batch:
        trainer._take(0, group, arrays)
    stats = trainer._update(0)
    assert stats["optimizer/steps"] == trainer.learner.accumulator.updates == rl.updates_per_step
    assert trainer.team.committed

    reference = GradientAccumulator(copied(small_shape, small_policy), trainer.config)
    advantages, rates = reference.advantages(batch), []
    for _ in range(iterations):
        for first in range(0, 4, size or 4):
            rounds = []
            for (group, arrays), advantage_G in list(zip(batch, advantages))[first : first + (size or 4)]:
                rounds += reference.add(group, arrays, advantage_G)
            for passes in (*rounds, *reference.flush()):
                reference.run(passes[0])
            rates.append(reference.step()["optimizer/lr"])
    for (name, found), expected in zip(trainer.learner.model.named_parameters(), reference.model.parameters()):
        assert torch.equal(found, expected), name
    assert stats["optimizer/lr"] == rates[-1]
    assert rates == [learning_rate(OPTIMIZER, n, 2 * len(rates)) for n in range(len(rates))]  # of a run of two steps


def test_one_optimizer_step_is_what_it_was(tmp_path, small_shape, small_policy):
    trainer = trainer_of(tmp_path, small_shape, small_policy, RLConfig(groups_per_step=4))
    for group, arrays in groups():
        trainer._take(0, group, arrays)
    stats = trainer._update(0)
    reference = GradientAccumulator(copied(small_shape, small_policy), trainer.config)
    accumulate(reference, groups())
    assert stats == reference.step() and not trainer.team.committed
    for found, expected in zip(trainer.learner.model.parameters(), reference.model.parameters()):
        assert torch.equal(found, expected)


def test_a_mini_batch_whose_groups_are_left_out_takes_no_step(tmp_path, small_shape, small_policy):
    rl = RLConfig(groups_per_step=4, mini_batch_size=2)
    trainer = trainer_of(tmp_path, small_shape, small_policy, rl)
    for group, arrays in groups()[2:]:
        trainer._take(0, group, arrays)
    assert trainer._update(0)["optimizer/steps"] == 1


def test_an_optimizer_step_without_a_finite_gradient_is_left_out(tmp_path, small_shape, small_policy):
    rl = RLConfig(groups_per_step=4, mini_batch_size=2)
    trainer = trainer_of(tmp_path, small_shape, small_policy, rl)
    batch = groups()
    batch[3][1]["behavior"][0] = float("nan")
    for group, arrays in batch:
        trainer._take(0, group, arrays)
    assert trainer._update(0)["optimizer/steps"] == 1
    assert trainer.said[0].startswith("step 0 left out 1 of 2 optimizer steps: gradient norm nan"), trainer.said
    batch[0][1]["behavior"][0] = float("nan")
    trainer.step = _Step()
    for group, arrays in batch:
        trainer._take(1, group, arrays)
    with pytest.raises(FloatingPointError):
        trainer._update(1)


def test_a_batch_that_has_begun_to_change_the_policy_is_trained_to_its_end(tmp_path, small_shape, small_policy):
    rl = RLConfig(groups_per_step=4, mini_batch_size=2)
    trainer = trainer_of(tmp_path, small_shape, small_policy, rl)
    trainer.stopping = "interrupted"
    with pytest.raises(StopRequested):
        trainer.team.breathe()
    for group, arrays in groups():
        trainer._take(0, group, arrays)
    assert trainer._update(0)["optimizer/steps"] == 2


def test_the_statistics_of_a_batch_are_means_and_the_last_learning_rate():
    found = merged(
        [{"grad/norm": 1.0, "optimizer/lr": 0.1, "loss/policy": 2.0}, {"grad/norm": 2.0, "optimizer/lr": 0.2}]
    )
    assert found == {"grad/norm": 1.5, "optimizer/lr": 0.2, "loss/policy": 2.0}
    assert merged([]) == {}


@pytest.mark.slow
def test_an_interrupted_run_with_several_optimizer_steps_resumes(tmp_path):
    """Each version has all of its optimizer steps, also the one that was trained while the run was interrupted."""
    run_dir = tmp_path / "run"
    fields = ("rl.num_iterations=3", "rl.mini_batch_size=2", "trainer.ranks=2", "deployment.stop_timeout_s=20")
    run = Running.new(run_dir, "--steps", "10000", *fields, "checkpoint.every=0")
    run.wait_for_steps(2)
    os.kill(run.process.pid, signal.SIGINT)
    run.end(130)
    done = len(rows(run_dir))
    check_finished(run_dir, done)
    Running.resumed(run_dir, f"steps={done + 2}").end()
    check_finished(run_dir, done + 2)
    assert [row["optimizer/steps"] for row in rows(run_dir)] == [6 * (i + 1) for i in range(done + 2)]


def test_the_estimate_of_a_runs_deadline_knows_of_several_optimizer_steps():
    from asyncspec.config import load, work

    one, two = (load("tiny", [f"rl.num_iterations={n}"]) for n in (1, 2))
    assert work.stop_s(two) - work.stop_s(one) == one.deployment.turn_timeout_s
