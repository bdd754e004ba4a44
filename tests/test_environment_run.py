"""Whole runs with environments: the lag, the ledger and recovery hold for episodes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import SMALL, Running, check_finished, events, pid_of, rows, train

from asyncspec.bench.chaos import environments_of

TWICE = ["environment.name=asyncspec.bench.sleeping_tools:AskedTwice", "sampling.max_response_tokens=160"]


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 2])
def test_episodes_are_trained_within_the_lag(tmp_path, lag, capsys):
    done = train(tmp_path / "run", "--steps", "4", f"policy_lag={lag}", *TWICE)
    assert done.returncode == 0, done.stderr[-2000:]
    check_finished(tmp_path / "run", 4, lag)
    said = capsys.readouterr().out
    assert "tokens that the policy sampled, and none of" in said and "no violations" in said
    last = rows(tmp_path / "run")[-1]
    assert last["environment/turns_mean"] == pytest.approx(2, abs=0.3) and last["tool/again_longest_s"] >= 0.05
    assert last["time/environment"] > 0 and last["environment/tokens_mean"] > 1
    trained = [event for event in events(tmp_path / "run") if event["event"] == "trained"]
    assert all(event["environment_tokens"] > 0 for event in trained)
    made = {event["ticket"]: event["checksum"] for event in events(tmp_path / "run") if event["event"] == "generated"}
    assert {event["ticket"]: event["checksum"] for event in trained} == {
        e["ticket"]: made[e["ticket"]] for e in trained
    }
    rollouts = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert any([version for version, _ in row["versions"]].count(-1) == 1 for row in rollouts)
    spans = json.loads((tmp_path / "run" / "trace.json").read_text())
    assert any(span.get("name") == "tool again" for span in spans)


@pytest.mark.slow
def test_episodes_of_a_killed_generator_and_of_a_killed_process_are_played_again(tmp_path):
    run_dir = tmp_path / "run"
    faults = "deployment.faults=generator0:work:30:kill,generator0.1:send:3:raise,logprob:work:5:kill"
    run = Running.new(run_dir, "--steps", "6", *TWICE, "environment.failures=0", faults)
    run.wait_for_steps(2)
    killed = 0
    deadline = time.monotonic() + 60
    while killed < 3 and time.monotonic() < deadline and run.process.poll() is None:
        for pid in _environments(run_dir):
            os.kill(pid, signal.SIGKILL)
            killed += 1
        time.sleep(0.3)
    run.end(0)
    check_finished(run_dir, 6)
    lost = [event["actor"] for event in events(run_dir) if event["event"] == "lost"]
    assert killed and {"generator0", "generator0.1", "logprob"} <= {*lost}
    assert not [name for name in rows(run_dir)[-1] if name.endswith("_failed")]


def _environments(run_dir):
    """Return the processes of the newest generator's environments."""
    logs = sorted((run_dir / "logs").glob("generator0*.log"), key=lambda log: log.stat().st_mtime_ns)
    return environments_of(pid_of(run_dir, logs[-1].stem))


@pytest.mark.slow
def test_a_run_stops_if_too_many_environments_fail(tmp_path):
    (tmp_path / "broken.py").write_text(
        "class Broken:\n    def reset(self, row):\n        pass\n"
        "    def step(self, message):\n        raise RuntimeError('no server')\n    def close(self):\n        pass\n"
    )
    done = train(tmp_path / "run", "--steps", "4", "environment.name=broken:Broken")
    assert done.returncode == 1
    assert done.stdout.count("environment.name=broken:Broken: failed for 8 of") == 1  # the first time ends the run
    assert "raised RuntimeError: no server" in done.stdout


def test_an_environment_that_cannot_begin_is_refused_before_the_start(tmp_path):
    from asyncspec.config import ConfigError, load
    from asyncspec.launch.preflight import check_inputs

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name, said in (
        (f"openenv:http://127.0.0.1:{port}", "with the first row of the data it raised ConnectionRefusedError"),
        ("toolbox:Adder", "the policy has no chat template"),
        ("python", "the policy has no chat template"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_inputs(load("tiny", [f"environment.name={name}", "environment.reward_from=data.reward"]))


@pytest.mark.parametrize(
    "fields, said",
    [
        (["environment.name=sums"], "environment.name='sums': expected module:factory, python, reasoning_gym"),
        (["environment.name=openenv:8000"], "environment.name='openenv:8000': expected module:factory"),
        (["environment.name=toolbox:Missing"], "environment.name='toolbox:Missing': AttributeError"),
        (
            ["environment.name=toolbox:Scripted", "environment.turn_timeout_s=9000"],
            "at most environment.episode_timeout",
        ),
        (["environment.name=toolbox:Scripted", "environment.rewritten_turns=keep"], "expected one of refuse, allow"),
        (["environment.name=toolbox:Talker", "environment.host=203.0.113.9"], "environment.host='203.0.113.9'"),
        (
            ["environment.name=toolbox:Talker", "environment.port=9999", "deployment.generators=2"],
            "environment.port=9999: expected 0 with deployment.generators=2",
        ),
        (
            ["environment.name=toolbox:Scripted", "engine.kind=mock", "trainer.kind=mock"],
            "a mock samples means nothing",
        ),
    ],
)
def test_environments_that_cannot_run_are_refused_in_one_line(tmp_path, fields, said):
    environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "asyncspec.cli", "train", "--run-dir", str(tmp_path / "run"), *SMALL, *fields]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not (tmp_path / "run").exists()


def test_a_chat_template_that_rewrites_earlier_turns_is_refused(tmp_path):
    from directories import chat_model
    from toolbox import FORGETFUL

    from asyncspec.config import ConfigError, load
    from asyncspec.launch.preflight import check_inputs

    letters = FORGETFUL.replace("<|im_start|>", "@").replace("<|im_end|>", "!")
    fields = [f"model.path={chat_model(tmp_path / 'policy', letters)}", "speculation.method=ngram"]
    fields += ["environment.name=asyncspec.bench.sleeping_tools:AskedTwice"]
    with pytest.raises(ConfigError, match="rewrites earlier turns: reasoning before a message of the role user"):
        check_inputs(load("tiny", fields))
    check_inputs(load("tiny", [*fields, "environment.rewritten_turns=allow"]))
