"""Drafts: their supervision, their offline training, and that training them changes nothing else."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import rows, train

from asyncspec.commands.draft_measure import Worth
from asyncspec.commands.draft_samples import Rollout, Sampler, drafting, sampled
from asyncspec.commands.draft_settings import Training
from asyncspec.commands.draft_train import _draft_vocabulary, train_draft
from asyncspec.config import resolve_path
from asyncspec.drafts import draft as drafts
from asyncspec.drafts.supervision import Target, pack, supervise, unpack
from asyncspec.drafts.training import DraftTrainer, imitation, unrolled_loss
from asyncspec.models import CheckpointError, policy
from asyncspec.models.hf_files import read_tensors, write_checkpoint

ROOT = Path(__file__).parents[1]
VOCABULARY = 6


def rollouts(seed=0, B=5, L=14):
    """Token rows, and masks of their responses. Lengths vary, and one row has no response."""
    rng = np.random.default_rng(seed)
    tokens_BL = torch.from_numpy(rng.integers(2, VOCABULARY, (B, L)))
    first_B, end_B = rng.integers(1, 5, B), rng.integers(6, L + 1, B)
    end_B[0] = L
    mask_BL = torch.tensor([[first <= p < end for p in range(L)] for first, end in zip(first_B, end_B)])
    if B > 1:
        mask_BL[1] = False
    return tokens_BL, mask_BL


@settings(max_examples=100)
@given(st.integers(0, 10**6), st.integers(1, VOCABULARY - 1))
def test_a_truncated_distribution_never_overstates_the_divergence(seed, kept):
    """Coarse-graining: KL over the kept tokens and the rest is at most the whole KL; acceptance is at least as high."""
    generator = torch.Generator().manual_seed(seed)
    logp, logq = (3 * torch.randn(1, 4, VOCABULARY, generator=generator, dtype=torch.float64) for _ in range(2))
    logp, logq = logp.log_softmax(-1), logq.log_softmax(-1)
    whole, overlap = Target(logp).compared(logq)
    top, token = logp.topk(kept)
    coarse, bound = Target(top, token).compared(logq)
    rest = (1 - top.exp().sum(-1)).clamp(min=1e-300)
    coarse_entropy = -(top.exp() * top).sum(-1) - rest * rest.log()
    whole_entropy = -(logp.exp() * logp).sum(-1)
    assert (coarse - coarse_entropy <= whole - whole_entropy + 1e-6).all()
    assert (bound >= overlap - 1e-6).all() and (bound <= 1 + 1e-6).all()
    every = Target(*logp.topk(VOCABULARY))
    torch.testing.assert_close(every.compared(logq), (whole, overlap), atol=1e-5, rtol=1e-5)


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.integers(1, VOCABULARY))
def test_a_draft_with_few_tokens_gets_no_credit_for_the_others(seed, kept):
    """With all tokens kept, truncated and whole targets agree within a draft's vocabulary. With fewer, acceptance is
    still an upper bound.
    """
    generator = torch.Generator().manual_seed(seed)
    logp = (3 * torch.randn(1, 4, VOCABULARY, generator=generator, dtype=torch.float64)).log_softmax(-1)
    d2t = torch.tensor([1, 2, 4])
    t2d = torch.full((VOCABULARY,), -1)
    t2d[d2t] = torch.arange(3)
    logq = (3 * torch.randn(1, 4, 3, generator=generator, dtype=torch.float64)).log_softmax(-1)
    whole = Target(logp).within(t2d, d2t).compared(logq)
    coarse = Target(*logp.topk(kept)).within(t2d, d2t).compared(logq)
    assert (coarse[1] >= whole[1] - 1e-6).all()
    if kept == VOCABULARY:
        torch.testing.assert_close(coarse, whole, atol=1e-5, rtol=1e-5)


def test_a_draft_that_cannot_match_the_policy_learns_to_be_accepted_more():
    """The draft has one distribution for two contexts; one of them occurs four times in five. Trained with
    cross-entropy it becomes their mean.
    """
    target, weight = (
        Target(torch.tensor([[[0.49, 0.49, 0.02]], [[0.49, 0.02, 0.49]]]).log()),
        torch.tensor([[0.8], [0.2]]),
    )

    def accepted(loss):
        logits = torch.zeros(3, requires_grad=True)
        optimizer = torch.optim.Adam([logits], lr=0.05)
        for _ in range(300):
            entropy, overlap = target.compared(logits.log_softmax(-1).expand(2, 1, 3))
            optimizer.zero_grad()
            (loss(entropy, overlap) * weight).sum().backward()
            optimizer.step()
        return (overlap * weight).sum().item()

    assert accepted(imitation) > accepted(lambda entropy, overlap: entropy) + 0.01


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.integers(0, VOCABULARY))
def test_a_draft_that_equals_the_policy_learns_nothing(seed, kept):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 1, VOCABULARY, generator=generator, dtype=torch.float64, requires_grad=True)
    logq = logits.log_softmax(-1)
    target = Target(logq.detach()) if kept in (0, VOCABULARY) else Target(*logq.detach().topk(kept))
    imitation(*target.compared(logq)).sum().backward()
    assert logits.grad.abs().max() < 1e-6


@pytest.mark.parametrize("method", drafts.METHODS)
def test_a_draft_is_trained_for_the_temperature_it_will_be_sampled_at(small_shape, small_policy, method):
    """The loss is least if the draft's logits, divided by the temperature, equal the target's logits.

    The engine divides them, too.
    """
    tokens_BL, mask_BL = rollouts()
    torch.manual_seed(1)
    draft = drafts.new(method, small_shape, small_policy)
    made = supervise(small_policy, draft.aux_layers, tokens_BL, mask_BL, 0.5)
    trainer = DraftTrainer(draft.module, draft.loss(1, 0.5), 5e-3)
    for _ in range(150):
        _, rates = trainer.step(made)
    assert rates[0] > 0.9  # the draft has memorized the batch
    _, wrong = drafts.Draft(draft.method, draft.module, draft.shape).loss(1, 1.0)(draft.module, made)
    assert rates[0] > wrong[0] + 0.02  # it has not learned the distribution at temperature 1


@pytest.mark.parametrize("window,top", [(0, 0), (0, 3), (5, 0), (5, 2), (100, 100)])
def test_supervision_arrives_as_it_was_sent(small_shape, small_policy, window, top):
    tokens_BL, mask_BL = rollouts()
    sent = supervise(small_policy, small_shape.aux_layers, tokens_BL, mask_BL, 0.8)
    got = unpack(pack(sent, top, window, np.random.default_rng(1)))
    for b in range(len(tokens_BL)):
        start = int(got.start_B[b])
        for t in range(got.tokens_BL.shape[1]):
            position = start + t
            if position >= tokens_BL.shape[1] or not mask_BL[b, position:].any():
                assert not got.mask_BL[b, t]
                continue
            assert got.tokens_BL[b, t] == tokens_BL[b, position] and got.mask_BL[b, t] == mask_BL[b, position]
            for mine, theirs in ((got.features_BLE, sent.features_BLE), (got.embeds_BLD, sent.embeds_BLD)):
                torch.testing.assert_close(mine[b, t], theirs[b, position], atol=5e-3, rtol=1e-3)
            if t + 1 < got.tokens_BL.shape[1] and got.mask_BL[b, t + 1]:
                logprob = sent.target.logprob_BLM[b, position]
                kept = logprob if got.target.token_BLM is None else logprob[got.target.token_BLM[b, t]]
                torch.testing.assert_close(got.target.logprob_BLM[b, t], kept, atol=5e-3, rtol=1e-3)
                if got.target.token_BLM is not None:
                    assert set(got.target.token_BLM[b, t].tolist()) == set(logprob.topk(top).indices.tolist())
    if window == 5:
        assert got.tokens_BL.shape[1] <= 5 and got.mask_BL[0].any()
    if (window, top) == (0, 0):  # then the loss is the same, too
        for method in drafts.METHODS:
            torch.manual_seed(1)
            draft = drafts.new(method, small_shape, small_policy)
            loss = draft.loss(3, 0.8)
            made = supervise(small_policy, draft.aux_layers, tokens_BL, mask_BL, 0.8)
            torch.testing.assert_close(
                loss(draft.module, unpack(pack(made)))[0], loss(draft.module, made)[0], atol=2e-3, rtol=1e-3
            )


def test_the_loss_of_a_window_does_not_depend_on_where_it_starts(small_shape, small_policy):
    """Rotary positions are relative, so the same window further on gives the same loss."""
    tokens_BL, mask_BL = rollouts()
    torch.manual_seed(1)
    draft = drafts.new("eagle3", small_shape, small_policy).module
    made = supervise(small_policy, small_shape.aux_layers, tokens_BL, mask_BL, 1.0)
    there = made._replace(start_B=torch.full((len(tokens_BL),), 7))
    torch.testing.assert_close(unrolled_loss(draft, there, 3)[0], unrolled_loss(draft, made, 3)[0])


def test_a_draft_with_few_tokens_is_saved_and_loaded_in_vllms_format(tmp_path, small_shape, small_policy):
    tokens = torch.tensor([1, 2, 4])
    draft = drafts.new("eagle3", small_shape, small_policy, tokens)
    draft.save(tmp_path)
    saved, config = read_tensors(tmp_path), json.loads((tmp_path / "config.json").read_text())
    assert (
        config["draft_vocab_size"] == 3
        and config["vocab_size"] == VOCABULARY
        and saved["lm_head.weight"].shape == (3, small_shape.dim)
    )
    assert (torch.arange(3) + saved["d2t"]).tolist() == [1, 2, 4] and saved["t2d"].tolist() == [
        False,
        True,
        True,
        False,
        True,
        False,
    ]
    assert drafts.load("eagle3", tmp_path, small_shape).module.d2t_U.tolist() == [1, 2, 4]
    write_checkpoint(tmp_path, config, saved | {"d2t": torch.tensor([5, 5, 5])})
    with pytest.raises(CheckpointError, match="d2t does not name 3 different tokens"):
        drafts.load("eagle3", tmp_path, small_shape)


@pytest.mark.parametrize(
    "method,tokens", [("eagle3", None), ("eagle3", torch.tensor([1, 2, 3, 5])), ("mtp", None), ("draft_model", None)]
)
def test_a_draft_learns_from_few_or_all_tokens_of_a_distribution(small_shape, small_policy, method, tokens):
    for top in (0, 3):
        torch.manual_seed(2)
        draft = drafts.new(method, small_shape, small_policy, tokens)
        trainer = DraftTrainer(draft.module, draft.loss(2, 1.0), 5e-3)
        batch = unpack(pack(supervise(small_policy, draft.aux_layers, *rollouts(3, 32), 1.0), top))
        losses, rates = zip(*(trainer.step(batch) for _ in range(40)))
        assert losses[-1] < losses[0] - 0.05 and np.mean(rates[-1]) > np.mean(rates[0])
        assert trainer.skipped == 0


def run_draft_train(cwd, *args, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "asyncspec.cli", "draft", "train", *args],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=240,
        **kwargs,
    )


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


ONE_GROUP = ("speculation.draft_length=3", "eval.every=0", "data.eval_prompts=0", "rl.group_size=8")


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
@pytest.mark.slow
def test_training_a_draft_changes_no_weight_of_the_policy(tmp_path, method):
    """The policies are bitwise equal. Lag is 0, and k and the proposing draft are fixed. One group per step makes the
    batches identical.
    """
    trained = {}
    for adapt in (True, False):
        run_dir = tmp_path / str(adapt)
        done = train(
            run_dir,
            "--policy-lag",
            "0",
            "--steps",
            "8",
            f"speculation.method={method}",
            f"draft.adapt={adapt}",
            "draft.publish_every=1000",
            *ONE_GROUP,
            groups=1,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        checkpoint = read_tensors(run_dir / "checkpoint" / "policy")
        trained[adapt] = {k: v for k, v in checkpoint.items() if not k.startswith("mtp.")}
        if adapt:  # the draft has learned
            learned = read_tensors(run_dir / "checkpoint" / "draft") if method == "eagle3" else checkpoint
            before = read_tensors(resolve_path(f"asset:tiny/{method}"))
            assert any(not torch.equal(learned[name], before[name]) for name in before if name.endswith("proj.weight"))
    start = read_tensors(resolve_path("asset:tiny/policy"))
    assert any(not torch.equal(trained[True][k], start[k]) for k in start)
    assert all(torch.equal(trained[True][k], trained[False][k]) for k in trained[False])


@pytest.mark.slow
def test_mtp_is_trained_and_exported_with_the_policy_and_drafts_from_the_export(tmp_path):
    done = train(tmp_path / "run", "--steps", "3", "speculation.method=mtp")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        rows(tmp_path / "run")[-1].get("draft/lag", 0) <= 2
        and not (tmp_path / "run" / "logs" / "draft_adapter.log").exists()
    )
    checkpoint = tmp_path / "run" / "checkpoint" / "policy"
    before = read_tensors(resolve_path("asset:tiny/mtp"))
    after = read_tensors(checkpoint)
    assert all(
        name in after and not torch.equal(before[name], after[name]) for name in before if name.endswith("proj.weight")
    )
    done = train(
        tmp_path / "more",
        "--steps",
        "2",
        "speculation.method=mtp",
        f"model.path={checkpoint}",
        f"speculation.draft_path={checkpoint}",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert rows(tmp_path / "more")[-1]["spec/acceptance_length"] > 2.5


def test_vllm_accepts_as_many_proposals_of_our_draft_as_our_engine():
    python = os.environ.get("ASYNCSPEC_VLLM_PYTHON")
    if not python:
        pytest.skip("ASYNCSPEC_VLLM_PYTHON is not set; scripts/compare/make_environments.sh makes the environment")
    from asyncspec.models import tokenizer
    from asyncspec.speculation.draft_length import FixedLength
    from asyncspec.tasks.sums import sums

    class Counting(FixedLength):
        watches = True

        verified = accepted = 0

        def observe(self, step):
            kept_B = step.kept_B
            if step.found_B is not None:  # if a row kept all up to its end, vLLM counts the proposals beyond it, too
                kept_B = np.where(kept_B >= step.found_B, step.draft_length, kept_B)
            self.verified, self.accepted = self.verified + step.live, self.accepted + int(kept_B.sum())

    paths = [resolve_path(f"asset:tiny/{name}") for name in ("policy", "eagle3")]
    model, shape = policy.load(paths[0])
    encoder = tokenizer.load(paths[0])
    prompts = [encoder.encode(p.prompt).ids for p in sums(99, 400)]
    sampler = Sampler(model, shape, Training(), drafting(drafts.load("eagle3", paths[1], shape)), 3)
    sampler.engine.use(counting := Counting(3))
    sampler(prompts, 7)
    done = subprocess.run(
        [python, str(ROOT / "scripts/compare/vllm_eagle3.py"), *map(str, paths), "3"],
        capture_output=True,
        text=True,
        input=json.dumps({"prompts": prompts, "max_tokens": 320, "temperature": 1.0}),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout)
    # Each mean has a standard error of 0.7% (about 2,500 verifications; mean 3.6, standard deviation 1), so 3% is three
    # standard errors of the difference.
    assert 1 + theirs["accepted"] / theirs["drafts"] == pytest.approx(
        1 + counting.accepted / counting.verified, rel=0.03
    )
