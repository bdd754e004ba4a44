"""Runs a job on one host or several under Ray, with one Ray actor, a process of its own, for each actor.

Each node of `deployment.nodes` is one bundle of a placement group, on a host of its own; without nodes all actors are
in one bundle. Ray places and starts the processes and carries their results, which also show a death at once. asyncspec
itself replaces dead actors: Ray restarts nothing. The actors do not know Ray: `_Host` is the only Ray actor and plays
whatever role it is given.

With GPUs, a bundle has one GPU for each actor that computes there, or all GPUs of a host if those are fewer. Each actor
has a GPU or a share of one. Two actors of one role share a GPU only if there are too few. Ray shows an actor no other.
An actor that was lost too often on its GPU moves to one outside the group, if the cluster has one that is free.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from asyncspec.actors.base import ActorSpec, first_name, redirect_output
from asyncspec.actors.crew import actor_names, computing
from asyncspec.config import Config, fetch_all, from_yaml, topology
from asyncspec.deadlines import ANSWER_S, PLACED_S
from asyncspec.errors import ConfigError, UserError, first_line
from asyncspec.launch import attempts, ending, roles
from asyncspec.launch.interrupt import InterruptFlag

# By default Ray sets aside a third of the memory for objects, but a run's largest object is an exit code. Ray reads the
# variable on import.
os.environ.setdefault("RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES", str(100 << 20))

try:
    import ray
    from ray.exceptions import RayActorError, RayTaskError
    from ray.util.placement_group import placement_group_table
except ModuleNotFoundError as error:
    if error.name != "ray":
        raise
    raise UserError('--launcher ray: ray is not installed; expected pip install -e ".[ray]"') from None

from asyncspec.launch import ray_group

SHARES = 10_000  # Ray divides a GPU no more finely than this
MOST_HALVED = 8  # actors per GPU; if there are more, each asks for the same share
CONSOLE = "console"  # the log that holds what the controller prints, on whichever host it runs


class _Host:
    """Plays one role in its process, in the process's main thread: Ray's health checks have threads of their own."""

    def here(self) -> None:
        """Answer: the process is alive."""

    def warm(self, modules: list[str]) -> None:
        """Load the libraries of the run's roles before there is a role to play."""
        roles.warm(modules)

    def prepare(self, spec: dict, directory: str) -> tuple[int, str, str]:
        """Make the actor. Returns the process id, the Ray node, and the controller's address ("" for other roles).

        Args:
            directory: the directory that paths in the configuration are relative to.
        """
        os.chdir(directory)
        fetch_all(from_yaml(spec["config_yaml"]))  # this host may have come later
        if spec["role"] == "controller":
            redirect_output(ActorSpec(**spec | {"name": CONSOLE}))
        self.actor = roles.make(roles.at_host(ActorSpec(**spec), ray.util.get_node_ip_address()))
        return os.getpid(), ray.get_runtime_context().get_node_id(), getattr(self.actor, "address", "")

    def run(self) -> int:
        return roles.play(self.actor)


def launch(config: Config, resume: bool = False) -> int:
    """Run the job on a Ray cluster, or on one started for it on this host. Returns the exit code, see attempts.run.

    Args:
        resume: continue the run in config.run_dir.
    """
    if os.environ.get("RAY_ADDRESS", "").startswith("ray://"):
        raise UserError(
            f"RAY_ADDRESS={os.environ['RAY_ADDRESS']!r}: a Ray client cannot reach the actors; expected host:port of "
            f"the cluster's head, and this command to run on one of the cluster's nodes"
        )
    try:
        return attempts.run(config, resume, lambda interrupt: _Pool(config, interrupt), local=False)
    finally:
        ray.shutdown()  # also ends a cluster that was started for this run


