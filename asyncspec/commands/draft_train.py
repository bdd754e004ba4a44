"""`asyncspec draft train`: trains a draft for a policy, from prompts or from rollouts.

From prompts, the policy keeps sampling fresh rollouts, and the draft learns the policy's distributions on them. The
result is measured by actual drafting on held-out prompts.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from asyncspec.commands.draft_settings import Training
from asyncspec.config import DataConfig, resolve_path
from asyncspec.console import terminal
from asyncspec.drafters.make import drafter_for
from asyncspec.drafts import draft as drafts
from asyncspec.drafts.draft import Draft
from asyncspec.drafts.supervision import supervise
from asyncspec.drafts.training import DraftTrainer
from asyncspec.engine.protocol import Completion, Request
from asyncspec.engine.torch_engine import TorchEngine
from asyncspec.errors import UserError
from asyncspec.loading import use_threads
from asyncspec.models import CheckpointError, policy
from asyncspec.models import tokenizer as tokenizers
from asyncspec.speculation.verify import Sampling
from asyncspec.tasks.data import load_rows, rendered
from asyncspec.tasks.problem import Problem
from asyncspec.tasks.prompts import encoded_prompts, encoded_responses
from asyncspec.tasks.sums import sums
from asyncspec.timing.exporters import Board

ROUND = 256  # rollouts sampled before each stretch of training
SEEN = 4  # training steps on each batch for one forward pass of the policy over it
POOL = 4  # batches whose rollouts are sorted by length together, so that rows of a batch have similar lengths
LINE_EVERY_S = 15.0


@dataclass(frozen=True)
class Rollout:
    prompt: tuple[int, ...]
    response: tuple[int, ...]


class Sampler:
    """A policy that answers prompts, with a draft or without."""

    def __init__(
        self, model, shape: policy.PolicyShape, settings: Training, draft: Draft | None = None, draft_length: int = 0
    ) -> None:
        # The engine keeps the draft that it is given. It gets a copy, because this one may be in training.
        maker = (
            None if draft is None else drafter_for(drafts.Draft(draft.method, copy.deepcopy(draft.module), draft.shape))
        )
        self.limit = settings.max_response_tokens
        self.engine = TorchEngine(
            shape,
            maker,
            slots=64,
            max_prompt_tokens=settings.max_prompt_tokens,
            max_response_tokens=self.limit,
            draft_length=draft_length,
            sampling=Sampling(settings.temperature),
        )
        self.engine.load_policy(dict(model.named_parameters()), 0)

    def __call__(self, prompts: Sequence[Sequence[int]], seed: int, samples: int = 1) -> list[tuple[int, Completion]]:
        """Return (index of the prompt, completion) of all samples, in the order in which they finish."""
        for i, prompt in enumerate(prompts):
            self.engine.submit(Request(i, prompt, [seed + i * samples + j for j in range(samples)], self.limit))
        done = []
        while self.engine.live or self.engine.waiting:
            done += [(c.request_id, c) for c in self.engine.poll()]
        return done


def acceptance_length(done: Sequence[tuple[int, Completion]]) -> float:
    """Tokens emitted per verification, the target's own included; the same as a run's `spec/acceptance_length`."""
    return sum(len(c.tokens) - 1 for _, c in done) / max(1, sum(c.verifications for _, c in done))


def batches(
    rollouts: Sequence[Rollout], size: int, rng: np.random.Generator
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (tokens_BL, mask_BL of response tokens), each rollout once. Rows of a batch have similar lengths."""
    order = rng.permutation(len(rollouts))
    for start in range(0, len(order), size * POOL):
        pool = sorted(
            (rollouts[i] for i in order[start : start + size * POOL]), key=lambda r: len(r.prompt) + len(r.response)
        )
        parts = [pool[i : i + size] for i in range(0, len(pool), size)]
        for i in rng.permutation(len(parts)):
            longest = max(len(r.prompt) + len(r.response) for r in parts[i])
            tokens_BL = torch.tensor(
                [[*r.prompt, *r.response, *[0] * (longest - len(r.prompt) - len(r.response))] for r in parts[i]]
            )
            yield (
                tokens_BL,
                torch.tensor(
                    [[len(r.prompt) <= p < len(r.prompt) + len(r.response) for p in range(longest)] for r in parts[i]]
                ),
            )


def sampled(model, shape, prompts: Sequence[Sequence[int]], settings: Training) -> Iterator[list[Rollout]]:
    """Yield fresh rollouts without end, in rounds. Each round draws up to ROUND of the prompts at random."""
    sampler, rng = Sampler(model, shape, settings), np.random.default_rng([settings.seed, 1])
    while True:
        chosen = [prompts[i] for i in rng.choice(len(prompts), min(ROUND, len(prompts)), replace=False)]
        done = sampler(chosen, int(rng.integers(1 << 40)))
        yield [Rollout(tuple(chosen[i]), tuple(c.tokens.tolist())) for i, c in done]


