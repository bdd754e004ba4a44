#!/usr/bin/env python3
"""Make the shipped policy and its drafts (asyncspec/assets/tiny) from seeds.

1. policy: a deep, narrow Qwen3 is warmed up by supervised training on demonstrations of the sums task. The learning
   rate is annealed to zero. Some demonstrations guess the answer instead of working it out. Some working steps contain
   a slip, and the error is carried on. So the policy knows the method, does not always use it, and errs at random: RL
   can correct that. This takes about 6 minutes with --threads 2 on two cores.
2. eagle3, mtp, draft_model: drafts are trained on rollouts of that policy, supervised by the policy's own
   distributions. This takes about an hour for each draft on one core. mtp and draft_model were made with
   --draft-steps 4000 --unroll 5, in 20 to 26 minutes. All three learned by cross-entropy alone. eagle3 was then trained
   further with `drafts.training.imitation`, twice: --only eagle3 --go-on --draft-lr 1e-3, first with
   --draft-steps 3000 --seed 5, then with --draft-steps 3200 --seed 9.

The script prints the held-out accuracy of the policy at temperature 1 and the acceptance length of each draft, measured
by generating with it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import Progress
from tokenizers import Tokenizer, decoders, models

from asyncspec.commands.draft_samples import Sampler, acceptance_length, drafting, sampled
from asyncspec.commands.draft_settings import Training
from asyncspec.commands.draft_train import train_draft
from asyncspec.drafts import draft as drafts
from asyncspec.models import policy
from asyncspec.tasks.sums import exact_match, sum_terms, sums

PAD, EOS = "<pad>", "<eos>"
ALPHABET = "0123456789+-*/=,#.:;?()<> _abcdefghijklmnopqrstuvwxyz'\"!%&@|"
SHAPE = policy.PolicyShape(
    vocab_size=64,
    dim=64,
    n_layers=24,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    hidden_dim=192,
    max_positions=512,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied=True,
    eos_token_id=1,
    pad_token_id=0,
)
TOKENS_PER_DEMONSTRATION = 27  # mean; scales the loss


def make_character_tokenizer() -> Tokenizer:
    """Make a tokenizer with one token per character.

    It is byte-pair encoding without merges, so that any software based on the tokenizers library can load it.
    """
    vocab = {token: i for i, token in enumerate([PAD, EOS, *ALPHABET])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, EOS])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "pad_token": PAD}, indent=2) + "\n"
    )


def worked_response(terms: list[int], rng: np.random.Generator, slip: float) -> str:
    """Write the working of a sum. With probability `slip` a step's result is wrong, and the error is carried on."""
    parts, total = [], terms[0]
    for term in terms[1:]:
        result = total + term
        if rng.random() < slip:
            result = max(1, result + int(rng.choice([-10, -2, -1, 1, 2, 10])))
        parts.append(f"{total}+{term}={result},")
        total = result
    return "".join(parts) + f"#{total}"


def guessed_response(terms: list[int], rng: np.random.Generator) -> str:
    """Write an answer without working: near the right one, seldom equal to it."""
    total = sum(terms)
    return f"#{max(1, int(round(rng.normal(total, 0.15 * total))))}"


def demonstrations(tokenizer, rng, count, guess, slip):
    """Yield `count` token sequences, each a prompt and its response, with the length of the prompt."""
    for _ in range(count):
        terms = sum_terms(rng)
        prompt = "+".join(map(str, terms)) + "="
        guessed = rng.random() < guess
        response = guessed_response(terms, rng) if guessed else worked_response(terms, rng, slip)
        yield tokenizer.encode(prompt + response).ids + [SHAPE.eos_token_id], len(prompt)


