"""Make a policy that has seen a calculator used, and problems for it. It takes two to four minutes.

    python examples/calculator/prepare.py
    asyncspec train --config examples/calculator/config.yaml

The shipped policy is trained on demonstrations: half of them call the calculator, whatever the problem is, and half
answer at once. It knows small sums; of a product it can only guess the size. When a call pays, it has to find out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import track

from asyncspec.config import resolve_path
from asyncspec.models import policy
from asyncspec.models import tokenizer as tokenizers

SHIPPED = "asset:tiny/policy"
EOS, ROWS = 1, 64


def problem(rng: np.random.Generator) -> tuple[str, int]:
    """Return a sum of two digits or a product of two numbers of two digits, as a prompt and its answer."""
    if rng.random() < 0.5:
        left, right = rng.integers(1, 10, 2).tolist()
        return f"{left}+{right}=", left + right
    left, right = rng.integers(11, 100, 2).tolist()
    return f"{left}*{right}=", left * right


def demonstration(encode, rng: np.random.Generator) -> tuple[list[int], list[bool]]:
    """Return the tokens of a demonstration, and which of them the policy says."""
    prompt, answer = problem(rng)
    if rng.random() < 0.5:
        parts = [(prompt, False), (f"({prompt[:-1]})", True), (f"{answer};", False), (f"#{answer}", True)]
    else:
        guess = answer if "+" in prompt else max(1, round(answer * float(rng.normal(1, 0.1))))
        parts = [(prompt, False), (f"#{guess}", True)]
    tokens, said = [], []
    for text, own in parts:
        ids = [*encode(text), EOS] if own else encode(text)
        tokens += ids
        said += [own] * len(ids)
    return tokens, said


def warm_up(model, encode, rng: np.random.Generator, steps: int, lr: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 30) * 0.5 * (1 + np.cos(np.pi * step / steps))
    )
    for step in track(range(steps), description="demonstrations"):
        shown = [demonstration(encode, rng) for _ in range(ROWS)]
        longest = max(len(tokens) for tokens, _ in shown)
        tokens_BL = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens, _ in shown])
        said_BL = torch.tensor([said + [False] * (longest - len(said)) for _, said in shown])
        logits_BLV = model.lm_head(policy.hidden_states(model, tokens_BL[:, :-1]))
        loss = F.cross_entropy(logits_BLV[said_BL[:, 1:]], tokens_BL[:, 1:][said_BL[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(f"step {step + 1} of {steps}: loss {loss.item():.3f}", flush=True)


def write_problems(file: Path, count: int, rng: np.random.Generator, without: set[str], only: str = "") -> set[str]:
    """Write problems as JSONL, each once and none of those in `without`; return their prompts.

    Args:
        only: "+" or "*"; "": both.
    """
    found: dict[str, int] = {}
    while len(found) < count:
        prompt, answer = problem(rng)
        if only in prompt and prompt not in without:
            found[prompt] = answer
    file.write_text("".join(json.dumps({"prompt": p, "answer": str(a)}) + "\n" for p, a in found.items()))
    return {*found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("calculator"), help="directory for policy and problems (default: calculator)"
    )
    parser.add_argument("--steps", type=int, default=800, help="batches of demonstrations (default: 800)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: 0.001)")
    parser.add_argument("--seed", type=int, default=0, help="seed of demonstrations and problems (default: 0)")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # the matrices are small, and on busy cores two threads wait for each other
    shipped, rng = resolve_path(SHIPPED), np.random.default_rng(args.seed)
    tokenizer = tokenizers.load(shipped)
    model, shape = policy.load(shipped)
    model.requires_grad_(True)
    warm_up(model, lambda text: tokenizer.encode(text).ids, rng, args.steps, args.lr)
    args.out.mkdir(parents=True, exist_ok=True)
    policy.save(model, shape, args.out / "policy", shipped)
    held_out = write_problems(args.out / "sums.jsonl", 30, rng, set(), "+")
    held_out |= write_problems(args.out / "products.jsonl", 100, rng, set(), "*")
    training = rng.spawn(1)[0]
    rows: list[str] = []
    while len(rows) < 4096:  # there are only 81 sums, so training has them many times
        prompt, answer = problem(training)
        if prompt not in held_out:
            rows.append(json.dumps({"prompt": prompt, "answer": str(answer)}) + "\n")
    (args.out / "train.jsonl").write_text("".join(rows))
    print(f"wrote {args.out}/policy and the problems; now: asyncspec train --config examples/calculator/config.yaml")


if __name__ == "__main__":
    main()