class _Pool(attempts.Pool):
    """Ray actors in a placement group."""

    def __init__(self, config: Config, interrupt: InterruptFlag) -> None:
        """Connect to Ray and reserve what the run needs.

        Raises:
            UserError: Ray cannot be reached, or has no room.
            KeyboardInterrupt: the user interrupted the wait.
        """
        super().__init__()
        connect(Path(config.run_dir).name)
        interrupt.arm()  # Ray has replaced the handler of SIGTERM
        names = {"controller": "controller", **actor_names(config)}
        placed = (
            topology.assign(topology.parse(config.deployment.nodes), names)
            if config.deployment.nodes
            else [list(names)]
        )
        self._node = {name: node for node, here in enumerate(placed) for name in here}
        on_devices = [computing(config, {name: names[name] for name in here}) for here in placed]
        bundles = _bundles(config.deployment.device, [len(here) for here in on_devices])
        self._gpus = [bundle.get("GPU", 0) for bundle in bundles]
        self._share = {
            name: share
            for here, gpus in zip(on_devices, self._gpus)
            for name, share in zip(here, _shares([names[name] for name in here], gpus))
        }
        self._group = ray_group.reserve(config, bundles, interrupt)
        ray_group.download(config, self._group, len(bundles), interrupt)
        self._here = ray.get_runtime_context().get_node_id()
        self._alone = len(placed) == 1 and placement_group_table(self._group)["bundles_to_node_id"][0] == self._here
        self._host = "127.0.0.1" if self._alone else "auto"  # "auto": each process puts in its node's address
        self._processes: list[_Process] = []
        self._moved: dict[str, str] = {}  # first name of an actor -> the Ray node that it has moved to
        self._spares: list[list[_Process]] = [[] for _ in bundles]  # by node
        self._libraries: list[str] = []  # what a spare loads
        self._asked: dict[int, list] = {}  # by node: one reference for each process, ready once the process is up
        self._interrupt = interrupt
        self._console = _Console(Path(config.run_dir) / "logs" / f"{CONSOLE}.log")

    def specs(self, config: Config, version: int) -> list[ActorSpec]:
        found = []
        for node, gpus in enumerate(self._gpus):
            device = "cuda:0" if gpus else "cpu"
            found += roles.specs(
                config,
                version,
                node if config.deployment.nodes else None,
                self._host,
                lambda wanted, played: [device] * len(played),
            )
        self._libraries = roles.libraries(config, found)
        return found

    def elsewhere(self, spec: ActorSpec) -> str:
        name = first_name(spec.name)
        if self._share.get(name, 0) and (node := ray_group.with_free_gpu(self._here if self._alone else None)):
            self._moved[name] = node
        return spec.device  # Ray shows it its GPU under the same name

    def make(self, name: str) -> _Process:
        place = self._node[name]
        if name in self._moved:
            return self._make(place, name)
        waiting = self._spares[place]
        while waiting:
            if (process := waiting.pop(0)).alive():
                return process
        return self._make(place, name)

    def keep_spares(self, names: list[str], count: int) -> None:
        """Start spares, at most one on each node at a time. A spare loads the libraries of all roles."""
        for place in {self._node[first_name(name)] for name in names}:
            # With GPUs, a spare would hold a share of a GPU that it does not use.
            if len(self._spares[place]) < count and not self._gpus[place]:
                self._spares[place].append(self._make(place))
                self._spares[place][-1].warm(self._libraries)

    def _make(self, place: int, name: str = "") -> _Process:
        """Start a process on a node.

        Args:
            name: the first name of the actor that it is for; "": it is a spare.
        """
        moved = self._moved.get(name)
        host = _ask(
            _Host,
            ray_group.on(moved) if moved else ray_group.within(self._group, place),
            1 if moved else self._share.get(name, 0),
            self._asked.setdefault(place, []),
            lambda: bool(self._interrupt.count),
        )
        self._processes.append(_Process(host, self._here))
        return self._processes[-1]

    def wait(self, timeout_s: float) -> None:
        self._console.show()
        if running := [process.running for process in self._processes if process.running is not None]:
            ray.wait(running, timeout=timeout_s)
        else:
            time.sleep(timeout_s)

    def stop(self) -> None:
        self._console.show()
        for process in self._processes:
            process.kill()


class _Process(attempts.Process):
    def __init__(self, host, here: str) -> None:
        """
        Args:
            here: the launcher's own Ray node.
        """
        self._host, self._here, self._preparing, self.running = host, here, None, None
        self._prepared: tuple[int, str, str] | Exception | None = None
        self._ended = False  # once it is True, another process may have the process id

    def warm(self, modules: list[str]) -> None:
        """Load the libraries of the run's roles before there is a role to play. Does not wait."""
        self._host.warm.remote(modules)

    def play(self, spec: ActorSpec) -> None:
        self._prepared, self._preparing = None, self._host.prepare.remote(msgspec.structs.asdict(spec), os.getcwd())
        self.running = self._host.run.remote()  # after `prepare`: a Ray actor runs one call at a time

    def prepared(self) -> str | Exception | None:
        if self._prepared is None:
            self._prepared = _outcome(self._preparing)
        return self._prepared[2] if isinstance(self._prepared, tuple) else self._prepared

    def result(self) -> int | Exception | None:
        self.prepared()  # learns the process id
        if (outcome := _outcome(self.running)) is not None:
            self.running, self._ended = None, isinstance(outcome, attempts.Ended)
        return outcome

    def alive(self) -> bool:
        answer = self._host.here.remote()
        ray.wait([answer], timeout=ANSWER_S)
        return _outcome(answer) is None  # no answer is no death: a spare may be busy loading

    def kill(self) -> None:
        pid, node, _ = self._prepared if isinstance(self._prepared, tuple) else (0, "", "")
        if node == self._here and not self._ended:
            descriptor = ending.pidfd(pid)  # Ray alone would wait seconds for a frozen process to end by itself
            ending.end(descriptor, told=self.running is not None)
            os.close(descriptor)
        ray.kill(self._host)


