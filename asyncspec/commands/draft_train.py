"""`asyncspec draft train`: trains a draft for a policy, from prompts or from rollouts.

From prompts, the policy keeps sampling fresh rollouts, and the draft learns the policy's distributions on them. The
result is measured by actual drafting on held-out prompts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from itertools import chain, repeat

import numpy as np
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from asyncspec.commands.draft_data import read
from asyncspec.commands.draft_measure import Measurer
from asyncspec.commands.draft_samples import ROUND, Rollout, batches, drafting, sampled
from asyncspec.commands.draft_settings import Training
from asyncspec.config import DraftConfig, resolve_path
from asyncspec.console import terminal
from asyncspec.drafts import draft as drafts
from asyncspec.drafts.draft import Draft
from asyncspec.drafts.supervision import supervise
from asyncspec.drafts.training import DraftTrainer
from asyncspec.errors import UserError
from asyncspec.loading import use_threads
from asyncspec.models import CheckpointError, policy
from asyncspec.models import tokenizer as tokenizers
from asyncspec.timing.boards import Boards, TensorBoard

SEEN = 4  # training steps on each batch for one forward pass of the policy over it
TRAINING_SHARE = 0.75  # of --minutes; the rest is for measuring
MEASURING_S = 10.0  # if training ended before its time: after --steps, or an interrupt
LINE_EVERY_S = 15.0


def train_draft(
    draft: Draft, model, rounds: Iterator[Sequence[Rollout]], settings: Training, shown, until: float = math.inf
) -> DraftTrainer:
    """Train until the time has come or the steps are done, whichever is first. An interrupt ends training early.

    Args:
        rounds: rollouts to learn from.
        shown: callable(trainer, progress from 0 to 1, loss, expected acceptance rate at each position), called after
            each step.
        until: time.monotonic() at which training ends.
    """
    lr = settings.lr or 2e-3 * (64 / policy_width(model)) ** 0.5
    trainer = DraftTrainer(draft.module, draft.loss(settings.unroll, settings.temperature), lr)
    rng, began = np.random.default_rng([settings.seed, 2]), time.monotonic()

    def progress() -> float:
        done, now = trainer.steps / settings.steps if settings.steps else 0.0, time.monotonic()
        return 1.0 if now >= until else max(done, (now - began) / (until - began))

    try:
        for rollouts in rounds:
            if progress() >= 1:
                break
            for part in range(0, len(rollouts), ROUND):
                made = [
                    supervise(model, draft.aux_layers, *batch, settings.temperature, DraftConfig.top_tokens)
                    for batch in batches(rollouts[part : part + ROUND], settings.batch, rng)
                    if progress() < 1
                ]
                for index in (i for _ in range(SEEN) for i in rng.permutation(len(made))):
                    if (done := progress()) >= 1:
                        return trainer
                    trainer.anneal(done)
                    shown(trainer, done, *trainer.step(made[index]))
    except KeyboardInterrupt:
        pass
    return trainer


def policy_width(model) -> int:
    return model.tok_embeddings.weight.shape[1]


def run(settings: Training, began: float) -> int:
    """Train a draft, write it, and print how well it drafts. Returns the exit code.

    Args:
        began: time.monotonic() from which the minutes count.
    """
    seconds = 60 * settings.minutes or math.inf
    end, until = began + seconds, began + TRAINING_SHARE * seconds
    use_threads(settings.threads)
    torch.manual_seed(settings.seed)
    console = terminal()
    path, out = resolve_path(settings.policy), resolve_path(settings.out)
    try:
        (out / "tensorboard").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"draft train: --out {out}: {error.strerror}; expected a directory to write to") from None
    try:
        longest = settings.max_prompt_tokens + settings.max_response_tokens + settings.draft_length + 1
        model, shape = policy.load(path, positions=longest)
        model.requires_grad_(False)
        if (spent := time.monotonic() - began) > until - began:
            raise ValueError(f"--minutes {settings.minutes}: loading alone took {spent:.0f} s; expected more")
        prompts, held_out, rollouts = read(settings, tokenizers.load(path), shape, console)
        rounds = repeat(rollouts) if rollouts else sampled(model, shape, prompts, settings, until)
        if settings.init:
            draft = drafts.load(settings.method, resolve_path(settings.init), shape, model)
        else:
            if not rollouts:
                console.print(f"read {len(prompts)} prompts; sampling the first rollouts", soft_wrap=True)
            first = next(rounds)
            rounds = chain([first], rounds)
            draft = drafts.new(settings.method, shape, model, _draft_vocabulary(settings, shape, prompts, first))
    except (CheckpointError, ValueError) as error:
        raise UserError(f"draft train: {error}") from None
    parameters = sum(p.numel() for p in draft.module.parameters())
    console.print(
        f"{settings.method}: {parameters:,} parameters for a policy of {sum(p.numel() for p in model.parameters()):,}; "
        f"{len(held_out)} prompts held out",
        soft_wrap=True,
    )
    measurer, k = Measurer(model, shape, settings, held_out), settings.draft_length
    if settings.init:
        before, _ = measurer.acceptance_length(measurer.sampler(drafting(draft)), min(0.1 * seconds, MEASURING_S))
        console.print(f"acceptance length before: {before:.3f} at k={k}")
    lines = [time.monotonic()]
    tensorboard = out / "tensorboard"
    board = Boards({str(tensorboard): lambda: TensorBoard(tensorboard)}, console.print)
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

        trainer = train_draft(draft, model, rounds, settings, shown, until)
        bars.update(bar, completed=1.0)
    if not trainer.steps:
        board.close()
        raise UserError(f"draft train: --minutes {settings.minutes:g}: no step was done in them; expected more")
    draft.save(out, path)
    console.print(f"{trainer.steps} steps; measuring on held-out prompts", soft_wrap=True)
    try:
        now = time.monotonic()
        worth = measurer.worth(draft, end if now >= until else now + MEASURING_S)
        board.scalars({"draft/acceptance_length": worth.acceptance_length}, trainer.steps)
        console.print(
            f"acceptance length {worth.acceptance_length:.3f} at k={k} on {worth.prompts} held-out prompts, "
            f"temperature {settings.temperature:g}; n-gram lookup, which needs no draft, has "
            f"{worth.ngram_acceptance_length:.3f}",
            soft_wrap=True,
        )
        ratios = ", ".join(f"{ratio:.2f} with {live}" for live, ratio in worth.speedups.items())
        console.print(f"speed over no draft, by sequences at once: {ratios}; {worth.verdict()}", soft_wrap=True)
    finally:
        board.close()
        console.print(
            f"written: {out}; use it with speculation.method={settings.method} speculation.draft_path={out}",
            soft_wrap=True,
        )
    return 0


def _draft_vocabulary(
    settings: Training, shape: policy.PolicyShape, prompts: Sequence[Sequence[int]], rollouts: Sequence[Rollout]
) -> torch.Tensor | None:
    """Return the most frequent tokens of responses and prompts, in ascending order; None for the whole vocabulary.

    Tokens that do not occur rank by their number: tokenizers give low numbers to frequent tokens.
    """
    if settings.method != "eagle3" or not 0 < settings.draft_vocab < shape.vocab_size:
        return None
    counts = np.zeros(shape.vocab_size, dtype=np.int64)
    for tokens in (*(rollout.response for rollout in rollouts), *prompts):
        counts += np.bincount(tokens, minlength=shape.vocab_size)
    counts[list(shape.eos_token_ids)] += len(prompts)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[: settings.draft_vocab]))
