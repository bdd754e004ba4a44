"""Actors as plain child processes, for torchrun with several ranks: each rank starts its share of the actors.

Under torchrun rank r plays the roles r, r + W, r + 2W, ... of the list controller, trainer, logprob, generators, draft
adapter; each actor is a process of its own. With more ranks than roles the further ranks are generators. Rank 0 passes the
controller's address to the others through torchrun's own store.

A child dies with its parent, also when that is killed: it asks the kernel for SIGTERM at its parent's death.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Callable

import msgspec

from asyncspec import transport
from asyncspec.actors.base import ActorSpec
from asyncspec.config import Config
from asyncspec.launch import roles
from asyncspec.launch.interrupt import InterruptFlag, ask_to_stop

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
_PR_SET_PDEATHSIG = 1
_ENDED = "asyncspec/ended"  # in torchrun's store, once the controller has ended


def launch(config: Config, rank: int, world_size: int) -> int:
    """Start this rank's actors and watch them; returns the exit code of the run (rank 0) or of this rank's actors."""
    from torch.distributed import TCPStore

    roles_taken = len(roles.specs(config))
    if world_size > roles_taken:
        config.deployment.generators += world_size - roles_taken
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                     timeout=timedelta(seconds=config.deployment.start_timeout_s))
    if rank == 0:
        roles.prepare_run_dir(config)
        store.set("asyncspec/run_dir", config.run_dir)
    config.run_dir = store.get("asyncspec/run_dir").decode()
    transport.use_keys(Path(config.run_dir))
    interrupt = InterruptFlag()  # from here on; before, a signal simply ends this process
    mine = roles.specs(config)[rank::world_size]
    children: dict[str, subprocess.Popen] = {}
    if rank == 0:
        controller = _start(mine.pop(0), stdout_address=True)
        children["controller"] = controller
        store.set("asyncspec/control", os.read(controller.address_fd, 256).decode().strip())
    address = store.get("asyncspec/control").decode()
    for spec in mine:
        children[spec.name] = _start(msgspec.structs.replace(spec, control_address=address))
    if rank == 0:
        def ended(now: bool) -> bool:
            if now:
                store.set(_ENDED, "")
            return now
    else:
        def ended(now: bool) -> bool:
            return store.check([_ENDED])
    return _watch(config, children, address, interrupt, rank, roles.Replacements(config, mine), ended)


def _start(spec: ActorSpec, stdout_address: bool = False) -> subprocess.Popen:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_TORCHRUN)}
    environment["OMP_NUM_THREADS"] = environment.get("OMP_NUM_THREADS", "1")
    read, write = os.pipe() if stdout_address else (-1, -1)
    command = [sys.executable, "-m", "asyncspec.launch.processes", str(os.getpid()), str(write), msgspec.json.encode(spec).decode()]
    child = subprocess.Popen(command, env=environment, pass_fds=[write] if stdout_address else [], start_new_session=True)
    if stdout_address:
        os.close(write)
        child.address_fd = read
    return child


def _watch(config: Config, children: dict[str, subprocess.Popen], address: str, interrupt: InterruptFlag, rank: int,
           replacements: roles.Replacements, ended: Callable[[bool], bool]) -> int:
    """Until all children have ended.

    Args:
        ended: callable(whether the controller has ended, as far as this rank knows) -> whether it has.
    """
    told, codes, run_ended, killed = False, {}, 0.0, set()
    while len(codes) < len(children):
        time.sleep(0.05)
        if run_ended or ended("controller" in codes):  # nobody is left to tell the others to stop
            run_ended = run_ended or time.monotonic()
            if time.monotonic() - run_ended > config.deployment.stop_timeout_s:
                for name, child in children.items():
                    if name not in codes:
                        killed.add(name)
                        child.kill()
        for name, child in list(children.items()):
            if name not in codes and (code := child.poll()) is not None:
                codes[name] = code
                if code != 0 and name != "controller":
                    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                    # An actor that fails by itself would fail again; it has said why.
                    spec = replacements.of(name) if code < 0 and not interrupt.count and not run_ended else None
                    ask_to_stop(address, f"launcher{rank}-{name}", f"{name} died: {how}", name, spec.name if spec else "")
                    if spec is not None:
                        codes[name] = 0
                        children[spec.name] = _start(msgspec.structs.replace(spec, control_address=address))
                elif code < 0:
                    print(f"controller died: {signal.Signals(-code).name}", flush=True)
        if interrupt.count and not told:
            told = True
            ask_to_stop(address, f"launcher{rank}")
        overdue = interrupt.count and time.monotonic() - interrupt.first > config.deployment.stop_timeout_s + 0.5
        if interrupt.count > 1 or overdue:
            for child in children.values():
                child.kill()
    ended("controller" in codes)
    # The run can do without the draft adapter, and without what was still starting when it ended.
    return codes.get("controller", max((abs(code) for name, code in codes.items() if name != "draft_adapter" and name not in killed), default=0))


def _main() -> int:
    """Entry of a child process: play the role of the spec in argv."""
    parent, write, text = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return 1
    spec = msgspec.json.decode(text, type=ActorSpec)
    actor = roles.make(spec)
    if write >= 0:
        os.write(write, actor.address.encode())
        os.close(write)
    return actor.run()


if __name__ == "__main__":
    code = _main()
    sys.stdout.flush()
    # Threads inside collectives that will never finish must not hold the process.
    os._exit(code)
