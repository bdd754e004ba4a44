"""The address that a torchrun worker gives to the others: two hosts, which are network namespaces of this one."""

import pytest

from asyncspec.bench.namespaces import Hosts
from asyncspec.errors import UserError

WORKER = """
import os
from datetime import timedelta
from pathlib import Path
from torch.distributed import TCPStore
from asyncspec.launch import torchrun

rank, size = torchrun.ranks()
master, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = TCPStore(master, port, is_master=False, timeout=timedelta(seconds=60))
address = torchrun.address(store, "test/".__add__, rank, size)
Path(__file__).with_name(f"address.{rank}").write_text(address)
store.set(f"done/{rank}", "")
store.wait([f"done/{other}" for other in range(size)])
"""


def told(masters, folder, start):
    """Start torchrun with two workers on each host; return the address that each worker found for itself."""
    (folder / "worker.py").write_text(WORKER)
    running = []
    for node, master in enumerate(masters):
        arguments = ["--nnodes", str(len(masters)), "--nproc-per-node", "2", "--node-rank", str(node)]
        where = ["--master-addr", master, "--master-port", "29513", str(folder / "worker.py")]
        output = folder / f"{node}.log"
        running.append((start(node, ["-m", "torch.distributed.run", *arguments, *where], output), output))
    for process, output in running:
        assert process.wait(120) == 0, output.read_text()
    return [(folder / f"address.{rank}").read_text() for rank in range(2 * len(masters))]


@pytest.mark.slow
def test_a_first_node_whose_own_name_is_loopback_is_reached_at_its_address(tmp_path):
    """Debian puts `127.0.1.1 NAME` into /etc/hosts, so the first node finds MASTER_ADDR there."""
    try:
        hosts = Hosts(2)
    except UserError as error:
        pytest.skip(str(error))
    try:
        found = told(["127.0.1.1", hosts.address(0)], tmp_path, hosts.start)
        assert found == [hosts.address(0)] * 2 + [hosts.address(1)] * 2
    finally:
        hosts.close()


@pytest.mark.slow
def test_two_nodes_on_one_host_use_loopback(tmp_path):
    try:
        hosts = Hosts(1)
    except UserError as error:
        pytest.skip(str(error))
    try:
        found = told(["127.0.1.1", "127.0.0.1"], tmp_path, lambda node, *rest: hosts.start(0, *rest))
        assert found == ["127.0.0.1"] * 4
    finally:
        hosts.close()
