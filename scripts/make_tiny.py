#!/usr/bin/env python3
"""Make the shipped policy and its drafts (asyncspec/assets/tiny) from seeds.

1. policy: a deep, narrow Qwen3 is warmed up by supervision on demonstrations of the sums task, learning rate annealed to
   zero. Some demonstrations guess the answer instead of working it out, and some working steps hold a slip that is then
   carried on: the policy knows the method, does not always use it, and errs at random, which is what RL can mend.
   About 6 minutes on two cores.
2. eagle3, mtp, draft_model: drafts trained on rollouts of that policy, supervised by the policy's own distributions.
   20 to 26 minutes each on one core.

Prints the held-out accuracy of the policy at temperature 1 and the acceptance length of each draft, measured by
generating with it.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import Progress

from asyncspec.engine.base import Request
from asyncspec.engine.torch_engine import TorchEngine
from asyncspec.models import eagle3, mtp, policy, tokenizer as tokenizers
from asyncspec.models.draft_training import DraftTrainer, distillation_loss, supervise
from asyncspec.rl import tasks
from asyncspec.speculation.make import drafter_maker

SHAPE = policy.PolicyShape(
    vocab_size=64, dim=64, n_layers=24, n_heads=4, n_kv_heads=2, head_dim=16, hidden_dim=192, max_positions=512,
    rope_theta=1e4, norm_eps=1e-6, tied=True, eos_token_id=1, pad_token_id=0,
)
SMALL_SHAPE = replace(SHAPE, n_layers=2)  # of the separate draft model
METHODS = ("eagle3", "mtp", "draft_model")

TOKENS_PER_DEMONSTRATION = 27  # their mean; scales the loss


def demonstrations(tokenizer, rng, count, guess, slip):
    """`count` token sequences, prompt and response, with the length of each prompt."""
    for _ in range(count):
        terms = tasks.sum_terms(rng)
        prompt = "+".join(map(str, terms)) + "="
        guessed = rng.random() < guess
        response = tasks.guessed_response(terms, rng) if guessed else tasks.worked_response(terms, rng, slip)
        yield tokenizer.encode(prompt + response).ids + [SHAPE.eos_token_id], len(prompt)


def batches(tokenizer, rng, count, rows, guess, slip):
    """`count` batches of sequences of like length: (tokens_BL, mask_BL of response tokens)."""
    pool = 32
    for _ in range(-(-count // pool)):
        items = sorted(demonstrations(tokenizer, rng, pool * rows, guess, slip), key=lambda item: len(item[0]))
        for index in rng.permutation(pool):
            part = items[index * rows : (index + 1) * rows]
            longest = max(len(ids) for ids, _ in part)
            tokens_BL = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in part])
            mask_BL = torch.tensor([[start <= i < len(ids) for i in range(longest)] for ids, start in part])
            yield tokens_BL, mask_BL


def warm_up(args, tokenizer):
    torch.manual_seed(args.seed)
    rng = np.random.default_rng([args.seed, 1])
    model = policy.build(SHAPE)
    model.init_states()
    decay = [p for p in model.parameters() if p.ndim > 1]
    other = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.05}, {"params": other, "weight_decay": 0.0}], lr=args.lr, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1.0, (s + 1) / 50) * 0.5 * (1 + np.cos(np.pi * min(1.0, s / args.steps))))
    with Progress() as progress:
        bar = progress.add_task("policy", total=args.steps)
        for step, (tokens_BL, mask_BL) in enumerate(batches(tokenizer, rng, args.steps, 32, args.guess, args.slip)):
            hidden_BLD, _ = policy.hidden_states(model, tokens_BL[:, :-1])
            logits_BLV = model.lm_head(hidden_BLD)
            # Batches hold sequences of like length, so a mean over each would weigh short responses more.
            total = F.cross_entropy(logits_BLV[mask_BL[:, 1:]], tokens_BL[:, 1:][mask_BL[:, 1:]], reduction="sum")
            loss = total / mask_BL.sum()
            optimizer.zero_grad()
            (total / (len(tokens_BL) * TOKENS_PER_DEMONSTRATION)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            progress.update(bar, advance=1, description=f"policy, loss {loss.item():.3f}")
            if step % 200 == 199:
                progress.console.print(f"policy step {step + 1}: loss {loss.item():.3f}")
    return model


def rollouts(tokenizer, model, problems, samples, seed, make_drafter=None, draft_length=0):
    """Sample at temperature 1: [(problem, completion)]."""
    engine = TorchEngine(
        SHAPE, make_drafter, slots=64, max_prompt_tokens=96, max_response_tokens=320,
        draft_length=draft_length)
    engine.load_policy(dict(model.named_parameters()), 0)
    for i, problem in enumerate(problems):
        engine.submit(Request(i, tokenizer.encode(problem.prompt).ids, [seed + i * samples + j for j in range(samples)], 320))
    done = []
    while engine.live or engine.waiting:
        done += [(problems[c.request_id], c) for c in engine.poll()]
    return done


def accuracy(tokenizer, done):
    return float(np.mean([
        tasks.exact_match(p.prompt, tokenizer.decode(c.tokens.tolist(), skip_special_tokens=True), p.answer)
        for p, c in done]))


def supervision(args, tokenizer, model, stream):
    """Endless batches (tokens_BL, mask_BL of response tokens) of fresh rollouts, each seen twice."""
    round_ = 0
    while True:
        done = rollouts(tokenizer, model, tasks.sums(1000 * stream + round_, 256), 1, 10**6 * (1000 * stream + round_ + 1))
        done.sort(key=lambda item: len(item[1].tokens))
        order = np.random.default_rng([args.seed, stream, round_]).permutation(len(done) // 32)
        for i in [*order, *order]:
            sequences = [(tokenizer.encode(p.prompt).ids, c.tokens.tolist()) for p, c in done[i * 32 : (i + 1) * 32]]
            longest = max(len(a) + len(b) for a, b in sequences)
            tokens_BL = torch.tensor([a + b + [0] * (longest - len(a) - len(b)) for a, b in sequences])
            yield tokens_BL, torch.tensor([[len(a) <= i < len(a) + len(b) for i in range(longest)] for a, b in sequences])
        round_ += 1


def train_draft(args, tokenizer, model, method):
    """Returns the draft and a function that writes it to a directory."""
    torch.manual_seed(args.seed + 1)
    if method == "draft_model":
        draft, loss = policy.build(SMALL_SHAPE), partial(distillation_loss, temperature=1.0)
        draft.init_states()
        save = partial(policy.save, draft, SMALL_SHAPE)
    else:
        draft = mtp.MTP(SHAPE, model.lm_head.weight) if method == "mtp" else eagle3.Eagle3(eagle3.DraftShape.for_policy(SHAPE))
        loss, save = partial(eagle3.draft_loss, unroll=args.unroll), partial({"mtp": mtp, "eagle3": eagle3}[method].save, draft)
    trainer = DraftTrainer(draft, loss, args.draft_lr, args.draft_steps)
    aux_layers = getattr(draft, "aux_layers", ())
    with Progress() as progress:
        bar = progress.add_task(method, total=args.draft_steps)
        for tokens_BL, mask_BL in supervision(args, tokenizer, model, 1 + METHODS.index(method)):
            features_BLE, embeds_BLD, target_BLV, _ = supervise(model, aux_layers, tokens_BL, mask_BL, 1.0)
            inputs = (tokens_BL,) if method == "draft_model" else (features_BLE, embeds_BLD)
            value, rates = trainer.step(*inputs, target_BLV, mask_BL)
            progress.update(bar, advance=1, description=f"{method}, acceptance {rates[0]:.3f}")
            if trainer.steps % 250 == 0:
                progress.console.print(f"{method} step {trainer.steps}: loss {value:.3f}, acceptance by position "
                                       + " ".join(f"{r:.3f}" for r in rates))
            if trainer.steps >= args.draft_steps:
                return save


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "asyncspec/assets/tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1400, help="warm-up steps of 32 demonstrations")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--guess", type=float, default=0.4, help="share of demonstrations that guess the answer")
    parser.add_argument("--slip", type=float, default=0.15, help="share of working steps that hold a slip")
    parser.add_argument("--draft-steps", type=int, default=4000, help="steps of 32 rollouts, for each draft")
    parser.add_argument("--unroll", type=int, default=5, help="positions eagle3 and mtp are unrolled over in training")
    parser.add_argument("--draft-lr", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=["policy", *METHODS], help="make just one; the policy is then read from --out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    started = time.monotonic()
    tokenizer = tokenizers.make_character_tokenizer()
    if args.only in (None, "policy"):
        model = warm_up(args, tokenizer)
        policy.save(model, SHAPE, args.out / "policy")
        tokenizers.save(tokenizer, args.out / "policy")
    model, _ = policy.load(args.out / "policy")
    done = rollouts(tokenizer, model, tasks.sums(7, 512), 2, 1)
    lengths = [len(c.tokens) for _, c in done]
    print(f"policy: held-out accuracy {accuracy(tokenizer, done):.3f} at temperature 1; response tokens mean "
          f"{np.mean(lengths):.1f}, median {np.median(lengths):.0f}, 99% {np.quantile(lengths, 0.99):.0f}, max {max(lengths)}; "
          f"{time.monotonic() - started:.0f} s")
    for method in METHODS if args.only in (None, *METHODS) else ():
        if args.only in (None, method):
            train_draft(args, tokenizer, model, method)(args.out / method)
            done = rollouts(tokenizer, model, tasks.sums(8, 256), 1, 5, drafter_maker(method, args.out / method, SHAPE), 3)
            emitted = sum(len(c.tokens) - 1 for _, c in done)
            print(f"{method}: acceptance length {emitted / sum(c.verifications for _, c in done):.3f} at k=3 on held-out prompts; "
                  f"accuracy with speculation {accuracy(tokenizer, done):.3f}; {time.monotonic() - started:.0f} s in all")


if __name__ == "__main__":
    main()