def batches(tokenizer, rng, count, rows, guess, slip):
    """Yield at least `count` batches of sequences of similar length: (tokens_BL, mask_BL of response tokens)."""
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
        [{"params": decay, "weight_decay": 0.05}, {"params": other, "weight_decay": 0.0}], lr=args.lr, betas=(0.9, 0.98)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1.0, (s + 1) / 50) * 0.5 * (1 + np.cos(np.pi * min(1.0, s / args.steps)))
    )
    with Progress() as progress:
        bar = progress.add_task("policy", total=args.steps)
        for step, (tokens_BL, mask_BL) in enumerate(batches(tokenizer, rng, args.steps, 32, args.guess, args.slip)):
            hidden_BLD = policy.hidden_states(model, tokens_BL[:, :-1])
            logits_BLV = model.lm_head(hidden_BLD)
            # A batch holds sequences of similar length, so a mean over each batch would give short responses more
            # weight.
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


def accuracy(tokenizer, problems, done):
    return float(
        np.mean(
            [
                exact_match(
                    problems[i].prompt,
                    tokenizer.decode(c.tokens.tolist(), skip_special_tokens=True),
                    problems[i].answer,
                )
                for i, c in done
            ]
        )
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "asyncspec/assets/tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1400, help="warm-up steps of 32 demonstrations")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--guess", type=float, default=0.4, help="share of demonstrations that guess the answer")
    parser.add_argument("--slip", type=float, default=0.15, help="share of working steps with a slip")
    parser.add_argument("--draft-steps", type=int, default=8000, help="steps of 32 rollouts, for each draft")
    parser.add_argument("--unroll", type=int, default=7, help="passes that eagle3 and mtp are unrolled for in training")
    parser.add_argument("--draft-lr", type=float, default=2e-3)
    parser.add_argument("--go-on", action="store_true", help="continue to train the drafts in --out")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--only", choices=["policy", *drafts.METHODS], help="make only this one; a draft uses the policy in --out"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    started = time.monotonic()
    tokenizer = make_character_tokenizer()
    if args.only in (None, "policy"):
        model = warm_up(args, tokenizer)
        policy.save(model, SHAPE, args.out / "policy")
        save_tokenizer(tokenizer, args.out / "policy")
    model, _ = policy.load(args.out / "policy")
    model.requires_grad_(False)
    settings = Training(
        minutes=0, steps=args.draft_steps, batch=32, unroll=args.unroll, lr=args.draft_lr, seed=args.seed
    )

    def encoded(problems):
        return [tokenizer.encode(p.prompt).ids for p in problems]

    problems = sums(7, 512)
    done = Sampler(model, SHAPE, settings)(encoded(problems), 1, samples=2)
    lengths = [len(c.tokens) for _, c in done]
    print(
        f"policy: held-out accuracy {accuracy(tokenizer, problems, done):.3f} at temperature 1; response tokens mean "
        f"{np.mean(lengths):.1f}, median {np.median(lengths):.0f}, 99% {np.quantile(lengths, 0.99):.0f}, max "
        f"{max(lengths)}; "
        f"{time.monotonic() - started:.0f} s"
    )
    for method in drafts.METHODS if args.only in (None, *drafts.METHODS) else ():
        if args.only not in (None, method):
            continue
        torch.manual_seed(args.seed + 1)
        draft = drafts.load(method, args.out / method, SHAPE, model) if args.go_on else drafts.new(method, SHAPE, model)
        problems = sums(8, 256)
        with Progress() as progress:
            bar = progress.add_task(method, total=args.draft_steps)

            def shown(trainer, _, loss, rates):
                progress.update(bar, advance=1, description=f"{method}, acceptance {rates[0]:.3f}")
                if trainer.steps % 250 == 0:
                    progress.console.print(
                        f"{method} step {trainer.steps}: loss {loss:.3f}, acceptance by position "
                        + " ".join(f"{r:.3f}" for r in rates),
                        soft_wrap=True,
                    )

            train_draft(draft, model, sampled(model, SHAPE, encoded(sums(1000, 1 << 16)), settings), settings, shown)
        draft.save(args.out / method, args.out / "policy")
        done = Sampler(model, SHAPE, settings, drafting(draft), 3)(encoded(problems), 5)
        print(
            f"{method}: acceptance length {acceptance_length(done):.3f} at k=3 on held-out prompts; "
            f"accuracy with speculation {accuracy(tokenizer, problems, done):.3f}; {time.monotonic() - started:.0f} "
            f"s in total"
        )


if __name__ == "__main__":
    main()
