"""A whole run that is interrupted during an evaluation: it is repeated, and the best version has its own weights."""

import json
import signal

import pytest
import torch
from runs import Running, check_finished, ledger, rows

from asyncspec.ledger import best, checkpoint
from asyncspec.models import policy


def evaluated(run_dir, version):
    events = ledger(run_dir) if (run_dir / "ledger.jsonl").exists() else []
    return [event for event in events if event["event"] == "evaluated" and event["step"] == version]


@pytest.mark.slow
def test_an_interrupted_evaluation_is_repeated_and_the_best_version_has_the_weights_that_were_scored(tmp_path):
    for name, count in (("train", 60), ("easy", 6), ("hard", 6)):
        terms = "+3+4+7+9" if name == "hard" else "+2"
        extra = 23 if name == "hard" else 2
        lines = [json.dumps({"prompt": f"{i}{terms}=", "answer": str(i + extra)}) for i in range(1, count + 1)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    run_dir = tmp_path / "run"
    running = Running.new(
        run_dir,
        "--steps=4",
        "--policy-lag=1",
        f"data.train_file={tmp_path}/train.jsonl",
        f"data.eval_file=easy={tmp_path}/easy.jsonl,hard={tmp_path}/hard.jsonl",
        "eval.samples=4",
        "eval.pass_at=1,2,4",
        "eval.keep_best=true",
        "checkpoint.keep=9",
        "deployment.delays=generate=0.1,train=0.7",  # no other version is made while this one is evaluated,
    )
    running.wait_for(lambda: evaluated(run_dir, 2), "an evaluation of version 2")
    running.process.send_signal(signal.SIGINT)
    running.end(130)
    assert len(evaluated(run_dir, 2)) < 12
    output = Running.resumed(run_dir, "deployment.delays=").end()
    assert "with version 2 (48 rollouts)" in output and "  hard: accuracy " in output
    check_finished(run_dir, 4)

    found = [json.loads(line) for line in open(run_dir / "evaluations.jsonl")]
    assert [each["eval/policy_version"] for each in found] == [0, 2, 4]
    assert [each["eval/policy_version_max"] for each in found] == [0, 2, 4]
    last = rows(run_dir)[-1]
    assert {key: last[key] for key in found[-1]} == found[-1]
    assert last["eval/score"] == pytest.approx((last["eval/easy/score"] + last["eval/hard/score"]) / 2)
    for name in ("eval", "eval/easy", "eval/hard"):
        assert last[f"{name}/pass@1"] <= last[f"{name}/pass@2"] <= last[f"{name}/pass@4"]
        assert last[f"{name}/score_low"] <= last[f"{name}/score"] <= last[f"{name}/score_high"]

    record = best.read(run_dir)
    highest = max(found, key=lambda each: each["eval/score"])
    assert (record["version"], record["score"]) == (highest["eval/policy_version"], highest["eval/score"])
    kept, _ = policy.load(run_dir / "best" / "policy")
    for version in (0, 2, 4):
        parameters = {name: torch.empty_like(parameter) for name, parameter in kept.named_parameters()}
        checkpoint.load(checkpoint.where(run_dir, "trainer", version), {"trainer": {"parameters": parameters}})
        same = all(torch.equal(parameters[name], parameter) for name, parameter in kept.named_parameters())
        assert same is (version == record["version"])
