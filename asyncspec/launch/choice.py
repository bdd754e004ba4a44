"""Choose what starts and watches the actors of a run, and have it start them."""

from __future__ import annotations

import os

from asyncspec.config import Config
from asyncspec.errors import UserError
from asyncspec.launch.ending import end_at_once
from asyncspec.launch.push import push_result
from asyncspec.launch.torchrun import ranks

LAUNCHERS = ("auto", "monarch", "torchrun", "ray")


def launch(config: Config, resume: bool, launcher: str, node: int | None, hosts: str | None) -> int:
    """Run a job. Return its exit code; Monarch's ends this process instead.

    Args:
        resume: whether the run is resumed.
        launcher: one of LAUNCHERS; auto: torchrun if it has started several ranks, else monarch.
        node: the node that this process plays, with Monarch; None: all.
        hosts: addresses of the hosts that play the further nodes, with Monarch, separated by commas; None: none.

    Raises:
        UserError: these do not fit together.
    """
    rank, world_size = ranks()
    if node is not None and (launcher not in ("auto", "monarch") or world_size > 1):
        raise UserError(
            f"--node {node}: expected one process and the monarch launcher, because torchrun and Ray place all "
            "nodes themselves; nearest valid choice: no --node"
        )
    if hosts is not None and (node is not None or launcher not in ("auto", "monarch") or world_size > 1):
        raise UserError(
            f"--hosts {hosts}: expected one process, no --node, and the monarch launcher; "
            "nearest valid choice: no --hosts"
        )
    if launcher == "torchrun" and "WORLD_SIZE" not in os.environ:
        raise UserError(
            "--launcher torchrun: expected torchrun to start this command, for example torchrun --nproc-per-node 4 "
            "launch/async.py"
        )
    if launcher == "torchrun" or launcher == "auto" and world_size > 1:
        from asyncspec.launch import processes

        code = processes.launch(config, rank, world_size, resume)
        return code if rank else push_result(config, code)
    if world_size > 1:
        raise UserError(
            f"--launcher {launcher}: expected one process, but torchrun has started {world_size}; "
            "nearest valid choice: --launcher torchrun"
        )
    if launcher == "ray":
        from asyncspec.launch import ray

        return push_result(config, ray.launch(config, resume))
    from asyncspec.launch import monarch

    code = monarch.launch(config, resume, node, hosts.split(",") if hosts is not None else ())
    end_at_once(code if node else push_result(config, code))
