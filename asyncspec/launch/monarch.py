"""One host, started and watched by Monarch: one process mesh of one process for each actor.

Monarch starts the processes and carries their results; that one has died the kernel says at once, through its pidfd (Monarch's
own supervision may take half a minute). The actors do not know Monarch; `_Host` is the only Monarch actor and plays whatever
role it is given. Spare processes, with all libraries loaded, wait for whichever actors die next.
"""

from __future__ import annotations

import os
import select
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from asyncspec import topology, transport
from asyncspec.actors.base import ActorSpec, first_name
from asyncspec.config import Config, ConfigError
from asyncspec.deadlines import EXIT_GRACE_S, MESH_STOP_S, STANDBY_AFTER_S
from asyncspec.launch import roles
from asyncspec.launch.interrupt import InterruptFlag
from asyncspec.launch.join import Rendezvous, check_node
from asyncspec.launch.watch import Supervisor

os.environ.setdefault("OMP_NUM_THREADS", "1")

import monarch.actor as monarch  # noqa: E402

POLL_S = 0.1


class _Host(monarch.Actor):
    """Plays one role in its process."""

    @monarch.endpoint
    def warm(self) -> None:
        """Load what every role needs, before there is one to play."""
        roles.warm()

    @monarch.endpoint
    def prepare(self, spec: dict) -> tuple[int, str]:
        """Make the actor; returns the process id, and the controller's address if it is the controller."""
        self.actor = roles.make(ActorSpec(**spec))
        return os.getpid(), getattr(self.actor, "address", "")

    @monarch.endpoint
    def run(self) -> int:
        return self.actor.run()


def launch(config: Config, resume: bool = False, node: int | None = None) -> int:
    """Run the job; returns the exit code: 0 finished, 1 failed, 130 interrupted.

    Args:
        resume: go on with the run that config.run_dir holds.
        node: the first of several; the others join the run, see join.py. None: this host has all actors.
    """
    nodes = len(topology.parse(config.deployment.nodes)) if config.deployment.nodes else 1
    if node is not None:
        check_node(config, node)
    elif nodes > 1:
        raise ConfigError(f"deployment.nodes={config.deployment.nodes!r}: names {nodes} nodes, and this is one host; expected "
                          f"torchrun --nnodes {nodes} --nproc-per-node 1 launch/async.py, on each of them")
    if not resume:
        roles.prepare_run_dir(config)
    lock = roles.hold(config.run_dir)
    version = roles.prepare_resume(config) if resume else -1
    interrupt = InterruptFlag()
    # Without a hook of ours a fault would end this process before the run is closed in order; the death itself reaches
    # `_Attempt.watch` through the result of the actor's `run`.
    monarch.unhandled_fault_hook = lambda failure: None
    processes, code = _Processes(), 1
    try:
        code = _attempts(config, version, interrupt, processes, node)
        return code
    finally:
        if node is not None:
            Rendezvous("", version, 0, ended=code).write(config.run_dir)
        processes.stop()
        os.close(lock)


def _attempts(config: Config, version: int, interrupt: InterruptFlag, processes: "_Processes", node: int | None) -> int:
    for left in range(config.deployment.restarts, -1, -1):
        attempt = _Attempt(config, version, interrupt, left, processes, node)
        try:
            code = attempt.watch()
        finally:
            attempt.end()
        if attempt.resuming and interrupt.count:
            return 130
        if not attempt.resuming:
            return code if code in (0, 130) else 130 if interrupt.count else 1
        version = roles.prepare_resume(config)
    return 1


class _Processes:
    """Processes with a `_Host` in each. One whose actor has ended in order can play another of the same kind: its libraries are loaded."""

    def __init__(self) -> None:
        self._host = monarch.this_host()
        self._meshes: list = []
        self._idle: dict[str, list] = {}  # by first name of the actor it has played
        self._spares: list = []

    def make(self):
        self._meshes.append(self._host.spawn_procs(name=f"process{len(self._meshes)}"))
        return self._meshes[-1].spawn("host", _Host)

    def take(self, name: str):
        """A host for an actor, as warm as there is."""
        if self._idle.get(first_name(name)):
            return self._idle[first_name(name)].pop()
        return self._spares.pop(0) if self._spares else self.make()

    def give_back(self, name: str, host) -> None:
        self._idle.setdefault(first_name(name), []).append(host)

    def keep_spares(self, count: int) -> None:
        if len(self._spares) < count:
            self._spares.append(self.make())
            self._spares[-1].warm.call_one()

    def stop(self) -> None:
        """End every process. A mesh takes a second to stop, so all at once."""
        with ThreadPoolExecutor(len(self._meshes) or 1) as pool:
            pool.map(_stop, self._meshes)


