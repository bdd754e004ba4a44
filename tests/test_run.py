"""Whole runs of a few steps on the shipped policy, with real processes, queues and broadcasts."""

import json
import os
import shutil
import sys
from collections import Counter, defaultdict

import pytest
import torch
from runs import (
    ROOT,
    check_finished,
    ledger,
    outliving,
    rows,
    train,
)

from asyncspec.bench.attribution import Trace
from asyncspec.config import resolve_path
from asyncspec.timing.attribution import PARTS
from asyncspec.timing.exporters import read_trace

KEYS = """
step policy_version reward/mean eval/score lag/mean lag/max loss/policy loss/kl tokens/response_mean time/step
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
    assert metrics[-1]["eval/policy_version"] == steps and 0 <= metrics[-1]["eval/score"] <= 1
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
    delays = Trace.of(read_trace(run_dir)).delays
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


@pytest.mark.slow
def test_a_mixture_of_experts_is_trained(tmp_path):
    from asyncspec.models import policy
    from asyncspec.models.shape import Experts, PolicyShape

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
        model_type="qwen3_moe",
        experts=Experts(8, 2, 32, True),
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
        "speculation.method=suffix",
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
