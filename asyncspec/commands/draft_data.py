"""The data of `asyncspec draft train`: prompts to learn on, held-out prompts, and rollouts if they are given."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console

from asyncspec.commands.draft_samples import Rollout
from asyncspec.commands.draft_settings import Training
from asyncspec.config import DataConfig, resolve_path
from asyncspec.models.chat import parse_variables
from asyncspec.models.shape import PolicyShape
from asyncspec.tasks.data import load_rows, rendered
from asyncspec.tasks.problem import Problem
from asyncspec.tasks.prompts import encoded_prompts, encoded_responses
from asyncspec.tasks.sums import sums


def read(settings: Training, tokenizer, shape: PolicyShape, console: Console) -> tuple[list, list, list[Rollout]]:
    """Return the prompts to learn on, the held-out prompts, and the given rollouts. Print what is left out.

    Raises:
        ValueError: a line of a file is malformed, a prompt cannot be used, or too little is left.
    """
    given: list[Problem] = []  # with a response in the place of the answer
    model, variables = resolve_path(settings.policy), parse_variables(settings.template_variables)
    rng = np.random.default_rng([settings.seed, 3])
    if settings.rollouts:
        data = DataConfig(prompt_column=settings.prompt_column, answer_column="response")
        rows = load_rows(f"--rollouts {settings.rollouts}", settings.rollouts, data)
        given = rendered(rows, model, variables)
        texts = [line.prompt for line in given]
    elif settings.prompts:
        data = DataConfig(prompt_column=settings.prompt_column, answer_column="")
        rows = load_rows(f"--prompts {settings.prompts}", settings.prompts, data)
        texts = [problem.prompt for problem in rendered(rows, model, variables)]
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


def _ended(response: Sequence[int], shape: PolicyShape) -> tuple[int, ...]:
    """Return a response that ends with an end-of-sequence token, as the policy's own responses do."""
    ends = response and response[-1] in shape.eos_token_ids
    return tuple(response) if ends else (*response, shape.eos_token_id)
