"""How runs end: interrupts, deaths of actors, errors. Real runs, started like a user starts them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
from runs import (
    SCRIPT,
    SMALL,
    TORCHRUN,
    Running,
    descendants,
    ledger,
    outliving,
    pid_of,
    rows,
    train,
)

from asyncspec.ledger.audit import FATES


def start_and_wait_for_steps(run_dir, launcher, *settings, steps=2):
    process = subprocess.Popen(
        [*launcher, "--run-dir", str(run_dir), "--steps", "10000", *SMALL, *settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=run_dir.parent,
        start_new_session=True,
    )
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        if (run_dir / "metrics.jsonl").exists() and len(rows(run_dir)) >= steps:
            return process
        time.sleep(0.1)
    process.kill()
    raise AssertionError(process.stdout.read())


@pytest.mark.parametrize(
    "launcher", [(*TORCHRUN, SCRIPT), (*TORCHRUN, "--nproc-per-node", "2", SCRIPT)], ids=["monarch", "ranks"]
)
@pytest.mark.slow
def test_ctrl_c_ends_every_process_and_writes_a_checkpoint(tmp_path, launcher):
    run_dir = tmp_path / "run"
    process = start_and_wait_for_steps(run_dir, launcher, "deployment.stop_timeout_s=12")
    everyone = [process.pid, *descendants(process.pid)]
    assert len(everyone) >= 7  # torchrun, launcher, five actors
    os.killpg(process.pid, signal.SIGINT)
    left = outliving(everyone)
    output = process.communicate()[0]
    assert not left, output
    assert (run_dir / "checkpoint" / "policy" / "model.safetensors").is_file(), output
    assert "stopped early: interrupted" in output
    json.loads((run_dir / "trace.json").read_text())
    open_tickets = Counter()
    for line in ledger(run_dir):
        open_tickets[line["ticket"]] += (line["event"] == "issued") - (line["event"] in FATES)
    assert not any(open_tickets.values())  # unfinished tickets are reported as dropped


@pytest.mark.parametrize("after", [0.5, 3.0])
def test_ctrl_c_while_starting_ends_every_process_and_says_so(tmp_path, after):
    process = subprocess.Popen(
        [sys.executable, SCRIPT, "--run-dir", str(tmp_path / "run"), *SMALL],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "config.yaml").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(after)
    everyone = [process.pid, *descendants(process.pid)]
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130 and "stopped early: interrupted" in output, output
    assert not outliving(everyone)


@pytest.mark.parametrize("actor", ["trainer", "generator0"])
@pytest.mark.slow
def test_a_killed_actor_without_a_replacement_ends_the_run_and_is_named(tmp_path, actor):
    run_dir = tmp_path / "run"
    process = start_and_wait_for_steps(
        run_dir, (sys.executable, SCRIPT, "deployment.restarts=0", "deployment.replacements=0")
    )
    everyone = [process.pid, *descendants(process.pid)]
    os.kill(pid_of(run_dir, actor), signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert f"failed: {actor} died" in output and f"asyncspec train --resume {run_dir}" in output
    assert actor == "trainer" or (run_dir / "checkpoint" / "policy" / "model.safetensors").is_file()
    assert not outliving(everyone)


@pytest.mark.slow
def test_a_generator_killed_under_torchrun_is_replaced_and_its_tickets_trained_once(tmp_path):
    """For Monarch, see tests/test_recovery.py."""
    run_dir, steps = tmp_path / "run", 16
    command = [
        *TORCHRUN,
        "--nproc-per-node",
        "2",
        SCRIPT,
        "--run-dir",
        str(run_dir),
        *SMALL,
        "--steps",
        str(steps),
        "deployment.generators=2",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path)
    deadline = time.monotonic() + 300
    while not (run_dir / "metrics.jsonl").exists() or len(rows(run_dir)) < 3:
        assert time.monotonic() < deadline and process.poll() is None, process.stdout.read()
        time.sleep(0.05)
    os.kill(pid_of(run_dir, "generator0"), signal.SIGKILL)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert "generator0 died" in output, output
    metrics = rows(run_dir)
    assert len(metrics) == steps and max(row["lag/max"] for row in metrics) <= 1
    assert metrics[-1]["recovery/generators_lost"] == 1 and metrics[-1]["recovery/tickets_reissued"] > 0
    assert {line["event"] for line in ledger(run_dir)} >= {"reissued", "trained"}
    from asyncspec.ledger.audit import audit

    assert audit(str(run_dir)) == 0  # every ticket once, within the lag


@pytest.mark.slow
def test_a_run_continues_without_its_draft_adapter(tmp_path):
    """While it is stopped, no other actor waits for it. When it is killed and not replaced, the run names it and
    finishes.
    """
    run_dir = tmp_path / "run"
    run = Running.new(
        run_dir,
        "--steps",
        "14",
        "draft.publish_every=1",
        "deployment.replacements=0",
        "deployment.silent_timeout_s=60",
        launcher=(*TORCHRUN, "--nproc-per-node", "2", SCRIPT),
    )
    run.wait_for_steps(3)
    run.signal("draft_adapter", signal.SIGSTOP)
    run.wait_for_steps(7)
    run.signal("draft_adapter", signal.SIGKILL)
    assert "the draft adapter is gone" in run.end()
    assert len(rows(run_dir)) == 14 and rows(run_dir)[-1]["draft/adapter_lost"] == 1
    assert (run_dir / "checkpoint" / "policy" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "launcher", [(sys.executable, SCRIPT), (*TORCHRUN, "--nproc-per-node", "2", SCRIPT)], ids=["monarch", "ranks"]
)
@pytest.mark.slow
def test_no_actor_outlives_a_killed_launcher(tmp_path, launcher):
    process = start_and_wait_for_steps(tmp_path / "run", launcher)
    everyone = descendants(process.pid)
    assert len(everyone) >= 5
    os.kill(pid_of(tmp_path / "run", "generator0"), signal.SIGSTOP)  # not even an actor that is frozen
    process.kill()
    process.wait()
    assert not outliving(everyone)


REWARDS = """
calls = 0


