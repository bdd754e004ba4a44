"""Runs a job on one host under Monarch, with a process mesh of one process for each actor. hosts.py adds further hosts.

A fork server makes the processes. Monarch starts them and carries their results. The kernel reports a death at once,
through the process's pidfd; Monarch's own supervision may take half a minute. The actors do not know Monarch: `_Host`
plays whatever role it is given.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from asyncspec.actors.base import ActorSpec
from asyncspec.config import Config, topology
from asyncspec.errors import ConfigError
from asyncspec.launch import attempts, ending, roles, scratch
from asyncspec.launch.forkserver import ForkServer
from asyncspec.launch.interrupt import InterruptFlag
from asyncspec.launch.join import Rendezvous, check_first
from asyncspec.launch.machine import check_host, check_machine
from asyncspec.wire.addresses import url

os.environ.setdefault("OMP_NUM_THREADS", "1")

import monarch.actor as monarch

from asyncspec.launch.hosts import Hosts, addresses, stop

_UNHEARD = "timeout waiting for message"  # in Monarch's error about a process that lives and does not answer


class _Host(monarch.Actor):
    """Plays one role in its process."""

    @monarch.endpoint
    def pid(self) -> int:
        return os.getpid()

    @monarch.endpoint
    def prepare(self, spec: dict) -> str:
        """Make the actor. Returns the controller's address if it is the controller, else ""."""
        self.actor = roles.make(ActorSpec(**spec))
        return getattr(self.actor, "address", "")

    @monarch.endpoint
    def run(self) -> int:
        return roles.play(self.actor)


def launch(config: Config, resume: bool = False, node: int | None = None, hosts: Sequence[str] = ()) -> int:
    """Run the job on this host, alone or with others. Returns the exit code, see attempts.run.

    Args:
        resume: continue the run in config.run_dir.
        node: 0, the first of several nodes; the others join the run, see join.py. None: this host plays all actors, or
            the first node if there are `hosts`.
        hosts: addresses of the hosts that play the further nodes, see hosts.py.
    """
    nodes, here = len(topology.parse(config.deployment.nodes)) if config.deployment.nodes else 1, check_host(config)
    if hosts:
        elsewhere, way = addresses(config, hosts)
        here = way if config.deployment.host == "auto" else here
        monarch.enable_transport(url(here, 0))
    elif node is not None:
        check_first(config, node)
    elif nodes > 1:
        raise ConfigError(
            f"deployment.nodes={config.deployment.nodes!r}: names {nodes} nodes, and this is one host; expected "
            f"--hosts with the other {nodes - 1}, torchrun --nnodes {nodes} --nproc-per-node 1 launch/async.py on each "
            f"node, or launch/ray.py"
        )
    check_machine(config, 0 if hosts else node)
    # Monarch's own hook would end this process before the run is closed cleanly. A death shows in the result of the
    # actor's `run` anyway.
    monarch.unhandled_fault_hook = lambda failure: None
    with scratch.directory() as sockets:

        def start(interrupt: InterruptFlag) -> _Pool:
            with scratch.monarch_in(sockets):
                host = monarch.this_host()
            return _Pool(interrupt, 0 if hosts else node, here, host, Hosts(config, elsewhere) if hosts else None)

        return attempts.run(config, resume, start, local=True)


