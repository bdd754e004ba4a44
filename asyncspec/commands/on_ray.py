"""Has the nodes of a Ray cluster check themselves and each other, for `asyncspec doctor --launcher ray`."""

from __future__ import annotations

import os
from datetime import timedelta

import msgspec

from asyncspec.commands import meeting
from asyncspec.commands.meeting import Node
from asyncspec.config import Config, fetch_all, from_yaml, to_yaml
from asyncspec.launch.ray import connect, ray  # which says in one line that ray is not installed
from asyncspec.wire.addresses import listening, use_ports


def everyone(config: Config) -> list[Node]:
    """Return what each node of the cluster reports, those with most GPUs first.

    Raises:
        UserError: Ray cannot be reached.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    from torch.distributed import TCPStore

    connect("asyncspec-doctor")
    try:
        alive = [node for node in ray.nodes() if node["Alive"]]
        alive.sort(key=lambda node: -node["Resources"].get("GPU", 0))
        address = ray.util.get_node_ip_address()
        listener = listening(address)
        port = listener.getsockname()[1]
        limit, descriptor = timedelta(seconds=meeting.MEETING_S), listener.detach()
        store = TCPStore(
            address, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=descriptor
        )
        asked = [
            ray.remote(_meet)
            .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
            .remote(to_yaml(config), os.getcwd(), rank, len(alive), address, port)
            for rank, node in enumerate(alive)
        ]
        said = ray.get(asked)[0]
        del store  # which they have used until now
        return msgspec.convert(said, list[Node])
    finally:
        ray.shutdown()


def _meet(config_yaml: str, directory: str, rank: int, size: int, address: str, port: int) -> list[dict]:
    """Check a node, in a process there, and meet the others.

    Args:
        directory: the directory that paths in the configuration are relative to.
    """
    if not os.environ.get("CUDA_VISIBLE_DEVICES", "all"):  # Ray hides the GPUs of a task that asks for none
        del os.environ["CUDA_VISIBLE_DEVICES"]
    from torch.distributed import TCPStore

    from asyncspec.commands.this_host import check_this_host

    os.chdir(directory)
    config = from_yaml(config_yaml)
    fetch_all(config)
    use_ports(config.deployment.ports)
    store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=meeting.MEETING_S))
    here = check_this_host(config)
    here.address = ray.util.get_node_ip_address()
    return msgspec.to_builtins(meeting.meet(config, here, rank, size, store))
