"""Runs actors as plain child processes, for torchrun with several ranks: each rank starts its share of the actors.

Under torchrun, rank r plays node r of `deployment.nodes`. Without nodes, rank r of W plays the roles r, r + W, r + 2W,
... of the list controller, trainer, logprob, generators, draft adapter; if there are more ranks than roles, the further
ranks are generators. Each actor is a process of its own. Rank 0 passes the controller's address to the other ranks
through torchrun's store.

A child dies with its parent, even if the parent is killed, see forkserver.py.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta

import msgspec

from asyncspec.actors.base import LEFT_BEHIND, RAISED, RESTART, STOPPING, ActorSpec
from asyncspec.actors.crew import actor_names
from asyncspec.config import Config, hub_names, topology, use_names, work
from asyncspec.deadlines import DOWNLOAD_S, LATE_WORD_S, OUTCOME_S, RESTART_S
from asyncspec.errors import ConfigError, UserError, first_line
from asyncspec.launch import roles, torchrun
from asyncspec.launch.forkserver import ForkServer
from asyncspec.launch.interrupt import InterruptFlag
from asyncspec.launch.machine import check_host, check_machine
from asyncspec.launch.watch import Supervisor, died_of
from asyncspec.wire import transport

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")

AGAIN = "again"  # how a run has ended, for torchrun's other workers: all actors are to start again


def launch(config: Config, rank: int, world_size: int, resume: bool = False) -> int:
    """Start this rank's actors and watch them. Returns the exit code of the run (rank 0) or of this rank's actors.

    If torchrun restarts its workers (--max-restarts), they resume from the last checkpoint.

    Args:
        resume: continue the run in config.run_dir.
    """
    from torch.distributed import TCPStore

    nodes = topology.parse(config.deployment.nodes) if config.deployment.nodes else None
    if nodes is not None and world_size != len(nodes):
        raise ConfigError(
            f"deployment.nodes={config.deployment.nodes!r}: names {len(nodes)} nodes; expected one for each of "
            f"torchrun's {world_size} ranks; nearest valid choice: torchrun --nnodes {len(nodes)} --nproc-per-node 1"
        )
    hosts = int(os.environ.get("GROUP_WORLD_SIZE", 1))
    if nodes is None and config.engine.tensor_parallel > 1 and hosts > 1:
        raise ConfigError(
            f"deployment.nodes='': expected the actors of each node, since all ranks of a generator are on one node "
            f"(engine.tensor_parallel={config.engine.tensor_parallel}); nearest valid choice: torchrun "
            f"--nproc-per-node 1 and deployment.nodes=trainer+logprob,{hosts - 1}*generator:"
            f"{config.engine.tensor_parallel}"
        )
    roles_taken = 1 + len(actor_names(config))
    if nodes is None and world_size > roles_taken:
        config.deployment.generators += (world_size - roles_taken) // config.engine.tensor_parallel
    check_host(config)
    check_machine(config, rank)
    restart, restarts = (int(os.environ.get(f"TORCHELASTIC_{name}", 0)) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    try:
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=config.deployment.start_timeout_s),
        )
    except RuntimeError as error:  # torch's errors of the network are of this type
        raise UserError(
            f"MASTER_ADDR={os.environ['MASTER_ADDR']!r}, MASTER_PORT={os.environ['MASTER_PORT']}: {first_line(error)}; "
            "expected the store of the torchrun that starts this process; without torchrun, unset WORLD_SIZE"
        ) from None
    key = f"asyncspec/{restart}/".__add__  # each restart has its own keys in the store
    _await_downloads(config, store, key, rank, world_size)
    if rank == 0:
        version = -1
        if restart:  # a branch on a hub may have moved since the start
            config.run_dir = store.get("asyncspec/0/run_dir").decode()
            use_names(config, json.loads(store.get("asyncspec/0/names")))
        lock = roles.hold(config.run_dir) if restart or resume else roles.prepare_run_dir(config)
        if restart or resume:
            version = roles.prepare_resume(config)
        torchrun.warn(config)
        store.set(key("version"), str(version))
        store.set(key("names"), json.dumps(hub_names(config)))
        store.set(key("run_dir"), config.run_dir)
    config.run_dir, version = store.get(key("run_dir")).decode(), int(store.get(key("version")))
    use_names(config, json.loads(store.get(key("names"))))
    transport.use_keys(config.run_dir if config.deployment.encrypt else None)
    interrupt = InterruptFlag()  # until here a signal simply ends this process
    host = torchrun.address(store, key, rank, world_size) if config.deployment.host == "auto" else ""
    here = roles.specs(config, version, None if nodes is None else rank, host)
    first, every = (rank, world_size) if nodes is None else (0, 1)
    mine, spare = here[first::every], roles.SpareGPUs(here, first, every)
    forks, children = ForkServer(roles.libraries(config, mine)), {}
    if rank == 0:
        leading = msgspec.structs.replace(mine[0], may_restart=restart < restarts)
        children["controller"] = start(forks, leading, tells_address=True)
        store.set(key("control"), _address(children["controller"], config))
    address = store.get(key("control")).decode()
    for spec in mine[1:] if rank == 0 else mine:
        children[spec.name] = start(forks, msgspec.structs.replace(spec, control_address=address))

    def ended(now: bool) -> bool:
        if now and rank == 0:
            store.set(key("ended"), AGAIN if supervisor.resuming else "")
        return now or store.check([key("ended")])

    supervisor = Supervisor(
        config,
        f"launcher{rank}",
        address,
        mine,
        interrupt,
        restart < restarts,
        lambda name: kill(children.get(name)),
        spare,
    )
    try:
        code = watch(config, forks, children, supervisor, address, ended)
        return code if interrupt.count else _together(code, store, key, rank, world_size)
    finally:
        supervisor.close()
        forks.close()
        if rank == 0:
            lock.release()


def _together(code: int, store, key: Callable[[str], str], rank: int, size: int) -> int:
    """Return this worker's exit code: 1 if all are to start again, since torchrun starts only those again that fail.
    The first worker ends last: torchrun would take a node that is still at work for one that has joined late.

    Args:
        code: what `watch` returned.
        key: callable(name) -> the name's key in the store.
    """
    names = [key("ended")] if rank else [key(f"left/{other}") for other in range(1, size)]
    if rank == 0 and store.get(key("ended")).decode() != AGAIN:
        return code
    try:
        store.wait(names, timedelta(seconds=OUTCOME_S))
    except RuntimeError:  # a node, or the first one, is gone
        return code
    if rank == 0:
        time.sleep(LATE_WORD_S)
        return code
    if store.get(key("ended")).decode() != AGAIN:
        return code
    store.set(key(f"left/{rank}"), "")
    return 1


def _await_downloads(config: Config, store, key: Callable[[str], str], rank: int, world_size: int) -> None:
    """Wait until all ranks have downloaded what is on a hub, before the time counts in which the actors must start."""
    store.set(key(f"downloaded/{rank}"), "")
    if hub_names(config):
        store.wait([key(f"downloaded/{other}") for other in range(world_size)], timedelta(seconds=DOWNLOAD_S))


def environment() -> dict[str, str]:
    """Return the environment of an actor's process: this one's, without what torchrun tells its workers."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_TORCHRUN)}


