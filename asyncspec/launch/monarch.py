"""One host, started and watched by Monarch: one process mesh of one process for each actor.

Monarch starts the processes and carries their results; that one has died the kernel says at once, through its pidfd (Monarch's
own supervision may take half a minute). The actors do not know Monarch; `_Host` is the only Monarch actor and plays whatever
role it is given.
"""

from __future__ import annotations

import os
import select
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Callable

import msgspec

from asyncspec import transport
from asyncspec.actors.base import ActorSpec
from asyncspec.config import Config
from asyncspec.launch import roles
from asyncspec.launch.interrupt import InterruptFlag, ask_to_stop

os.environ.setdefault("OMP_NUM_THREADS", "1")

import monarch.actor as monarch  # noqa: E402

POLL_S = 0.1
STOP_MESH_S = 2.0


class _Host(monarch.Actor):
    """Plays one role in its process."""

    @monarch.endpoint
    def prepare(self, spec: dict) -> tuple[int, str]:
        """Make the actor; returns the process id, and the controller's address if it is the controller."""
        self.actor = roles.make(ActorSpec(**spec))
        return os.getpid(), getattr(self.actor, "address", "")

    @monarch.endpoint
    def run(self) -> int:
        return self.actor.run()


def launch(config: Config) -> int:
    """Run the job; returns the exit code: 0 finished, 1 failed, 130 interrupted."""
    roles.prepare_run_dir(config)
    transport.use_keys(Path(config.run_dir))
    interrupt = InterruptFlag()
    # Without a hook of ours a fault would end this process before the run is closed in order; the death itself reaches
    # `_watch` through the result of the actor's `run`.
    monarch.unhandled_fault_hook = lambda failure: None
    host = monarch.this_host()
    specs = roles.specs(config)
    meshes = {spec.name: host.spawn_procs(name=spec.name) for spec in specs}
    actors = {spec.name: meshes[spec.name].spawn("host", _Host) for spec in specs}
    controller = specs[0]
    prepared = {"controller": actors["controller"].prepare.call_one(msgspec.structs.asdict(controller))}
    try:
        _, address = _prepared(prepared["controller"], config, interrupt)
    except KeyboardInterrupt:
        print("stopped early: interrupted; nothing was trained yet", flush=True)
        _stop_all(meshes)
        return 130
    results = {"controller": actors["controller"].run.call_one()}
    for spec in specs[1:]:
        spec = msgspec.structs.replace(spec, control_address=address)
        prepared[spec.name] = actors[spec.name].prepare.call_one(msgspec.structs.asdict(spec))
        results[spec.name] = actors[spec.name].run.call_one()
    def start(spec: ActorSpec) -> None:
        meshes[spec.name] = host.spawn_procs(name=spec.name.replace(".", "_"))
        actor = meshes[spec.name].spawn("host", _Host)
        prepared[spec.name] = actor.prepare.call_one(msgspec.structs.asdict(msgspec.structs.replace(spec, control_address=address)))
        results[spec.name] = actor.run.call_one()

    code = _watch(config, prepared, results, address, interrupt, roles.Replacements(config, specs), start)
    _stop_all(meshes)
    return code


def _prepared(future, config: Config, interrupt: InterruptFlag) -> tuple[int, str]:
    """The controller's process id and address; KeyboardInterrupt if somebody does not want to wait for it."""
    deadline = time.monotonic() + config.deployment.start_timeout_s
    while (outcome := _outcome(future)) is None:
        if interrupt.count:
            raise KeyboardInterrupt
        if time.monotonic() > deadline:
            raise TimeoutError(f"the controller's process did not start within {config.deployment.start_timeout_s:.0f} s")
        time.sleep(POLL_S)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _stop_all(meshes: dict) -> None:
    # A mesh takes a second to stop, so all at once.
    with ThreadPoolExecutor(len(meshes)) as pool:
        pool.map(_stop, meshes.values())


def _stop(mesh) -> None:
    try:
        mesh.stop().get(timeout=STOP_MESH_S)
    except Exception:  # it is gone already; nothing is left to stop
        pass


def _watch(config: Config, prepared: dict, results: dict, address: str, interrupt: InterruptFlag,
           replacements: roles.Replacements, start: Callable[[ActorSpec], None]) -> int:
    """Until the controller has ended; tells it of interrupts and deaths."""
    told, code, names, deaths = False, None, {}, select.poll()
    while code is None:
        for name, future in list(prepared.items()):
            if (pid := _outcome(future)) is not None:
                del prepared[name]
                if isinstance(pid, tuple):  # a failure shows in the result of `run`, too
                    names[descriptor := os.pidfd_open(pid[0])] = name
                    deaths.register(descriptor, select.POLLIN)
        for descriptor, _ in deaths.poll(POLL_S * 1e3):
            deaths.unregister(descriptor)
            os.close(descriptor)
            name = names.pop(descriptor)
            if name in results and _outcome(results[name]) is None:
                results[name] = RuntimeError("its process ended")
        for name, result in list(results.items()):
            value = _outcome(result)
            if value is None:
                continue
            del results[name]
            if isinstance(value, Exception):
                print(f"{name} died: {str(value).splitlines()[0][:200]}", flush=True)
                if name != "controller":
                    # Its process ended, or Monarch noticed that first.
                    spec = replacements.of(name) if not interrupt.count else None
                    ask_to_stop(address, f"launcher-{name}", f"{name} died", name, spec.name if spec else "")
                    if spec is not None:
                        start(spec)
                value = 1
            if name == "controller":
                code = value
        if interrupt.count and not told:
            told = True
            ask_to_stop(address, "launcher")
        if interrupt.count > 1 or (interrupt.count and time.monotonic() - interrupt.first > config.deployment.stop_timeout_s + 0.5):
            return 130
    return code


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
