"""The addresses at which hosts reach each other. Hosts are network namespaces of this one."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from runs import Running, at_master, check_finished, pid_of, rows, torchrun_on

from asyncspec.bench.namespaces import Hosts
from asyncspec.errors import UserError
from asyncspec.wire import transport, waiting
from asyncspec.wire.addresses import host_and_port, listening, own_address, url, use_ports

SCRIPT = Path(__file__).parents[1] / "launch" / "async.py"

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


@pytest.mark.slow
def test_a_cluster_that_has_only_ipv6_trains(tmp_path):
    """Also ranks that shard a policy, whose groups torch makes; and with a range of ports."""
    try:
        hosts = Hosts(2, version=6)
    except UserError as error:
        pytest.skip(str(error))
    job = ["--run-dir", str(tmp_path / "run"), "--steps", "2", "rl.groups_per_step=4", "data.eval_prompts=8"]
    job += ["deployment.nodes=trainer:2+logprob,generator", "deployment.ports=29700-29719"]
    try:
        running = torchrun_on(hosts, tmp_path, at_master(hosts, 29514), str(SCRIPT), *job)
        for process, output in running:
            assert process.wait(240) == 0, output.read_text()
    finally:
        hosts.close()
    check_finished(tmp_path / "run", 2)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_sockets_and_stores_listen_and_connect_at_both_kinds_of_addresses(host):
    try:
        listening(host).close()
    except OSError as error:
        pytest.skip(f"{host}: {error}")
    assert own_address(host, 9) == host
    assert host_and_port(url(host, 29500)) == (host, 29500)
    listener = listening(host)
    port = listener.getsockname()[1]
    store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    store.set("key", "value")
    assert dist.TCPStore(host, port, is_master=False).get("key") == b"value"
    inbox = transport.Inbox(host, 2)
    outbox = transport.Outbox(inbox.address)
    try:
        deadline = 100
        while not outbox.credits and deadline:
            waiting.wait([outbox], 0.1)
            len(inbox)
            outbox.flush()
            deadline -= 1
        assert outbox.credits == 2 and inbox.address == url(host, host_and_port(inbox.address)[1])
    finally:
        outbox.close(0)
        inbox.close()


def test_sockets_listen_on_the_ports_that_they_may_use_and_say_when_all_are_taken():
    held = []
    use_ports("29810-29813")
    try:
        for _ in range(2):
            held.append(listening("127.0.0.1"))
            held.append(transport.Inbox("127.0.0.1", credits=1))
        ports = [host_and_port(end.address)[1] for end in held[1::2]] + [end.getsockname()[1] for end in held[::2]]
        assert sorted(ports) == [29810, 29811, 29812, 29813]
        for listen in (lambda: listening("127.0.0.1"), lambda: transport.Inbox("127.0.0.1", credits=1)):
            with pytest.raises(UserError, match="^deployment.ports=29810-29813: all of them are taken on this host; "):
                listen()
    finally:
        use_ports("")
        for end in held:
            end.close()


@pytest.mark.slow
def test_all_nodes_of_torchrun_start_again_when_the_trainer_has_died(tmp_path):
    """torchrun starts only those workers again that fail, so those of the other nodes must, too."""
    try:
        hosts = Hosts(2)
    except UserError as error:
        pytest.skip(str(error))
    run_dir = tmp_path / "run"
    job = ["--config", "mock_rl_think_8b", "--run-dir", str(run_dir), "--steps", "8", "checkpoint.every=2"]
    job += ["rl.groups_per_step=8", "rl.group_size=4", "engine.slots=16", "mock.gpus=1", "mock.time_scale=0.01"]
    job += ["deployment.nodes=trainer+logprob,generator", "deployment.ports=29720-29739"]

    def flags_of(node):
        where = ["--rdzv-endpoint", f"{hosts.address(0)}:29517", "--rdzv-conf", f"is_host={int(not node)}"]
        return ["--max-restarts", "2", "--rdzv-backend", "c10d", *where, "--local-addr", hosts.address(node)]

    try:
        running = torchrun_on(hosts, tmp_path, flags_of, str(SCRIPT), *job)
        deadline = time.monotonic() + 120
        while len(rows(run_dir)) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(pid_of(run_dir, "trainer"), signal.SIGKILL)
        for process, output in running:
            assert process.wait(180) == 0, output.read_text()
    finally:
        hosts.close()
    check_finished(run_dir, 8)
    assert "resuming from version" in (tmp_path / "0.log").read_text()


@pytest.mark.slow
def test_all_actors_start_again_within_a_range_that_has_two_ports_more_than_actors(tmp_path):
    """The process that plays the next controller has played the one before."""
    faults = ["deployment.faults=trainer:work:3:kill", "checkpoint.every=1", "deployment.ports=29740-29746"]
    run = Running.new(tmp_path / "run", "--steps", "4", "rl.groups_per_step=4", "data.eval_prompts=8", *faults)
    assert "all actors restart from the last checkpoint" in run.end(0)
    check_finished(tmp_path / "run", 4)