class _Console:
    """Prints what the controller writes to a file from now on: it may be on another host, and Ray takes its output."""

    def __init__(self, path: Path) -> None:
        self._path, self._shown = path, path.stat().st_size if path.exists() else 0

    def show(self) -> None:
        if not self._path.exists() or self._path.stat().st_size == self._shown:
            return
        with open(self._path, "rb") as file:
            file.seek(self._shown)
            new = file.read()
        self._shown += len(new)
        print(new.decode(errors="replace"), end="", flush=True)


def _outcome(reference) -> object:
    """Return what a result holds: None if nothing yet, else its value or the exception that was raised instead."""
    if reference is None or not ray.wait([reference], timeout=0)[0]:
        return None
    try:
        return ray.get(reference)
    except RayActorError:
        return attempts.Ended("its process ended")
    except RayTaskError as error:
        return error.cause
    except Exception as error:
        return error


def connect(namespace: str) -> None:
    """Join the cluster of RAY_ADDRESS, or the one that `ray start` has made on this host. Without either, start a
    cluster that lives as long as this process.
    """
    # Ray prints a page for each death and each lost node, even with log_to_driver=False. asyncspec prints one line
    # instead; Ray's own logs keep the page.
    ray._private.worker.print_to_stdstream = lambda *args, **kwargs: None
    try:
        ray.init(namespace=namespace, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        where, files = os.environ.get("RAY_ADDRESS", ""), os.environ.get("TMPDIR", "")
        if isinstance(error, OSError) and not isinstance(error, ConnectionError):  # its sockets and logs
            raise UserError(f"TMPDIR={files!r}: {first_line(error)}; nearest valid choice: RAY_TMPDIR=/tmp") from None
        raise UserError(
            f"RAY_ADDRESS={where!r}: {first_line(error)}; expected the address of a Ray cluster, or no RAY_ADDRESS to "
            f"start one"
        ) from None


def _bundles(device: str, counts: list[int]) -> list[dict[str, int]]:
    """Return what to ask Ray for on each node: a CPU and a GPU for each of the `counts` actors that compute there, as
    far as the cluster has them.

    Raises:
        UserError: deployment.device=cuda, and the cluster has no GPU.
    """
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    # Of the nodes that have most of a resource, as many as are needed, the last one sets the limit.
    most = {
        what: int(sorted((node.get(what, 0) for node in alive), reverse=True)[: len(counts)][-1])
        for what in ("CPU", "GPU")
    }
    if device == "cuda" and not most["GPU"]:
        raise ConfigError(
            f"deployment.device='cuda': expected GPUs, {ray_group.has()}; nearest valid choice: deployment.device=cpu"
        )
    gpus = 0 if device == "cpu" else most["GPU"]
    return [
        {"CPU": max(1, min(count, most["CPU"]))} | ({"GPU": min(count, gpus)} if min(count, gpus) else {})
        for count in counts
    ]


def _shares(played: Sequence[str], gpus: int) -> list[float]:
    """Return the share of a GPU that each of these actors asks for. Ray fills a GPU with shares in the order of the
    requests, as long as they fit. So each actor but a GPU's last asks for more than half of what is left on its GPU:
    two actors dealt out in the same turn then do not fit on one GPU.

    Args:
        played: the role of each actor.
    """
    if not gpus:
        return [0.0] * len(played)
    if len(played) > MOST_HALVED * gpus:
        return [SHARES // -(-len(played) // gpus) / SHARES] * len(played)
    dealt, left = topology.deal(played, gpus), dict.fromkeys(range(gpus), SHARES)
    last = {gpu: i for i, gpu in enumerate(dealt)}
    shares = []
    for i, gpu in enumerate(dealt):
        shares.append(left[gpu] if i == last[gpu] else left[gpu] // 2 + 1)
        left[gpu] -= shares[-1]
    return [share / SHARES for share in shares]


def _ask(actor: type, where, share: float, asked: list, stop: Callable[[], bool]):
    """Start a process on a node. Returns its handle. If the process shares a GPU, wait for the node's earlier
    processes, and for this one: Ray serves concurrent requests in any order.

    Args:
        where: the node, as a scheduling strategy of Ray.
        share: the share of a GPU that the process asks for.
        asked: references, ready once a process is up, of the node's processes not yet waited for; one is added.
        stop: callable() -> whether to stop waiting.
    """
    shares = 0 < share < 1
    if shares:
        _await(asked, stop)
    # The bundle has the CPUs. A process that asks for none gets one thread; actors ask torch for theirs.
    host = (
        ray.remote(actor)
        .options(
            num_cpus=0,
            num_gpus=share,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=where,
        )
        .remote()
    )
    asked.append(host.__ray_ready__.remote())
    if shares:
        _await(asked, stop)
    return host


def _await(asked: list, stop: Callable[[], bool]) -> None:
    """Wait until these processes are up, at most PLACED_S. A process without room shows later: it does not come up."""
    deadline = time.monotonic() + PLACED_S
    while asked and not stop() and time.monotonic() < deadline:
        _, asked[:] = ray.wait(asked, num_returns=len(asked), timeout=0.2)
    asked.clear()
