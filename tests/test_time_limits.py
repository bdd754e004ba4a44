"""What an interrupted run saves when its disk is slow: first the checkpoint, then the policy if there is time."""

import os
import signal
from types import SimpleNamespace

import pytest
from runs import Running, events, rows

from asyncspec.actors import team
from asyncspec.actors.trainer_rank import TrainerRank
from asyncspec.actors.trainer_team import SAVE
from asyncspec.config import load
from asyncspec.ledger import checkpoint
from asyncspec.ledger.audit import violations
from asyncspec.wire import messages as m

SLOW = "checkpoint=3,export=500"  # seconds that the disk takes


@pytest.mark.slow
def test_a_slow_disk_costs_the_export_and_not_the_checkpoint(tmp_path):
    run_dir = tmp_path / "run"
    fields = ("trainer.ranks=2", "checkpoint.every=0", "deployment.stop_timeout_s=25")
    run = Running.new(run_dir, "--steps", "50", *fields, f"deployment.delays={SLOW}")
    run.wait_for_steps(2)
    os.kill(run.process.pid, signal.SIGTERM)
    output = run.end(130)
    version, _ = checkpoint.newest(run_dir, "trainer")
    assert version == len(rows(run_dir)) >= 2
    assert f"the checkpoint of version {version} is complete; the policy was not exported" in output, output
    assert "stopped early: interrupted" in output and "may be missing" not in output
    assert not (run_dir / "checkpoint" / "policy").exists()
    Running.resumed(run_dir, f"steps={version + 1}", "deployment.delays=").end()
    assert [row["step"] for row in rows(run_dir)] == list(range(version + 1))
    assert violations(events(run_dir), 1, 4, version + 1) == []
    assert (run_dir / "checkpoint" / "policy" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_checkpoint_that_never_ends_is_named(tmp_path):
    """The time to stop is over before the checkpoint is written, and the line says so."""
    run_dir = tmp_path / "run"
    fields = ("checkpoint.every=0", "deployment.stop_timeout_s=2", "deployment.delays=checkpoint=500")
    run = Running.new(run_dir, "--steps", "50", *fields)
    run.wait_for_steps(1)
    os.kill(run.process.pid, signal.SIGTERM)
    output = run.end(130)
    assert "trainer; the last checkpoint may be missing" in output, output
    assert checkpoint.newest(run_dir, "trainer") is None


def test_a_rank_that_follows_waits_at_the_end_until_rank_0_has_written(monkeypatch):
    """Rank 0 gives no order while any rank writes. Here it ends one checkpoint after 200 s, and orders the last one."""
    now, done = [0.0], []
    orders = {200.0: m.Order(SAVE, 7), 400.0: m.Order(team.END, -1)}

    def take():
        due = [at for at in orders if at <= now[0]]
        return (orders.pop(due[0]), {}) if due else None

    rank = object.__new__(TrainerRank)
    rank.config, rank.ended, rank.ordered, rank.stopping = load("tiny", ["trainer.ranks=2"]), False, 0.0, "interrupted"
    rank.inbox, rank._code = SimpleNamespace(take=take), 0
    rank.wait = lambda seconds: now.__setitem__(0, now[0] + 10)
    checkpoints = SimpleNamespace(saved=lambda wait=False: done.append(f"saved {wait}"))
    rank.learner = SimpleNamespace(checkpoints=checkpoints, save=lambda version: done.append(f"save {version}"))
    monkeypatch.setattr(team, "time", SimpleNamespace(monotonic=lambda: now[0]))
    rank.finish()
    assert rank.ended and done == ["saved False", "save 7", "saved True"]