class _Attempt:
    """The actors from one start of all of them to their end."""

    def __init__(self, config: Config, version: int, interrupt: InterruptFlag, restarts_left: int, processes: _Processes,
                 node: int | None) -> None:
        transport.use_keys(Path(config.run_dir))
        self.config, self.interrupt, self.restarts_left, self.processes = config, interrupt, restarts_left, processes
        self.resuming = False
        self.hosts: dict = {}
        self.prepared: dict = {}  # actor -> future of its pid
        self.results: dict = {}  # actor -> future of its exit code
        self.pids: dict[str, int] = {}
        self.started = time.monotonic()
        self.specs, self.version, self.node = roles.specs(config, version, node), version, node

    def _play(self, spec: ActorSpec) -> None:
        host = self.hosts[spec.name]
        self.prepared[spec.name] = host.prepare.call_one(msgspec.structs.asdict(spec))
        self.results[spec.name] = host.run.call_one()
        self.started = time.monotonic()

    def _keep_spares(self) -> None:
        if time.monotonic() - self.started > STANDBY_AFTER_S and not self.prepared and not self.interrupt.count:
            self.processes.keep_spares(min(self.config.deployment.standby, self.supervisor.replacements))

    def watch(self) -> int:
        """Start all, and see to them until the controller has ended; returns the exit code."""
        self.hosts = {spec.name: self.processes.take(spec.name) for spec in self.specs}
        self._play(self.specs[0])
        try:
            self.pids["controller"], address = self._controller()
        except KeyboardInterrupt:
            print("stopped early: interrupted while starting", flush=True)
            return 130
        if self.node is not None:
            Rendezvous(address, self.version, time.time_ns()).write(self.config.run_dir)
        for spec in self.specs[1:]:
            self._play(msgspec.structs.replace(spec, control_address=address))
        self.supervisor = Supervisor(
            self.config, "launcher", address, self.specs, self.interrupt, self.restarts_left > 0, self._kill)
        code, names, deaths = None, {}, select.poll()
        while code is None:
            for name, future in list(self.prepared.items()):
                if (pid := _outcome(future)) is not None:
                    del self.prepared[name]
                    if isinstance(pid, tuple):  # a failure shows in the result of `run`, too
                        self.pids[name] = pid[0]
                        names[descriptor := _pidfd(pid[0])] = name
                        deaths.register(descriptor, select.POLLIN)
            for descriptor, _ in deaths.poll(POLL_S * 1e3):
                deaths.unregister(descriptor)
                os.close(descriptor)
                name = names.pop(descriptor)
                if name in self.results and _outcome(self.results[name]) is None:
                    self.results[name] = RuntimeError("its process ended")
            for name, result in list(self.results.items()):
                value = _outcome(result)
                if value is None:
                    continue
                del self.results[name]
                self.pids.pop(name, None)
                if isinstance(value, Exception):  # its process ended, or Monarch noticed that first
                    if (spec := self.supervisor.died(name, str(value).splitlines()[0][:200])) is not None:
                        self.hosts[spec.name] = self.processes.take(spec.name)
                        self._play(msgspec.structs.replace(spec, control_address=address))
                    value = 1
                else:
                    self.processes.give_back(name, self.hosts[name])
                    if name == "controller":
                        self.supervisor.ended(value)
                if name == "controller":
                    code = value
            self.supervisor.turn()
            self._keep_spares()
            if self.supervisor.overdue:
                code = 130
        for descriptor in names:
            os.close(descriptor)
        self.resuming = self.supervisor.resuming
        self.supervisor.close()
        return code

    def end(self) -> None:
        """End what still plays: who could be asked to leave was asked by the controller, and has a moment to do so."""
        deadline = time.monotonic() + (EXIT_GRACE_S if self.resuming else 0.0)
        while self.results:
            for name, result in list(self.results.items()):
                if (value := _outcome(result)) is not None:
                    del self.results[name]
                    if not isinstance(value, Exception):
                        self.pids.pop(name, None)
                        self.processes.give_back(name, self.hosts[name])
            if time.monotonic() > deadline:
                break
        for name in list(self.pids):
            self._kill(name)

    def _kill(self, name: str) -> None:
        if (pid := self.pids.get(name)) is not None:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def _controller(self) -> tuple[int, str]:
        """The controller's process id and address; KeyboardInterrupt if somebody does not want to wait for it."""
        limit = self.config.deployment.start_timeout_s
        deadline = time.monotonic() + limit
        while (outcome := _outcome(self.prepared["controller"])) is None:
            if self.interrupt.count:
                raise KeyboardInterrupt
            if time.monotonic() > deadline:
                raise TimeoutError(f"the controller's process did not start within {limit:.0f} s")
            time.sleep(POLL_S)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def _pidfd(pid: int) -> int:
    """A descriptor that becomes readable when the process ends; at once if it has."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        read, write = os.pipe()
        os.close(write)
        return read


def _stop(mesh) -> None:
    try:
        mesh.stop().get(timeout=MESH_STOP_S)
    except Exception:  # it is gone already; nothing is left to stop
        pass


def _outcome(future):
    """What a future holds: None if nothing yet, its value, or the exception that came instead of one."""
    if isinstance(future, Exception):
        return future
    try:
        return future.get(timeout=0.001)
    except TimeoutError:
        return None
    except Exception as error:
        return error