def train_draft(draft: Draft, model, rounds: Iterator[list[Rollout]], settings: Training, shown) -> DraftTrainer:
    """Train until the minutes have passed or the steps are done, whichever is set and comes first. An interrupt ends
    training early.

    Args:
        rounds: rollouts to learn from.
        shown: callable(trainer, progress from 0 to 1, loss, expected acceptance rate at each position), called after
            each step.
    """
    lr = settings.lr or 2e-3 * (64 / policy_width(model)) ** 0.5
    trainer = DraftTrainer(draft.module, draft.loss(settings.unroll, settings.temperature), lr)
    rng, began = np.random.default_rng([settings.seed, 2]), time.monotonic()
    try:
        for rollouts in rounds:
            for part in range(0, len(rollouts), ROUND):
                made = [
                    supervise(model, draft.aux_layers, *batch, settings.temperature)
                    for batch in batches(rollouts[part : part + ROUND], settings.batch, rng)
                ]
                for index in (i for _ in range(SEEN) for i in rng.permutation(len(made))):
                    progress = max(
                        trainer.steps / settings.steps if settings.steps else 0.0,
                        (time.monotonic() - began) / (60 * settings.minutes) if settings.minutes else 0.0,
                    )
                    if progress >= 1:
                        return trainer
                    trainer.anneal(progress)
                    shown(trainer, progress, *trainer.step(made[index]))
    except KeyboardInterrupt:
        pass
    return trainer


def policy_width(model) -> int:
    return model.tok_embeddings.weight.shape[1]


def run(settings: Training) -> int:
    """Train a draft, write it, and print how well it drafts. Returns the exit code."""
    use_threads(settings.threads)
    torch.manual_seed(settings.seed)
    console = terminal()
    path = resolve_path(settings.policy)
    try:
        longest = settings.max_prompt_tokens + settings.max_response_tokens + settings.draft_length + 1
        model, shape = policy.load(path, positions=longest)
        model.requires_grad_(False)
        tokenizer = tokenizers.load(path)
        prompts, held_out, rollouts = _data(settings, tokenizer, shape, console)
        tokens = _draft_vocabulary(settings, model, shape, prompts, rollouts)
        draft = (
            drafts.load(settings.method, resolve_path(settings.init), shape, model)
            if settings.init
            else drafts.new(settings.method, shape, model, tokens)
        )
    except (CheckpointError, ValueError) as error:
        raise UserError(f"draft train: {error}") from None
    parameters = sum(p.numel() for p in draft.module.parameters())
    console.print(
        f"{settings.method}: {parameters:,} parameters for a policy of {sum(p.numel() for p in model.parameters()):,}; "
        f"{len(held_out)} prompts held out",
        soft_wrap=True,
    )

    def measured() -> float:
        return acceptance_length(
            Sampler(model, shape, settings, draft, settings.draft_length)(held_out, 10**6 * (settings.seed + 1))
        )

    if settings.init:
        console.print(f"acceptance length before: {measured():.3f} at k={settings.draft_length}")
    out, lines = resolve_path(settings.out), [time.monotonic()]
    try:
        (out / "tensorboard").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"draft train: --out {out}: {error.strerror}; expected a directory to write to") from None
    board = Board(out / "tensorboard", console.print)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars:
        bar = bars.add_task(settings.method, total=1.0)

        def shown(trainer: DraftTrainer, progress: float, loss: float, rates: list[float]) -> None:
            by_position = " ".join(f"{rate:.2f}" for rate in rates)
            bars.update(
                bar,
                completed=progress,
                description=f"step {trainer.steps}, loss {loss:.3f}, acceptance by position {by_position}",
            )
            expected = {f"draft/expected_acceptance_{position}": rate for position, rate in enumerate(rates, 1)}
            board.scalars({"draft/loss": loss, **expected}, trainer.steps)
            if not console.is_terminal and time.monotonic() - lines[-1] > LINE_EVERY_S:
                lines.append(time.monotonic())
                console.print(
                    f"step {trainer.steps} ({progress:.0%}): loss {loss:.3f}, acceptance by position {by_position}",
                    soft_wrap=True,
                )

        rounds = repeat(rollouts) if rollouts else sampled(model, shape, prompts, settings)
        trainer = train_draft(draft, model, rounds, settings, shown)
        bars.update(bar, completed=1.0)
    draft.save(out, path)
    length = measured()
    board.scalars({"draft/acceptance_length": length}, trainer.steps)
    board.close()
    console.print(
        f"{trainer.steps} steps; acceptance length {length:.3f} at k={settings.draft_length} on held-out prompts, "
        f"temperature {settings.temperature:g}",
        soft_wrap=True,
    )
    console.print(
        f"written: {out}; use it with speculation.method={settings.method} speculation.draft_path={out}", soft_wrap=True
    )
    return 0


