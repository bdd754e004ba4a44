"""Lets a node start by itself and join a run by the controller's address, so that one node can be restarted alone.

    node 0:           asyncspec train --node 0 --config ... deployment.host=ADDRESS     (the controller's node)
    node 3, any time: asyncspec train --join RUN --node 3

RUN/rendezvous.json, on the file system that the nodes share, says where the controller is and, in the end, that the run
has ended.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from asyncspec import config as configuration
from asyncspec.config import Config, topology, work
from asyncspec.console import never_fail
from asyncspec.errors import ConfigError, UserError
from asyncspec.files import replace_file
from asyncspec.launch import processes, roles
from asyncspec.launch.forkserver import ForkServer
from asyncspec.launch.interrupt import InterruptFlag
from asyncspec.launch.machine import check_machine
from asyncspec.launch.watch import Supervisor
from asyncspec.parent import die_with
from asyncspec.wire import messages as m
from asyncspec.wire import transport, waiting
from asyncspec.wire.addresses import host_and_port, own_address
from asyncspec.wire.control import ControlClient

FILE, POLL_S = "rendezvous.json", 0.1


@dataclass(frozen=True)
class Rendezvous:
    """What a run's first node tells the others."""

    address: str  # the controller's
    version: int  # the version to resume from; -1: a new run
    attempt: int  # which start of all actors this is: its time, in nanoseconds of the wall clock
    ended: int | None = None  # the exit code, once the run has ended
    launch: int = 0  # identifies the launcher

    def write(self, run_dir: str) -> None:
        replace_file(Path(run_dir) / FILE, json.dumps(asdict(self)))

    @classmethod
    def read(cls, run_dir: str) -> Rendezvous | None:
        try:
            return cls(**json.loads((Path(run_dir) / FILE).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ESTALE:  # NFS: it was replaced meanwhile
                return None
            raise


def check_first(config: Config, node: int) -> None:
    """Check that this node can start a run that others join.

    Raises:
        UserError: it is not the first of several nodes, or the other nodes could not reach it.
    """
    check_node(config, node)
    if node:
        raise UserError(f"--node {node}: expected --join RUN with it, the directory of a run that --node 0 has started")
    if config.deployment.host == "auto":
        raise ConfigError(
            "deployment.host='auto': expected the address at which the other nodes reach this one, for --node 0; "
            "nearest valid choice: deployment.host=127.0.0.1, if all nodes are on this host"
        )


def check_node(config: Config, node: int) -> None:
    """Check that deployment.nodes has this node.

    Raises:
        UserError: it has no such node.
    """
    nodes = len(topology.parse(config.deployment.nodes)) if config.deployment.nodes else 0
    if not 0 <= node < nodes:
        raise UserError(
            f"--node {node}: deployment.nodes={config.deployment.nodes!r} names {nodes} nodes; expected 0 to "
            f"{nodes - 1}"
            if nodes
            else f"--node {node}: expected deployment.nodes to say what each node plays, for example "
            f"deployment.nodes=trainer+logprob,generator"
        )


def join(run_dir: str, node: int, launch: int | None = None) -> int:
    """Play a node's part in a run until the run ends. Returns the run's exit code, or this node's if that is unknown.

    Args:
        launch: the only launcher to play for; None: any launcher that continues the run.

    Raises:
        UserError: there is no such run or node, the node's actors cannot be started alone, or not on this machine.
    """
    path = configuration.resolve_path(run_dir).absolute()
    if not os.path.isfile(path / "config.yaml"):
        raise UserError(
            f"--join {run_dir}: no config.yaml in it; expected the directory of a run that `asyncspec train --node "
            f"0` has started"
        )
    config = configuration.load(str(path / "config.yaml"), [f"run_dir={path}", "deployment.host=auto"])
    if node == 0:
        raise UserError(
            "--node 0: plays the controller and joins no run; expected asyncspec train --node 0 without --join, or "
            "with --resume to continue a run"
        )
    check_node(config, node)
    check_machine(config, node)
    interrupt, attempt = InterruptFlag(), -1
    deadline = time.monotonic() + work.start_s(config)
    while not interrupt.count:
        found = Rendezvous.read(config.run_dir)
        if found is not None and launch not in (None, found.launch):
            return 1
        if found is not None and found.ended is not None:
            if attempt == -1:
                print(f"node {node}: the run has ended, with exit code {found.ended}", flush=True)
            return found.ended
        if found is not None and found.attempt != attempt:
            attempt = found.attempt
            _play(config, node, found, interrupt)
            deadline = time.monotonic() + work.start_s(config)
        elif time.monotonic() > deadline:
            print(
                f"node {node}: the run's first node has neither ended nor restarted the run; see {config.run_dir}/logs",
                flush=True,
            )
            return 1
        time.sleep(POLL_S)
    return 130


def _play(config: Config, node: int, found: Rendezvous, interrupt: InterruptFlag) -> None:
    """Play the node from one start of all actors to their end."""
    transport.use_keys(config.run_dir if config.deployment.encrypt else None)  # each start has its own keys
    host = own_address(*host_and_port(found.address))
    specs = roles.specs(config, found.version, node, host)

    def ended(now: bool = False) -> bool:
        newest = Rendezvous.read(config.run_dir)
        return newest is None or newest.ended is not None or newest.attempt != found.attempt

    names = _claimed(config, node, found.address, [spec.name for spec in specs], lambda: ended() or interrupt.count > 0)
    if not names:
        return
    specs = [
        msgspec.structs.replace(spec, name=name, control_address=found.address) for spec, name in zip(specs, names)
    ]
    print(f"node {node} plays {', '.join(names)}", flush=True)
    forks = ForkServer(roles.libraries(config, specs))
    children: dict[str, subprocess.Popen] = {spec.name: processes.start(forks, spec) for spec in specs}
    supervisor = Supervisor(
        config,
        f"launcher{node}.{time.time_ns()}",
        found.address,
        specs,
        interrupt,
        True,
        lambda name: processes.kill(children.get(name)),
        roles.SpareGPUs(specs),
        alone=True,
    )
    try:
        processes.watch(config, forks, children, supervisor, found.address, ended)
    finally:
        supervisor.close()
        forks.close()


def _claimed(config: Config, node: int, address: str, names: list[str], over: Callable[[], bool]) -> list[str]:
    """Ask the controller under which names these actors may join: it knows which ones were there before. Returns [] if
    `over()` turns true before it has answered.
    """
    client = ControlClient(address, f"node{node}.{time.time_ns()}")
    try:
        client.send(m.Claim(names))
        deadline = time.monotonic() + work.start_s(config)
        while time.monotonic() < deadline:
            waiting.wait([client], POLL_S)
            answer = client.receive()
            if isinstance(answer, m.Claimed) and answer.refused:
                raise UserError(f"--node {node}: {answer.refused}")
            if isinstance(answer, m.Claimed):
                return answer.names
            if over():
                return []
    finally:
        client.close(0)
    raise UserError(
        f"--node {node}: the controller at {address} has not answered within {work.start_s(config):.0f} "
        f"s; expected deployment.host of node 0 to be an address that this node can reach"
    )


def _main() -> int:
    """Entry point of the child process that hosts.py starts."""
    parent, run_dir, node, launch = sys.argv[1:]
    die_with(int(parent))
    never_fail()
    try:
        return join(run_dir, int(node), int(launch))
    except UserError as error:
        print(error, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(_main())
