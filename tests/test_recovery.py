"""Faults: any actor killed or frozen at any moment; runs cut short and resumed. The audit has the last word."""

import signal
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from asyncspec.audit import audit
from runs import SCRIPT, TORCHRUN, Running, alive, descendants, gone_within, ledger, pid_of, rows

QUICK = ("checkpoint.every=3", "deployment.silent_timeout_s=2")


def check(run_dir, steps, lag=1):
    """Whatever happened: every step once, within the lag, every ticket accounted for."""
    metrics = rows(run_dir)
    assert [row["step"] for row in metrics] == list(range(steps)) and max(row["lag/max"] for row in metrics) <= lag
    assert audit(str(run_dir)) == 0


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize("actor", ["generator0", "logprob", "draft_adapter", "trainer", "controller"])
def test_a_run_survives_the_loss_of_any_actor(tmp_path, actor, fault):
    run_dir, steps = tmp_path / "run", 14
    run = Running.new(run_dir, "--steps", str(steps), *QUICK)
    run.wait_for_steps(5)
    run.signal(actor, fault)
    output = run.end()
    check(run_dir, steps)
    assert f"{actor} died" in output and (fault == signal.SIGKILL or "is frozen: no sign of life for" in output), output
