"""Deadlines of work that grows with the policy or the data."""

import os
import signal
from dataclasses import replace

import pytest
import torch
from runs import SMALL, Running, rows

from asyncspec.cli import main
from asyncspec.config import Config, load, work
from asyncspec.launch.roles import prepare_run_dir, room_needed
from asyncspec.ledger import checkpoint
from asyncspec.models import headers, policy
from asyncspec.models.hf_files import write_checkpoint
from asyncspec.models.shape import PolicyShape


def test_deadlines_grow_with_the_policy_and_shrink_with_the_speed(monkeypatch):
    config = Config()
    config.deployment.disk_mb_s = 100.0
    found = {}
    for parameters in (1_000_000, 350_000_000):
        monkeypatch.setattr(work, "_parameters", lambda directory, parameters=parameters: parameters)
        found[parameters] = [work.stop_s(config), work.start_s(config), work.turn_s(config), work.checkpoint_s(config)]
        # policy and draft have as many parameters here; weights and two moments of each, in float32
        assert work.checkpoint_bytes(config) == 2 * 12 * parameters
        # two checkpoints and the export
        assert work.stop_s(config) == pytest.approx(20 + 4 * (2 * 24 + 8) * parameters / 100e6)
    assert all(small < large for small, large in zip(*found.values()))
    config.deployment.disk_mb_s = 200.0
    assert all(fast < slow for fast, slow in zip([work.stop_s(config), work.start_s(config)], found[350_000_000]))
    config.deployment.disk_mb_s = 5000.0  # a disk is not the only limit
    assert work.speed(config) == 200e6


def test_the_deadline_to_start_grows_with_the_data(tmp_path):
    few, many = Config(), Config()
    many.data.train_file = str(tmp_path / "prompts.jsonl")
    (tmp_path / "prompts.jsonl").write_bytes(b"\n" * 10_000_000)
    assert work.start_s(many) == pytest.approx(work.start_s(few) + 4)


def test_the_room_for_checkpoints_is_counted_in_float32(tmp_path):
    config = Config()
    shipped = room_needed(config)
    model, shape = policy.load(work.resolve_path(config.model.path))
    half = {
        name: tensor.to(torch.bfloat16) for name, tensor in policy.to_hf(model, dict(model.named_parameters())).items()
    }
    write_checkpoint(tmp_path, shape.to_hf(), half)
    assert headers.parameters(tmp_path) == headers.parameters(work.resolve_path(config.model.path))
    config.model.path = str(tmp_path)
    assert room_needed(config) == shipped


def test_the_speed_is_measured_once_and_kept_with_the_run(tmp_path):
    config = load("tiny", [f"run_dir={tmp_path}/run", "deployment.device=cpu"])
    prepare_run_dir(config)
    kept = load(str(tmp_path / "run" / "config.yaml")).deployment.disk_mb_s
    assert kept == config.deployment.disk_mb_s > 0


def test_doctor_prints_the_deadlines(capsys, tmp_path):
    assert main(["doctor", "deployment.device=cpu", f"run_dir={tmp_path}"]) == 0
    said = capsys.readouterr().out
    assert f"{tmp_path} is written at" in said
    assert "can read the models' files" in said.replace("\n", " ")
    assert "to start 120 s, one turn 180 s, a checkpoint 300 s, to stop" in said


@pytest.mark.slow
def test_an_interrupted_run_has_as_long_to_stop_as_its_checkpoint_takes(tmp_path):
    """With the fixed part alone, which is 0.05 s here, the trainer would be killed while it writes."""
    shape = PolicyShape.from_hf(work.resolve_path("asset:tiny/policy"))
    shape = replace(shape, dim=512, n_layers=8, head_dim=128, hidden_dim=2048)
    torch.manual_seed(0)
    model = policy.build(shape)
    model.init_states()
    policy.save(model, shape, tmp_path / "policy", work.resolve_path("asset:tiny/policy"))
    run = Running.new(
        tmp_path / "run",
        "--steps",
        "50",
        *SMALL,
        "rl.groups_per_step=2",
        "rl.group_size=2",
        "sampling.max_response_tokens=8",
        f"model.path={tmp_path}/policy",
        "speculation.method=none",
        "data.eval_prompts=0",
        "data.reward=asyncspec.tasks.sums:parity",
        "deployment.stop_timeout_s=0.05",
        "checkpoint.every=0",
    )
    run.wait_for_steps(1)
    os.kill(run.process.pid, signal.SIGTERM)
    said = run.end(130)
    assert "still running" not in said and "may be missing" not in said
    version, _ = checkpoint.newest(run.run_dir, "trainer")
    assert version == len(rows(run.run_dir))
    policy.load(run.run_dir / "checkpoint" / "policy")
