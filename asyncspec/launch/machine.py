"""Checks what this machine must offer, before any process starts: addresses, processes and threads, memory."""

from __future__ import annotations

import os
import signal
import socket
import threading

from asyncspec import config as configuration
from asyncspec.actors.crew import actor_names
from asyncspec.config import topology
from asyncspec.errors import ConfigError, UserError
from asyncspec.launch import estimate
from asyncspec.models.shape import PolicyShape
from asyncspec.wire.addresses import listening, parse_ports

THREADS = 14  # threads of an actor, and the process that starts it; measured
_CONNECTED_S = 5.0  # for this host to reach itself


def check_host(config: configuration.Config) -> str:
    """Return the address that this host's actors listen on. "auto" is loopback.

    Raises:
        ConfigError: this host cannot listen on that address, or cannot reach it.
    """
    host = "127.0.0.1" if config.deployment.host == "auto" else config.deployment.host
    try:
        server = listening(host)
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
    ports, needed = parse_ports(config.deployment.ports), len(names) + 2
    if config.deployment.ports and len(ports) < needed:
        raise ConfigError(
            f"deployment.ports={config.deployment.ports!r}: {len(ports)} ports; expected one for each of {len(names)} "
            f"actors, and two more; nearest valid choice: deployment.ports={ports[0]}-{ports[0] + needed - 1}"
        )
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


def check_memory(config: configuration.Config, total: float | None = None) -> None:
    """Check that this host's memory holds at least the weights and the KV caches of all actors, which compute on it.

    Args:
        total: bytes of memory; None: what this host has.

    Raises:
        ConfigError: it does not.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if total is None else total
    path = configuration.resolve_path(config.model.path)
    policy = PolicyShape.from_hf(path, config.model.backend).to_hf()
    parts = estimate.at_least(config, policy, list(actor_names(config).values()))
    if (needed := sum(parts.values())) > total:
        cache = parts.get("KV cache", 0.0)
        name, value = ("engine.slots", config.engine.slots) if cache > needed / 2 else ("model.path", config.model.path)
        raise ConfigError(
            f"{name}={value!r}: the actors need at least {1e-9 * needed:.1f} GB of memory, "
            + ", ".join(
                f"{1e-9 * size:.1f} for {what}" for what, size in sorted(parts.items(), key=lambda p: -p[1])[:3]
            )
            + f"; this host has {1e-9 * total:.1f} GB; nearest valid choice: "
            + (
                f"engine.slots={max(1, int(config.engine.slots * (total - needed + cache) / cache))}"
                if name == "engine.slots" and total > needed - cache
                else "a smaller policy, or several hosts with deployment.nodes"
            )
        )