def start(forks: ForkServer, spec: ActorSpec, tells_address: bool = False) -> subprocess.Popen:
    """Start a process that plays a role."""
    read, write = os.pipe() if tells_address else (-1, -1)
    keep = [write] if tells_address else []
    command = forks.command(__name__, str(write), msgspec.json.encode(spec).decode(), keep=keep)
    child = subprocess.Popen(
        command, env=environment(), pass_fds=[forks.descriptor, *keep], start_new_session=True, stdin=subprocess.DEVNULL
    )
    if tells_address:
        os.close(write)
        child.address_fd = read
    return child


def _address(controller: subprocess.Popen, config: Config) -> str:
    """Wait for the address of the controller that is starting.

    Raises:
        UserError: the controller has ended, or has not come up in time.
    """
    readable, _, _ = select.select([controller.address_fd], [], [], work.start_s(config))
    address = os.read(controller.address_fd, 256).decode() if readable else ""
    if not address:
        controller.kill()
        what = (
            f"ended with exit code {controller.wait()}"
            if readable
            else f"did not start within {work.start_s(config):.0f} s"
        )
        raise UserError(
            f"the controller's process {what}; its output is above; a slow machine needs a larger "
            f"deployment.start_timeout_s"
        )
    return address


def kill(child: subprocess.Popen | None) -> None:
    if child is not None:
        child.kill()


