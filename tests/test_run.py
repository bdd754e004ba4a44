"""Whole runs of a few steps on the shipped policy, with real processes, queues and broadcasts."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict

import pytest
import torch
from runs import (
    ROOT,
    SCRIPT,
    SMALL,
    TORCHRUN,
    Running,
    check_finished,
    descendants,
    ledger,
    outliving,
    pid_of,
    rows,
    train,
)

from asyncspec.bench.attribution import Trace, read_spans
from asyncspec.config import resolve_path
from asyncspec.timing.attribution import PARTS

KEYS = """
step policy_version reward/mean eval/accuracy lag/mean lag/max loss/policy loss/kl tokens/response_mean time/step
time/data time/prepare time/generation time/exposed_generation time/logprob time/exposed_logprob time/train time/other
spec/draft_length spec/acceptance_length spec/acceptance_rate throughput/tokens_per_s""".split()


def check_results(run_dir, steps, lag, groups=4):
    """Check everything that a finished run must have written."""
    metrics = rows(run_dir)
    assert [row["step"] for row in metrics] == list(range(steps))
    for row in metrics:
        assert set(KEYS) <= set(row)
        assert row["lag/max"] <= lag
        assert sum(row[f"time/{part}"] for part in PARTS) == pytest.approx(row["time/step"], rel=0.01)
        assert all(row[f"time/{part}"] >= 0 for part in PARTS)
        assert 1 <= row["spec/acceptance_length"] <= row["spec/draft_length"] + 1
        assert ("spec/acceptance_1" in row) == (row["spec/draft_length"] > 0) and 0 <= row.get(
            "spec/acceptance_1", 0
        ) <= 1
    assert metrics[-1]["eval/policy_version"] == steps and 0 <= metrics[-1]["eval/accuracy"] <= 1
    fates = defaultdict(Counter)
    for line in ledger(run_dir):
        fates[line["ticket"]][line["event"]] += 1
        if line["event"] == "trained":
            assert line["trained_in"] == line["step"]  # never in another step
            assert line["version_min"] >= line["step"] - lag and line["version_max"] <= line["step"]
        if line["event"] == "issued":
            assert line["min_version"] >= line["step"] - lag
    trained = [t for t, events in fates.items() if events["trained"]]
    assert len(trained) == steps * groups
    for events in fates.values():  # each ticket exactly once
        assert events["issued"] == 1 and events["trained"] + events["evaluated"] + events["dropped"] == 1
    events = json.loads((run_dir / "trace.json").read_text())
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"trainer", "logprob", "generator0", "draft_adapter", "tickets"} <= tracks
    assert any((run_dir / "tb").iterdir())
    assert {"trainer.log", "logprob.log", "generator0.log", "draft_adapter.log"} <= {
        p.name for p in (run_dir / "logs").iterdir()
    }
    from asyncspec.models import eagle3, policy

    trained_policy, shape = policy.load(run_dir / "checkpoint" / "policy")
    start, _ = policy.load(resolve_path("asset:tiny/policy"))
    assert any(not torch.equal(a, b) for a, b in zip(trained_policy.parameters(), start.parameters()))
    assert (run_dir / "checkpoint" / "policy" / "tokenizer.json").is_file()
    eagle3.load(run_dir / "checkpoint" / "draft", shape)


def check_delays(run_dir, steps):
    """Check that each delay in a run is a span of the actor, and of the group or version, that it held up."""
    delays = Trace.of(read_spans(run_dir)).delays
    trained = {line["ticket"] for line in ledger(run_dir) if line["event"] == "trained"}
    for place, actor in (
        ("reward", "generator0"),
        ("queue", "generator0"),
        ("logprob", "logprob"),
        ("train", "trainer"),
    ):
        assert {name for name, _ in delays[place]} == {actor}
        assert {span.ticket for _, span in delays[place]} >= trained, place
    assert {span.ticket for _, span in delays["queue"]} == trained  # evaluations do not go to logprob
    assert {span.version for _, span in delays["broadcast"]} >= set(range(1, steps))
    assert len(delays["generate"]) > steps


@pytest.mark.slow
def test_a_synchronous_run_keeps_its_lag_and_writes_all_its_results(tmp_path):
    delays = "generate=0.002,reward=0.001,queue=0.1,logprob=0.01,broadcast=0.1,train=0.01"
    done = train(tmp_path / "run", "--policy-lag", "0", "--steps", "5", f"deployment.delays={delays}")
    assert done.returncode == 0, done.stdout + done.stderr
    check_results(tmp_path / "run", 5, lag=0)
    assert max(row["lag/max"] for row in rows(tmp_path / "run")) == 0
    check_delays(tmp_path / "run", 5)
    assert "step    5/5" in done.stdout and "exposed generation" in done.stdout
    again = train(tmp_path / "run", "--steps", "1")
    assert again.returncode == 2 and "holds a run already" in again.stderr and again.stderr.count("\n") == 1


@pytest.mark.slow
def test_torchrun_ranks_play_the_roles(tmp_path):
    launcher = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "4",
        str(ROOT / "launch" / "async.py"),
    )
    done = train(tmp_path / "run", "--steps", "3", launcher=launcher)
    assert done.returncode == 0, done.stdout + done.stderr
    check_results(tmp_path / "run", 3, 1)


@pytest.mark.slow
def test_model_data_reward_and_generators_are_replaceable(tmp_path):
    shutil.copytree(resolve_path("asset:tiny/policy"), tmp_path / "model")
    problems = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(1, 9) for b in range(1, 9)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, problems[:40])))
    (tmp_path / "eval.jsonl").write_text("\n".join(map(json.dumps, problems[40:46])))
    # Like math-verify, this reward sets a timer, which only a process's main thread can.
    (tmp_path / "mine.py").write_text(
        "import os, signal\n"
        "open(f'reward.{os.getpid()}', 'w')\n"
        "def short(prompt, response, answer):\n"
        "    signal.signal(signal.SIGALRM, signal.SIG_DFL)\n"
        "    signal.alarm(600)\n"
        "    return 1 / (1 + len(response))\n"
    )
    done = train(
        tmp_path / "run",
        "--steps",
        "3",
        f"model.path={tmp_path}/model",
        f"data.train_file={tmp_path}/train.jsonl",
        f"data.eval_file={tmp_path}/eval.jsonl",
        "data.reward=mine:short",
        "deployment.generators=2",
        "rl.kl_coef=0.01",
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check_results(tmp_path / "run", 3, 1)
    assert all(0 < row["reward/mean"] < 1 for row in rows(tmp_path / "run"))
    assert rows(tmp_path / "run")[-1]["loss/kl"] > 0
    generators = {line["generator"] for line in ledger(tmp_path / "run") if line["event"] in ("trained", "evaluated")}
    assert generators == {"generator0", "generator1"}
    pids = [int(file.suffix[1:]) for file in tmp_path.glob("reward.*")]
    assert len(pids) == 3 and not outliving(pids)  # one of each generator, and one before the start


@pytest.mark.parametrize("kind, method", [("llama", "ngram"), ("qwen3_moe", "suffix")])
@pytest.mark.slow
def test_policies_of_other_families_are_trained(tmp_path, kind, method):
    from asyncspec.models import policy
    from asyncspec.models.shape import Experts, PolicyShape, RopeScaling

    shape = PolicyShape(
        vocab_size=64,
        dim=32,
        n_layers=3,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        hidden_dim=64,
        max_positions=512,
        rope_theta=1e4,
        norm_eps=1e-5,
        tied=True,
        eos_token_id=1,
        pad_token_id=0,
        model_type=kind,
        rope_scaling=RopeScaling(8.0, 1.0, 4.0, 128) if kind == "llama" else None,
        experts=Experts(8, 2, 32, True) if kind == "qwen3_moe" else None,
    )
    torch.manual_seed(0)
    model = policy.build(shape)
    model.init_states()
    policy.save(model, shape, tmp_path / "model", resolve_path("asset:tiny/policy"))
    (tmp_path / "mine.py").write_text("def short(prompt, response, answer):\n    return 1 / (1 + len(response))\n")
    done = train(
        tmp_path / "run",
        "--steps",
        "3",
        f"model.path={tmp_path}/model",
        f"speculation.method={method}",
        "data.reward=mine:short",
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = rows(tmp_path / "run")
    assert [row["step"] for row in metrics] == [0, 1, 2] and all(row["grad/norm"] > 0 for row in metrics)
    trained, read = policy.load(tmp_path / "run" / "checkpoint" / "policy")
    assert read == shape
    assert all(not torch.equal(a, b) for a, b in zip(trained.parameters(), model.parameters()))


@pytest.mark.slow
def test_without_a_draft_nothing_is_speculated_and_a_lag_of_two_is_kept(tmp_path):
    done = train(tmp_path / "run", "--policy-lag", "2", "--steps", "4", "speculation.method=none")
    assert done.returncode == 0, done.stdout + done.stderr
    check_finished(tmp_path / "run", 4, lag=2)
    for row in rows(tmp_path / "run"):
        assert row["spec/draft_length"] == 0 and row["spec/acceptance_length"] == 1


def start_and_wait_for_steps(run_dir, launcher, steps=2):
    process = subprocess.Popen(
        [*launcher, "--run-dir", str(run_dir), "--steps", "10000", *SMALL],
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
    process = start_and_wait_for_steps(run_dir, launcher)
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
        open_tickets[line["ticket"]] += 1 if line["event"] == "issued" else -1
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
import os

calls = 0


def leaves(prompt, response, answer):
    os._exit(3)


def overflows(prompt, response, answer):  # for one group of the second step
    global calls
    calls += 1
    return 1e308 if 40 < calls < 44 else float(calls % 3)
"""


@pytest.mark.slow
def test_an_actor_that_exits_silently_is_named(tmp_path):
    (tmp_path / "mine.py").write_text(REWARDS)
    run = Running.new(
        tmp_path / "run",
        "data.reward=mine:leaves",
        "deployment.replacements=0",
        launcher=(*TORCHRUN, "--nproc-per-node", "2", SCRIPT),
    )
    output = run.end(1)
    assert f"failed: generator0 ended with exit code 3; see {tmp_path}/run/logs/generator0.log" in output, output


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
    done = train(tmp_path / "run", "data.reward=broken:two", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert (
        "failed: generator0 failed: RewardError: data.reward=broken:two: failed for 9 of 9 rollouts, more than"
        in done.stdout
    )
    assert "the last returned nan" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "Traceback" in (tmp_path / "run" / "logs" / "generator0.log").read_text()
