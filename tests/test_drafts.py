"""Drafts: their supervision, their offline training, and that training them changes nothing else."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import rows, train

from asyncspec.commands.draft_samples import Sampler, drafting
from asyncspec.commands.draft_settings import Training
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
