"""Judges where actors are placed: what each node's fullest device needs, and what is wrong with that."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from asyncspec.actors.broadcasts import broadcast_backend
from asyncspec.actors.crew import computing
from asyncspec.commands.meeting import Finding, Node
from asyncspec.config import Config, topology, work
from asyncspec.launch import estimate
from asyncspec.launch.pass_memory import bytes_of

MOST_SKEW_S = 60.0  # of wall clocks; the timeline measures and corrects its own, but file times and logs do not
HEADROOM = 1.15  # of what is needed that must be there: allocators keep freed memory
SMALL = 1e9  # bytes of a version that host memory may carry without a warning


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
    smallest = math.inf  # bytes of the smallest GPU that generates, as far as that is known
    for index, here in enumerate(placed):
        known = nodes[index] if index < len(nodes) else None
        on_devices = computing(config, {name: names[name] for name in here})
        on_cpu = (
            config.deployment.device == "cpu" or config.trainer.kind == "mock" or (known is not None and not known.gpus)
        )
        held = {name: estimate.of_actor(config, policy, names[name], on_cpu) for name in here}
        needs = {name: sum(parts.values()) for name, parts in held.items()}
        if on_cpu:
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
        if room is not None and not on_cpu and "generator" in map(names.get, here):
            smallest = min(room, smallest)
        if room is not None and HEADROOM * needed > room:
            fullest = max(here if on_cpu else fullest_gpu, key=needs.get)
            parts = held[fullest]
            findings.append(
                Finding(
                    False,
                    f"node {index}: needs about {needed / 1e9:.1f} GB of {where}, and {HEADROOM - 1:.0%} more for what "
                    f"allocators keep; has {room / 1e9:.1f}; the largest actor is {fullest}: "
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
        result.append((summary(here), f"{needed / 1e9:.1f} GB of {where}", findings))
    if smallest < math.inf and config.engine.kind == "vllm":
        result[0][2].append(_cache(config, policy, smallest))
    if where_dealt and len(nodes) == len(placed):
        result[0][2].extend(_broadcasts(config, policy, names, where_dealt))
    return result


def _cache(config: Config, policy: dict, room: float) -> Finding:
    """Compare the positions that fit into the KV cache of a generator with vLLM with those that its slots may need."""
    positions = int(estimate.vllm_positions(config, policy, room))
    longest, slots = config.engine.max_prompt_tokens + config.sampling.max_response_tokens, config.engine.slots
    told = (
        f"a generator's KV cache has room for some {positions:,} positions, {positions // slots:,} for each of "
        f"engine.slots={slots}; a sequence may have {longest:,}"
    )
    fitting = max(1, 2 * positions // longest)
    if fitting >= slots:
        return Finding(True, told)
    return Finding(
        True,
        f"{told}. If sequences are half as long, {fitting} fit; vLLM computes those again that it has no room for",
        warning=True,
    )


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


def _broadcasts(config: Config, policy: dict, names: dict[str, str], devices: dict[str, str]) -> list[Finding]:
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
        size = bytes_of(config) * work.trained(config, policy) if kind == "policy" else 0.0
        slow = not nccl and size > SMALL
        why += f", {size / 1e9:.1f} GB for each version; expected a GPU for each of them alone" if slow else ""
        findings.append(Finding(True, f"{kind} weights travel over {'NCCL' if nccl else 'gloo'}{why}", warning=slow))
    return findings


def summary(names: list[str]) -> str:
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