class _Pool(attempts.Pool):
    """Process meshes with one `_Host` in each."""

    def __init__(self, interrupt: InterruptFlag, node: int | None, here: str, host, hosts: Hosts | None) -> None:
        """
        Args:
            node: the node that this host plays; None: the whole run.
            here: the address that deployment.host=auto stands for.
            host: this host, as Monarch has it.
            hosts: the hosts that play the further nodes; None: there are none.
        """
        super().__init__()
        self._interrupt, self._node, self._here, self._host, self._hosts = interrupt, node, here, host, hosts
        self._launch = time.time_ns()
        self._forks: ForkServer | None = None
        self._spare = roles.SpareGPUs([])
        self._meshes: list = []
        self._deaths, self._watched = select.poll(), {}  # descriptor -> process

    def specs(self, config: Config, version: int) -> list[ActorSpec]:
        found = roles.specs(config, version, self._node, self._here)
        self._forks = self._forks or ForkServer(roles.libraries(config, found))
        self._spare = roles.SpareGPUs(found)
        return found

    def elsewhere(self, spec: ActorSpec) -> str:
        return self._spare(spec)

    def began(self, config: Config, address: str, version: int) -> None:
        if self._node is not None:
            Rendezvous(address, version, time.time_ns(), launch=self._launch).write(config.run_dir)
        if self._hosts is not None:
            self._hosts.play(self._launch)

    def ended(self, config: Config, code: int) -> None:
        if self._node is not None:
            Rendezvous("", -1, 0, code, self._launch).write(config.run_dir)

    def make(self, name: str) -> _Process:
        command = monarch.default_bootstrap_cmd()
        command.program, *command.args = self._forks.command(*command.args[1:])  # args[0] is -m
        self._meshes.append(self._host.spawn_procs(name=f"process{len(self._meshes)}", bootstrap_command=command))
        return _Process(self._meshes[-1].spawn("host", _Host), self._watch)

    def _watch(self, process: _Process) -> None:
        self._watched[descriptor := ending.pidfd(process.pid)] = process
        self._deaths.register(descriptor, select.POLLIN)

    def wait(self, timeout_s: float) -> None:
        for descriptor, _ in self._deaths.poll(timeout_s * 1e3):
            self._deaths.unregister(descriptor)
            os.close(descriptor)
            self._watched.pop(descriptor).ended = True
        if self._hosts is not None and (wrong := self._hosts.wrong):
            self._hosts.wrong = ""  # raise it only once
            raise attempts.NotStarted(wrong)

    def stop(self) -> None:
        """End every process. A mesh takes a second to stop, so all of them stop in parallel."""
        if self._hosts is not None:
            self._hosts.close(now=self._interrupt.count > 1)
        if self._forks is not None:
            self._forks.close()
        with ThreadPoolExecutor(len(self._meshes) or 1) as pool:
            pool.map(stop, self._meshes)


class _Process(attempts.Process):
    def __init__(self, host, watch) -> None:
        """
        Args:
            watch: callable(this process), called once its id is known. It sets `ended` when the process has ended.
        """
        self._host, self._watch, self.pid, self.ended = host, watch, 0, False
        self._asked = host.pid.call_one()
        self._outcome: str | Exception | None = None  # of preparing the actor

    def play(self, spec: ActorSpec) -> None:
        self._outcome, self._prepared = None, self._host.prepare.call_one(msgspec.structs.asdict(spec))
        self._result = self._host.run.call_one()

    def prepared(self) -> str | Exception | None:
        self._identify()
        if self._outcome is None:
            self._outcome = _outcome(self._prepared)
            if isinstance(self._outcome, Exception):
                frozen = _UNHEARD in str(self._outcome)
                if frozen:
                    self.kill()
                if frozen or self._gone():
                    self._outcome = attempts.Ended(str(self._outcome))
        return self._outcome

    def _gone(self) -> bool:
        """Whether the process has ended, perhaps before it could report its id."""
        if not self.pid:
            return True
        death, descriptor = select.poll(), ending.pidfd(self.pid)
        death.register(descriptor, select.POLLIN)
        gone = bool(death.poll(0))
        os.close(descriptor)
        return gone

    def _identify(self) -> None:
        """Take note of the process id once the process has reported it."""
        if not self.pid and isinstance(pid := _outcome(self._asked), int):
            self.pid = pid
            self._watch(self)

    def result(self) -> int | Exception | None:
        self._identify()
        outcome = _outcome(self._result)
        return attempts.Ended("its process ended") if outcome is None and self.ended else outcome

    def alive(self) -> bool:
        return not self.ended

    def kill(self) -> None:
        self._identify()
        if self.pid and not self.ended:
            ending.end(descriptor := ending.pidfd(self.pid))
            os.close(descriptor)


def _outcome(future):
    """Return what a future holds: None if nothing yet, else its value or the exception that was raised instead."""
    try:
        return future.get(timeout=0.001)
    except TimeoutError:
        return None
    except Exception as error:
        return error