def overflows(prompt, response, answer):  # for one group of the second step
    global calls
    calls += 1
    return 1e308 if 40 < calls < 44 else float(calls % 3)
"""


@pytest.mark.slow
def test_an_actor_that_exits_silently_is_named(tmp_path):
    run = Running.new(
        tmp_path / "run",
        "deployment.faults=generator0:work:3:exit",
        "deployment.replacements=0",
        launcher=(*TORCHRUN, "--nproc-per-node", "2", SCRIPT),
    )
    output = run.end(1)
    assert f"failed: generator0 died: exit code 3; see {tmp_path}/run/logs/generator0.log" in output, output


@pytest.mark.slow
def test_the_tickets_of_a_skipped_step_are_dropped_with_its_reason(tmp_path):
    (tmp_path / "mine.py").write_text(REWARDS)
    output = Running.new(tmp_path / "run", "--steps", "6", "data.reward=mine:overflows", "data.eval_prompts=0").end()
    assert "left the policy as it was: gradient norm nan: the step was not taken; its groups are in " in output, output
    dropped = [line for line in ledger(tmp_path / "run") if line["event"] == "dropped"]
    assert (
        len(dropped) == 4
        and len({line["left_out_in"] for line in dropped}) == 1
        and "gradient norm nan" in dropped[0]["reason"]
    )
    from asyncspec.ledger.audit import audit

    assert audit(str(tmp_path / "run")) == 0 and len(rows(tmp_path / "run")) == 6


@pytest.mark.slow
def test_an_error_in_an_actor_gives_one_line_that_names_it(tmp_path):
    (tmp_path / "broken.py").write_text("def two(prompt, response, answer):\n    return float('nan')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = train(tmp_path / "run", "data.reward=broken:two", env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 1
    told = "{} failed: RewardError: data.reward=broken:two: failed for 8 of 8 rollouts, more than"
    assert all(told.format(name) in done.stdout for name in ("generator0", "generator0.1", "failed: generator0.2"))
    assert "the last returned nan" in done.stdout and "generator0.3" not in done.stdout
    assert "3 errors were alike and no step was trained meanwhile" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "Traceback" in (tmp_path / "run" / "logs" / "generator0.2.log").read_text()


@pytest.mark.slow
def test_an_error_that_comes_back_after_each_restart_ends_the_run_before_the_restarts_are_used_up(tmp_path):
    # The sum of a group's rewards is no finite number: after three such steps the trainer raises.
    (tmp_path / "mine.py").write_text(
        "calls = 0\n\n\ndef huge(prompt, response, answer):\n    global calls\n    calls += 1\n"
        "    return 1e308 * (1 + calls % 7 / 10)\n"
    )
    output = Running.new(
        tmp_path / "run",
        "--steps",
        "40",
        "checkpoint.every=1",
        "deployment.restarts=9",
        "data.reward=mine:huge",
        "data.eval_prompts=0",
    ).end(1)
    assert output.count("all actors restart from the last checkpoint") == 2, output
    assert "\nfailed: trainer failed: FloatingPointError: " in output and "3 errors were alike" in output, output
