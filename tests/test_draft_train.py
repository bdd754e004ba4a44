"""`asyncspec draft train`: its samples, its time, what it measures and says, and what it refuses."""

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from asyncspec.commands import draft_train
from asyncspec.commands.draft_measure import Worth
from asyncspec.commands.draft_samples import Rollout, sampled
from asyncspec.commands.draft_settings import Training
from asyncspec.commands.draft_train import _draft_vocabulary, train_draft
from asyncspec.drafts import draft as drafts
from asyncspec.errors import UserError


def run_draft_train(cwd, *args, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "asyncspec.cli", "draft", "train", *args],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=240,
        **kwargs,
    )


def test_no_draft_is_written_if_no_step_was_done(tmp_path, monkeypatch):
    monkeypatch.setattr(draft_train, "train_draft", lambda draft, *_: SimpleNamespace(steps=0))
    with pytest.raises(UserError, match="--minutes 0.5: no step was done in them; expected more"):
        draft_train.run(Training(out=str(tmp_path / "draft"), minutes=0.5), time.monotonic())
    assert not list((tmp_path / "draft").glob("*.safetensors"))


@pytest.mark.slow
def test_draft_train_makes_a_draft_and_trains_it_further(tmp_path):
    small = ("--threads", "1", "--held-out", "32")
    done = run_draft_train(tmp_path, "--minutes", "0", "--steps", "60", "--draft-vocab", "20", *small)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n60 steps; " in done.stdout
    first = float(done.stdout.split("\nacceptance length ")[1].split()[0])
    assert first > 1.15  # untrained: 1.08 at most
    assert re.search(r"n-gram lookup, which needs no draft, has 1\.\d+\n", done.stdout)
    assert re.search(
        r"speed over no draft, by sequences at once: [\d.]+ with 1, [\d.]+ with 4, .* 16; it ", done.stdout
    )
    assert json.loads((tmp_path / "draft" / "config.json").read_text())["draft_vocab_size"] == 20
    assert any((tmp_path / "draft" / "tensorboard").iterdir())
    lines = [
        json.dumps({"prompt": f"{a}+{b}=", "response": f"{a}+{b}={a + b},#{a + b}"})
        for a in range(1, 9)
        for b in range(1, 9)
    ]
    (tmp_path / "rollouts.jsonl").write_text("\n".join(lines))
    done = run_draft_train(
        tmp_path,
        "--init",
        "draft",
        "--rollouts",
        "rollouts.jsonl",
        "--out",
        "more",
        "--minutes",
        "0",
        "--steps",
        "4",
        *small,
    )
    assert done.returncode == 0 and "acceptance length before: " in done.stdout, done.stdout + done.stderr


def test_sampling_and_training_end_when_their_time_is_over(small_shape, small_policy):
    settings = Training(max_prompt_tokens=8, max_response_tokens=8, batch=4)
    draft = drafts.new("eagle3", small_shape, small_policy)
    over = time.monotonic()
    assert next(sampled(small_policy, small_shape, [[2, 3]], settings, over)) == []
    rounds = sampled(small_policy, small_shape, [[2, 3], [4]], settings)
    assert train_draft(draft, small_policy, rounds, settings, lambda *_: None, over).steps == 0
    steps = []
    trained = train_draft(draft, small_policy, rounds, replace(settings, steps=5), lambda *given: steps.append(given))
    assert trained.steps == len(steps) == 5


def test_rollouts_are_of_the_prompts_that_they_name(small_shape, small_policy):
    settings = Training(max_prompt_tokens=8, max_response_tokens=8, batch=4)
    first = next(sampled(small_policy, small_shape, [[2, 3], [4, 5, 2]], settings))
    assert len(first) >= 4 and {rollout.prompt for rollout in first} == {(2, 3), (4, 5, 2)}
    assert all(1 <= len(rollout.response) <= 8 for rollout in first)


def test_a_draft_proposes_the_tokens_that_occur_most(small_shape):
    settings = Training(draft_vocab=4)
    shape = replace(small_shape, eos_token_id=5)
    chosen = _draft_vocabulary(settings, shape, [[3, 3, 3]], [Rollout((3,), (2, 2, 5))])
    assert chosen.tolist() == [0, 2, 3, 5]  # 0 occurs as little as others, and has the lowest number
    assert _draft_vocabulary(replace(settings, draft_vocab=0), shape, [[3]], []) is None


@pytest.mark.parametrize(
    "speedups,said",
    [
        ({1: 1.4, 4: 1.1, 16: 0.8}, "it pays at 1 and 4;"),
        ({1: 1.4, 4: 1.1}, "it pays everywhere that was measured;"),
        ({1: 0.9}, "it does not pay on this machine;"),
    ],
)
def test_a_draft_is_said_to_pay_where_it_is_faster(speedups, said):
    assert Worth(2.0, 1.0, 8, speedups).verdict().startswith(said)


@pytest.mark.parametrize(
    "args,message",
    [
        (["--method", "eagle2"], "'eagle2': expected one of eagle3, mtp, draft_model; nearest: eagle3"),
        (["--minutes", "soon"], "--minutes soon: expected a number"),
        (["--policy", "nowhere"], "--policy nowhere: expected a directory with config.json in it"),
        (["--prompts", "none.jsonl"], "--prompts none.jsonl: expected a data file that exists"),
        (
            ["--prompts", "bad.jsonl"],
            "bad.jsonl: line 2: expected in prompt text, or a list of messages with role and content, got 'None'",
        ),
        (["--method", "mtp", "--draft-vocab", "9"], "--draft-vocab 9: expected no value with --method mtp"),
        (["--template-variables", "x"], "--template-variables x: expected name=value,name=value: 'x' is not"),
        (["--minutes", "0"], "--minutes 0.0: expected more than 0, or --steps"),
        (["--step", "0"], "--steps"),
        (["60"], "'60': expected flags only"),
    ],
)
def test_draft_train_refuses_wrong_input_in_one_line(tmp_path, args, message):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1+1="}\n{"prompts": 3}\n')
    done = run_draft_train(tmp_path, *(["--minutes", "0", "--stepps", "0"] if args == ["--step", "0"] else args))
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
