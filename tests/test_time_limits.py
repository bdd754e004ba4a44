"""What an interrupted run saves when its disk is slow: first the checkpoint, then the policy if there is time."""

import os
import signal

import pytest
from runs import Running, events, rows

from asyncspec.ledger import checkpoint
from asyncspec.ledger.audit import violations

SLOW = "checkpoint=3,export=500"  # seconds that the disk takes


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.slow
def test_a_slow_disk_costs_the_export_and_not_the_checkpoint(tmp_path, ranks):
    run_dir = tmp_path / "run"
    fields = (f"trainer.ranks={ranks}", "checkpoint.every=0", "deployment.stop_timeout_s=25")
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
    """The time to stop is over before the checkpoint is written: that is a failure, and the line says so."""
    run_dir = tmp_path / "run"
    fields = ("checkpoint.every=0", "deployment.stop_timeout_s=2", "deployment.delays=checkpoint=500")
    run = Running.new(run_dir, "--steps", "50", *fields)
    run.wait_for_steps(1)
    os.kill(run.process.pid, signal.SIGTERM)
    output = run.end(1)
    assert "trainer; the last checkpoint may be missing" in output, output
    assert checkpoint.newest(run_dir, "trainer") is None