def watch(
    config: Config,
    forks: ForkServer,
    children: dict[str, subprocess.Popen],
    supervisor: Supervisor,
    address: str,
    ended: Callable[[bool], bool],
) -> int:
    """Look after the children until all of them have ended. Returns the exit code.

    Args:
        ended: callable(whether the controller has ended, as far as this rank knows) -> whether the run has ended.
    """
    codes, run_ended, killed = {}, 0.0, set()
    silent: dict[str, float] = {}  # child that has ended by itself -> when
    while len(codes) < len(children):
        time.sleep(0.05)
        supervisor.turn()
        if run_ended or ended("controller" in codes):  # then no controller is left to stop the others
            run_ended = run_ended or time.monotonic()
            if time.monotonic() - run_ended > RESTART_S:  # the controller has waited for them already
                for name, child in children.items():
                    if name not in codes:
                        killed.add(name)
                        child.kill()
        for name, child in list(children.items()):
            if name in codes or (code := child.poll()) is None:
                continue
            # LEFT_BEHIND: the controller has ended, and this rank will soon hear of it; or the network to the
            # controller has failed. Another code: the actor has failed, and has told the controller why if it could.
            unasked = code > 0 and (name != "controller" or code == RAISED) and not run_ended
            since = silent.setdefault(name, time.monotonic())
            if unasked and name != "controller" and time.monotonic() - since < LATE_WORD_S:
                continue
            codes[name] = 0 if code == LEFT_BEHIND else code
            if name == "controller" and code >= 0:
                supervisor.ended(code)
            how = signal.Signals(-code).name if code < 0 else ""
            if code == LEFT_BEHIND:
                how = "lost the controller"
            elif unasked and code != STOPPING:
                how = died_of(config, name, code)
            if how and not run_ended and (new := supervisor.died(name, how)) is not None:
                codes[name] = 0
                children[new.name] = start(forks, msgspec.structs.replace(new, control_address=address))
        if supervisor.overdue:
            for child in children.values():
                child.kill()
    ended("controller" in codes)
    if supervisor.resuming:
        return 1
    if codes.get("controller") == RESTART:  # an interrupt came before the restart
        return 130
    # The draft adapter's code does not count: the run can do without it. Nor do those of processes killed here after
    # the end of the run.
    return codes.get(
        "controller",
        max((abs(code) for name, code in codes.items() if name != "draft_adapter" and name not in killed), default=0),
    )


def _main() -> int:
    """Entry point of a child process: play the role of the spec in argv."""
    write, text = int(sys.argv[1]), sys.argv[2]
    spec = msgspec.json.decode(text, type=ActorSpec)
    try:
        actor = roles.make(spec)
        if write >= 0:
            os.write(write, actor.address.encode())
            os.close(write)
        return actor.run()
    except Exception:
        traceback.print_exc()
        return RAISED


if __name__ == "__main__":
    code = _main()
    sys.stdout.flush()
    # Threads inside collectives that will never finish must not keep the process alive.
    os._exit(code)
