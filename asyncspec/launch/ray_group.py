"""Prepares the nodes of a Ray cluster for a run: reserves room on them, and has them download what is on a hub."""

from __future__ import annotations

import os
import time

import ray
from ray.exceptions import RayTaskError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from asyncspec.config import Config, fetch_all, from_yaml, hub_names, to_yaml
from asyncspec.deadlines import DOWNLOAD_S
from asyncspec.errors import ConfigError, UserError, first_line
from asyncspec.launch.interrupt import InterruptFlag


def reserve(config: Config, bundles: list[dict[str, int]], interrupt: InterruptFlag):
    """Reserve a placement group of these bundles.

    Raises:
        UserError: Ray had no room for it in time.
        KeyboardInterrupt: the user interrupted the wait.
    """
    group = placement_group(bundles, strategy="STRICT_SPREAD" if len(bundles) > 1 else "PACK")
    deadline = time.monotonic() + config.deployment.start_timeout_s
    while not group.wait(0.5):
        if interrupt.count:
            raise KeyboardInterrupt
        if time.monotonic() > deadline:
            asked = ", ".join(
                f"{bundles.count(bundle)} with {_resources(bundle)}"
                for bundle in {str(each): each for each in bundles}.values()
            )
            raise ConfigError(
                f"deployment.nodes={config.deployment.nodes!r}: Ray found no room within "
                f"{config.deployment.start_timeout_s:.0f} s (deployment.start_timeout_s); asked for {len(bundles)} "
                f"nodes, {asked}; {has()}"
            )
    return group


def within(group, node: int) -> PlacementGroupSchedulingStrategy:
    """Return where a process is to be: on one node of a placement group."""
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)


def on(node: str) -> NodeAffinitySchedulingStrategy:
    """Return where a process is to be: on a node of the cluster, by its id, and outside every placement group."""
    return NodeAffinitySchedulingStrategy(node, soft=False)


def with_free_gpu(only: str | None = None) -> str:
    """Return the id of a node that has a GPU which nobody has reserved, "" if there is none.

    Args:
        only: the one node to look at; None: all nodes.
    """
    free = ray._private.state.available_resources_per_node()
    found = {node: resources.get("GPU", 0) for node, resources in free.items() if only in (None, node)}
    best = max(found, key=found.get, default="")
    return best if found.get(best, 0) >= 1 else ""


def download(config: Config, group, nodes: int, interrupt: InterruptFlag) -> None:
    """Download what a run names on a hub into the cache of each of its nodes. Only then are its actors made.

    Args:
        group: the placement group, with one bundle for each node.

    Raises:
        UserError: a node cannot download it.
        KeyboardInterrupt: the user interrupted the wait.
    """
    if not hub_names(config):
        return
    waiting = [
        ray.remote(_download)
        .options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=within(group, node),
        )
        .remote(to_yaml(config), os.getcwd())
        for node in range(nodes)
    ]
    deadline = time.monotonic() + DOWNLOAD_S
    while waiting:
        if interrupt.count:
            raise KeyboardInterrupt
        done, waiting = ray.wait(waiting, timeout=0.5)
        try:
            ray.get(done)
        except Exception as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            raise UserError(f"a node of the Ray cluster: {first_line(cause)}") from None
        if time.monotonic() > deadline:
            raise UserError(f"a node of the Ray cluster: has not downloaded the model within {DOWNLOAD_S:.0f} s")


def _download(text: str, directory: str) -> None:
    """Download what a configuration, as YAML, names on a hub.

    Args:
        directory: the directory that paths in the configuration are relative to.
    """
    os.chdir(directory)
    fetch_all(from_yaml(text))


def has() -> str:
    """Describe what the cluster has, for an error message."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    has = ", ".join(f"{node['NodeManagerAddress']} with {_resources(node['Resources'])}" for node in alive)
    return f"the cluster has {len(alive)}: {has}; free: {_resources(ray.available_resources())}"


def _resources(amounts: dict[str, float]) -> str:
    return " and ".join(f"{amounts.get(what, 0):g} {what}" for what in ("CPU", "GPU") if what in amounts) or "0 CPU"
