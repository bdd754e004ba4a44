"""Samples of a policy, for `asyncspec draft train`: an engine that answers prompts, and batches of its answers."""

from __future__ import annotations

import copy
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from asyncspec.commands.draft_settings import Training
from asyncspec.drafters.make import DrafterMaker, drafter_for
from asyncspec.drafts.draft import Draft
from asyncspec.engine.protocol import Completion, Request
from asyncspec.engine.torch_engine import TorchEngine
from asyncspec.models.shape import PolicyShape
from asyncspec.speculation.verify import Sampling

ROUND, ROUND_S = 256, 10.0  # at most so many rollouts, or seconds, are sampled before each stretch of training
SLOTS = 64  # sequences sampled at once
POOL = 4  # batches whose rollouts are sorted by length together, so that rows of a batch have similar lengths


@dataclass(frozen=True)
class Rollout:
    prompt: tuple[int, ...]
    response: tuple[int, ...]


def drafting(draft: Draft) -> DrafterMaker:
    """Return a maker of drafters, from a copy of a draft: the draft itself may be in training."""
    return drafter_for(Draft(draft.method, copy.deepcopy(draft.module), draft.shape))


class Sampler:
    """A policy that answers prompts, with a draft or without."""

    def __init__(
        self,
        model,
        shape: PolicyShape,
        settings: Training,
        maker: DrafterMaker | None = None,
        draft_length: int = 0,
        slots: int = SLOTS,
    ) -> None:
        self.limit = settings.max_response_tokens
        self.engine = TorchEngine(
            shape,
            maker,
            slots=slots,
            max_prompt_tokens=settings.max_prompt_tokens,
            max_response_tokens=self.limit,
            draft_length=draft_length,
            sampling=Sampling(settings.temperature),
        )
        self.engine.load_policy(dict(model.named_parameters()), 0)

    def submit(self, index: int, prompt: Sequence[int], seed: int, samples: int = 1) -> None:
        self.engine.submit(Request(index, prompt, range(seed, seed + samples), self.limit))

    def __call__(
        self, prompts: Sequence[Sequence[int]], seed: int, samples: int = 1, until: float = math.inf
    ) -> list[tuple[int, Completion]]:
        """Return (index of the prompt, completion) of all samples, in the order in which they finish.

        Args:
            until: time.monotonic() after which it stops; the engine then still holds the rest.
        """
        for i, prompt in enumerate(prompts):
            self.submit(i, prompt, seed + i * samples, samples)
        done = []
        while (self.engine.live or self.engine.waiting) and time.monotonic() < until:
            done += [(c.request_id, c) for c in self.engine.poll()]
        return done

    def acceptance_length(self, done: Sequence[tuple[int, Completion]]) -> float:
        """Return `acceptance_length` of these completions and of the sequences that are still live."""
        rows = self.engine.rows
        return acceptance_length(done, rows.begun_tokens - rows.live, rows.begun_verifications)


def acceptance_length(done: Sequence[tuple[int, Completion]], tokens: int = 0, verifications: int = 0) -> float:
    """Return tokens emitted per verification, the target's own included: a run's `spec/acceptance_length`.

    Args:
        tokens, verifications: of sequences that are not done, without their first tokens.
    """
    tokens += sum(len(c.tokens) - 1 for _, c in done)
    return tokens / max(1, verifications + sum(c.verifications for _, c in done))


def sampled(
    model, shape: PolicyShape, prompts: Sequence[Sequence[int]], settings: Training, until: float = math.inf
) -> Iterator[list[Rollout]]:
    """Yield rounds of fresh rollouts of random prompts, without end. The engine samples on where it was.

    Args:
        until: time.monotonic() after which a round ends early, with what it has.
    """
    sampler, rng, order = Sampler(model, shape, settings), np.random.default_rng([settings.seed, 1]), deque()
    engine = sampler.engine
    while True:
        done: list[Completion] = []
        end = time.monotonic() + ROUND_S
        while len(done) < ROUND and (len(done) < settings.batch or time.monotonic() < end) and time.monotonic() < until:
            while engine.live + engine.waiting < engine.slots:
                order = order or deque(rng.permutation(len(prompts)).tolist())
                index = order.popleft()
                sampler.submit(index, prompts[index], int(rng.integers(1 << 40)))
            done += engine.poll()
        yield [Rollout(tuple(prompts[c.request_id]), tuple(c.tokens.tolist())) for c in done]


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
