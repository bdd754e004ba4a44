"""`asyncspec data show`: what the policy and the reward get of a run's data, as text and as tokens."""

from __future__ import annotations

from collections.abc import Callable

from asyncspec.config import Config, ConfigError, resolve_path
from asyncspec.models import tokenizer as tokenizers
from asyncspec.tasks.data import load_problems


def show(config: Config, count: int, tell: Callable[[str], None] = print) -> int:
    """Print the first training problems of a run, in its order. Return the exit code.

    Raises:
        ConfigError: the data cannot be read, or a prompt cannot be rendered.
    """
    try:
        problems, held_out = load_problems(config)
        tokenizer = tokenizers.load(resolve_path(config.model.path))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    source = config.data.train_file or f"the built-in task {config.data.task}"
    tell(f"{source}: {len(problems)} prompts in {config.steps} steps, {len(held_out)} held out")
    for number, problem in enumerate(problems[:count], 1):
        tokens = tokenizers.encode_prompt(tokenizer, problem.prompt)
        tell(f"\nprompt {number}, {len(tokens)} of at most {config.engine.max_prompt_tokens} tokens")
        tell(problem.prompt)
        tell(
            "tokens: "
            + " ".join(f"{token}:{tokenizer.decode([token], skip_special_tokens=False)!r}" for token in tokens)
        )
        tell(f"answer: {problem.answer!r}")
        if problem.row:
            tell(f"the reward also gets: {problem.row}")
    return 0