def _data(
    settings: Training, tokenizer, shape: policy.PolicyShape, console: Console
) -> tuple[list, list, list[Rollout]]:
    """Return the prompts to learn on, the held-out prompts, and the given rollouts. Say what is left out.

    Raises:
        ValueError: a line of a file is malformed, a prompt cannot be used, or too little is left.
    """
    given: list[Problem] = []  # with a response in the place of the answer
    model = resolve_path(settings.policy)
    rng = np.random.default_rng([settings.seed, 3])
    if settings.rollouts:
        rows = load_rows(f"--rollouts {settings.rollouts}", settings.rollouts, DataConfig(answer_column="response"))
        given = rendered(rows, model, {})
        texts = [line.prompt for line in given]
    elif settings.prompts:
        rows = load_rows(f"--prompts {settings.prompts}", settings.prompts, DataConfig(answer_column=""))
        texts = [problem.prompt for problem in rendered(rows, model, {})]
    else:
        texts = [problem.prompt for problem in sums(settings.seed + 1000, 16384)]
    texts = list(dict.fromkeys(texts))
    tokens = {
        prompt.text: tuple(prompt.tokens) for prompt in encoded_prompts(tokenizer, texts, shape.vocab_size, console)
    }
    responses = encoded_responses(tokenizer, [line.answer for line in given], shape.vocab_size, console)
    rollouts = [Rollout(tokens[line.prompt], _ended(response, shape)) for line, response in zip(given, responses)]
    prompts = list(dict.fromkeys(tokens.values()))
    fitting = [p for p in prompts if len(p) <= settings.max_prompt_tokens]
    if len(fitting) < 2:
        raise ValueError(
            f"--max-prompt-tokens {settings.max_prompt_tokens}: {len(fitting)} of {len(prompts)} prompts are short "
            f"enough; expected at least 2"
        )
    if len(fitting) < len(prompts):
        console.print(
            f"{len(prompts) - len(fitting)} of {len(prompts)} prompts are left out: they have more than "
            f"--max-prompt-tokens {settings.max_prompt_tokens} tokens",
            soft_wrap=True,
        )
    held = set(rng.permutation(len(fitting))[: min(settings.held_out, max(1, len(fitting) // 10))].tolist())
    held_out = [p for i, p in enumerate(fitting) if i in held]
    prompts = [p for i, p in enumerate(fitting) if i not in held]
    kept = set(prompts)
    longest = settings.max_prompt_tokens + settings.max_response_tokens
    learned = [r for r in rollouts if r.prompt in kept]
    usable = [r for r in learned if len(r.prompt) + len(r.response) <= longest]
    if rollouts and not usable:
        raise ValueError(
            f"--max-response-tokens {settings.max_response_tokens}: none of {len(rollouts)} rollouts fits into "
            f"{longest} tokens, prompt included; the longest has "
            f"{max(len(r.prompt) + len(r.response) for r in rollouts)}"
        )
    if len(usable) < len(learned):
        console.print(
            f"{len(learned) - len(usable)} of {len(learned)} rollouts are left out: they have more than {longest} "
            "tokens, --max-prompt-tokens and --max-response-tokens together",
            soft_wrap=True,
        )
    return prompts, held_out, usable


def _ended(response: Sequence[int], shape: policy.PolicyShape) -> tuple[int, ...]:
    """Return a response that ends with an end-of-sequence token, as the policy's own responses do."""
    ends = response and response[-1] in shape.eos_token_ids
    return tuple(response) if ends else (*response, shape.eos_token_id)


def _draft_vocabulary(settings: Training, model, shape, prompts, rollouts: list[Rollout]) -> torch.Tensor | None:
    """Return the most frequent tokens of responses, in ascending order; None for the whole vocabulary."""
    if not 0 < settings.draft_vocab < shape.vocab_size:
        return None
    counts = np.zeros(shape.vocab_size, dtype=np.int64)
    for rollout in rollouts or next(sampled(model, shape, prompts, settings)):
        counts += np.bincount(rollout.response, minlength=shape.vocab_size)
    counts[shape.eos_token_id] += 1
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[: settings.draft_vocab]))
