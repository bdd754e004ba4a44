"""What nodes find out together: whether they reach each other, whether they see the same files, their clocks."""

from __future__ import annotations

import os
import socket
import time
import uuid
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import msgspec

from asyncspec.commands.differences import facts
from asyncspec.config import Config
from asyncspec.wire.addresses import host_and_port, listening, url

ROUND_TRIPS = 20
MEETING_S = 120.0  # for all nodes to come


@dataclass
class Finding:
    ok: bool
    text: str
    warning: bool = False  # nothing fails, but somebody should know


@dataclass
class Node:
    """What one node has, as it reports itself."""

    host: str
    address: str
    gpus: list[float]  # bytes of memory of each GPU
    memory: float  # free bytes
    cores: int
    findings: list[Finding] = field(default_factory=list)
    skew_s: float = 0.0
    disk_mb_s: float = 0.0  # at which the run's directory is written; 0: not measured
    facts: dict[str, str] = field(default_factory=dict)  # see differences.py


def run_folder(config: Config) -> Path:
    """Return the directory that holds the run's directory, or will."""
    folder = Path(config.run_dir or "runs").expanduser().absolute()
    while not folder.is_dir():
        folder = folder.parent
    return folder


def under_torchrun(config: Config, here: Node, rank: int, size: int) -> list[Node]:
    """Let this host and those of torchrun's other ranks `meet`."""
    from torch.distributed import TCPStore

    from asyncspec.launch import torchrun

    master, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(master, port, is_master=False, timeout=timedelta(seconds=MEETING_S))
    here.address = torchrun.address(store, "doctor/own/".__add__, rank, size)
    return meet(config, here, rank, size, store)


def meet(config: Config, here: Node, rank: int, size: int, store) -> list[Node]:
    """Check what works between nodes. Returns what each node reports on rank 0, and nothing on other ranks.

    Args:
        here: this node, with its address.
        store: a TCPStore that all nodes reach.
    """
    here.facts = facts(config, here.address)
    listener = listening(here.address)
    store.set(f"doctor/address/{rank}", url(here.address, listener.getsockname()[1]))
    for other in range(size):
        host, other_port = host_and_port(store.get(f"doctor/address/{other}").decode())
        try:
            socket.create_connection((host, other_port), timeout=5).close()
        except OSError as error:
            here.findings.append(
                Finding(
                    False,
                    f"cannot reach node {other} at {host}: {error}; all nodes must reach each other on these ports",
                )
            )
    here.findings.append(_same_files(config, store, rank, size))
    if rank:
        here.skew_s = _skew(store, rank)
    else:
        _tell_time(store, size)
    store.set(f"doctor/node/{rank}", msgspec.json.encode(here))
    numbers = range(size) if rank == 0 else ()
    said = [msgspec.json.decode(store.get(f"doctor/node/{other}"), type=Node) for other in numbers]
    store.set(f"doctor/done/{rank}", "")
    for other in range(size):  # no listener closes before all nodes have tried it
        store.get(f"doctor/done/{other}")
    listener.close()
    return said


def _same_files(config: Config, store, rank: int, size: int) -> Finding:
    """Check that all nodes see the directory that runs are written to: keys, checkpoints and logs go there."""
    folder = run_folder(config)
    if rank == 0:
        file = folder / f".doctor-{uuid.uuid4().hex}"
        try:
            file.write_text("doctor")
        except OSError as error:
            file, problem = folder, error.strerror
        store.set("doctor/file", str(file))
        for other in range(1, size):
            store.get(f"doctor/seen/{other}")
        if file == folder:
            return Finding(False, f"{folder}: {problem}; expected a directory to write to")
        file.unlink()
        return Finding(True, f"{folder} is writable")
    file = Path(store.get("doctor/file").decode())
    seen = file.exists()
    store.set(f"doctor/seen/{rank}", "")
    return Finding(
        seen,
        f"{file.parent} is {'the same' if seen else 'not the same'} as on node 0"
        + ("" if seen else "; expected a shared file system"),
    )


def _skew(store, rank: int) -> float:
    """Return the seconds that this host's clock is ahead of node 0's, from the round trip with the least delay."""
    found = []
    for i in range(ROUND_TRIPS):
        sent = time.time()
        store.set(f"doctor/ask/{rank}/{i}", "")
        told = float(store.get(f"doctor/time/{rank}/{i}"))
        back = time.time()
        found.append((back - sent, (sent + back) / 2 - told))
    return min(found)[1]


def _tell_time(store, size: int) -> None:
    for other in range(1, size):
        for i in range(ROUND_TRIPS):
            store.get(f"doctor/ask/{other}/{i}")
            store.set(f"doctor/time/{other}/{i}", repr(time.time()))
