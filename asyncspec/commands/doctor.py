"""`asyncspec doctor`: shows what would run where, and checks whether it can, before a GPU hour is spent.

By itself it checks this host. Under torchrun, with one rank on each node, and on a Ray cluster, every node checks
itself. The nodes together check whether they reach each other and see the same files, how far apart their clocks are,
and in what they differ.
"""

from __future__ import annotations

import os
import shutil

from asyncspec.actors.crew import actor_names
from asyncspec.commands import differences, meeting
from asyncspec.commands.meeting import Finding, Node, run_folder
from asyncspec.commands.placement import judge
from asyncspec.commands.this_host import check_this_host
from asyncspec.config import Config, resolve_path, topology, work
from asyncspec.errors import ConfigError, first_line
from asyncspec.models import sizes
from asyncspec.models.shape import PolicyShape
from asyncspec.wire.addresses import use_ports

# (ok, warning) of a finding -> what stands before it, and its color
_MARKS = {(True, False): ("ok  ", "green"), (True, True): ("note", "yellow"), (False, False): ("WRONG", "red")}


def examine(config: Config, launcher: str, wrong: str = "") -> int:
    """Run the checks, print the findings, and return 0 if all checks passed, else 1.

    Args:
        launcher: ray: check the nodes of a Ray cluster; else those of torchrun, or this host.
        wrong: what this node lacks, in a line.

    Raises:
        ConfigError: torchrun's number of ranks is not the number of nodes.
        UserError: there is no Ray cluster.
    """
    use_ports(config.deployment.ports)
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    names = {"controller": "controller", **actor_names(config)}
    nodes = topology.parse(config.deployment.nodes) if config.deployment.nodes else None
    placed = [list(names)] if nodes is None else topology.assign(nodes, names)
    if size > 1 and size != len(placed):
        raise ConfigError(
            f"deployment.nodes={config.deployment.nodes!r}: names {len(placed)} nodes; expected one for each of "
            f"torchrun's {size} ranks; nearest valid choice: torchrun --nnodes {len(placed)} --nproc-per-node 1"
        )
    if launcher == "ray":
        from asyncspec.commands import on_ray

        return _report(config, placed, names, on_ray.everyone(config), on_ray=True)
    here = check_this_host(config)
    here.findings += [Finding(False, wrong)] if wrong else []
    if size == 1:
        return _report(config, placed, names, [here])
    try:
        everyone = meeting.under_torchrun(config, here, rank, size)
    except RuntimeError as error:  # of torch's store: a node has not come
        here.findings.append(Finding(False, f"not all of {size} nodes came to the meeting: {first_line(error)}"))
        everyone = [here]
    return _report(config, placed, names, everyone) if rank == 0 else int(not all(f.ok for f in here.findings))


def _has(node: Node) -> str:
    """Say what a node computes on."""
    if node.gpus:
        return f"{len(node.gpus)} GPUs of {min(node.gpus) / 1e9:.0f} GB"
    return f"{node.cores} cores, {node.memory / 1e9:.0f} GB free"


def _differences(console, nodes: list[Node]) -> list[Finding]:
    """Print in what nodes differ; return what of that is wrong."""
    from rich.table import Table

    if len(nodes) < 2:
        return []
    found = differences.differing([node.facts for node in nodes])
    if not found:
        return [Finding(True, f"{len(nodes)} nodes have the same versions, files, limits and variables")]
    table = Table("what differs", "value", "nodes", title="nodes differ in", title_justify="left")
    for name, by_value in found.items():
        for value, having in sorted(by_value.items(), key=lambda item: -len(item[1])):
            table.add_row(name, value, differences.numbers(having))
            name = ""
    console.print(table)
    return [
        Finding(False, f"{name} differs between nodes; expected the same on all of them")
        for name in found
        if name in differences.EQUAL
    ]


def _report(
    config: Config, placed: list[list[str]], names: dict[str, str], nodes: list[Node], on_ray: bool = False
) -> int:
    from rich.table import Table
    from rich.text import Text

    from asyncspec.console import terminal

    policy = PolicyShape.from_hf(resolve_path(config.model.path), config.model.backend).to_hf()
    judged = judge(config, policy, placed, names, nodes)
    spares = nodes[len(placed) :]
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
        has = "not checked" if node is None else _has(node)
        table.add_row(
            str(index), node.host if node else "?", has, plays, needs, f"{1e3 * node.skew_s:+.1f} ms" if node else "?"
        )
    for index, node in enumerate(spares, start=len(placed)):
        table.add_row(str(index), node.host, _has(node), "nothing", "", f"{1e3 * node.skew_s:+.1f} ms")
    console.print(table)
    findings = [(f"node {i}: " if len(nodes) > 1 else "", f) for i, node in enumerate(nodes) for f in node.findings]
    findings += [("", finding) for finding in _differences(console, nodes)]
    if speeds := [node.disk_mb_s for node in nodes if node.disk_mb_s]:
        config.deployment.disk_mb_s = config.deployment.disk_mb_s or min(speeds)
        written = " to ".join(dict.fromkeys(f"{speed:.0f}" for speed in (min(speeds), max(speeds))))
        findings.append(("", Finding(True, f"{run_folder(config)} is written at {written} MB/s; {work.told(config)}")))
    findings += [("", finding) for _, _, found in judged for finding in found]
    shown = set()
    for where, finding in sorted(findings, key=lambda item: (not item[1].ok, item[1].warning)):
        if not finding.ok or finding.text not in shown:  # what several nodes report is printed once
            console.print(
                Text(*_MARKS[finding.ok, finding.warning]),
                finding.text if finding.ok else f"{where}{finding.text}",
                soft_wrap=True,
            )
        shown.add(finding.text)
    if (on_ray or len(nodes) > 1) and len(nodes) < len(placed):
        findings.append(("", Finding(False, f"{len(nodes)} nodes; expected {len(placed)}, as in deployment.nodes")))
        console.print(Text(*_MARKS[False, False]), findings[-1][1].text)
    elif len(nodes) < len(placed):
        console.print(
            f"checked this host only; to check all nodes: torchrun --nnodes {len(placed)} --nproc-per-node 1 "
            f"--no-python asyncspec doctor ...",
            soft_wrap=True,
        )
    bad = sum(not finding.ok for _, finding in findings)
    console.print(f"{bad} of {len(findings)} checks failed" if bad else "all checks passed")
    return int(bool(bad))
