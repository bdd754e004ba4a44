"""Several hosts or one, started and watched by Ray: one Ray actor, a process of its own, for each actor.

Each node of `deployment.nodes` is one bundle of a placement group, on a host of its own; without nodes all actors are
in one bundle. Ray places and starts the processes and carries their results, in which a death shows at once. Replacing
the dead is asyncspec's own doing: Ray restarts nothing. The actors do not know Ray; `_Host` is the only Ray actor and
plays whatever role it is given.

With GPUs a bundle has as many as actors compute there, or as many as there are, and each actor a GPU or a share of one,
such that no two of one role have the same while there are enough; Ray shows it no other.
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
from asyncspec.config import Config, topology
from asyncspec.deadlines import ANSWER_S, PLACED_S
from asyncspec.errors import ConfigError, UserError, first_line
from asyncspec.launch import attempts, ending, roles
from asyncspec.launch.interrupt import InterruptFlag

# No object of a run is larger than an exit code; Ray would set a third of the memory aside. It reads this when it is
# imported.
os.environ.setdefault("RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES", str(100 << 20))

try:
    import ray
    from ray.exceptions import RayActorError, RayTaskError
    from ray.util.placement_group import placement_group, placement_group_table
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ModuleNotFoundError as error:
    if error.name != "ray":
        raise
    raise UserError('--launcher ray: ray is not installed; expected pip install -e ".[ray]"') from None


SHARES = 10_000  # of a GPU, as finely as Ray divides one
MOST_HALVED = 8  # actors on a GPU; of more each asks for the same
CONSOLE = "console"  # the log that holds what the controller prints, wherever it is


class _Host:
    """Plays one role in its process, in the process's main thread: Ray's health checks have threads of their own."""

    def here(self) -> None:
        """Answer."""

    def warm(self, modules: list[str]) -> None:
        """Load what the roles of the run need, before there is one to play."""
        roles.warm(modules)

    def prepare(self, spec: dict, directory: str) -> tuple[int, str, str]:
        """Make the actor; returns the process id, the Ray node, and the controller's address if it is the controller.

        Args:
            directory: what paths in the configuration are relative to.
        """
        os.chdir(directory)
        if spec["role"] == "controller":
            redirect_output(ActorSpec(**spec | {"name": CONSOLE}))
        self.actor = roles.make(roles.at_host(ActorSpec(**spec), ray.util.get_node_ip_address()))
        return os.getpid(), ray.get_runtime_context().get_node_id(), getattr(self.actor, "address", "")

    def run(self) -> int:
        return self.actor.run()


def launch(config: Config, resume: bool = False) -> int:
    """Run the job on a Ray cluster, or on one started for it on this host; returns the exit code, see attempts.run.

    Args:
        resume: go on with the run that config.run_dir holds.
    """
    if os.environ.get("RAY_ADDRESS", "").startswith("ray://"):
        raise UserError(
            f"RAY_ADDRESS={os.environ['RAY_ADDRESS']!r}: a Ray client cannot reach the actors; expected host:port of "
            f"the cluster's head, "
            "on one of its nodes"
        )
    try:
        return attempts.run(config, resume, lambda interrupt: _Pool(config, interrupt), local=False)
    finally:
        ray.shutdown()  # also a cluster that was started for this run


class _Pool(attempts.Pool):
    """Ray actors in a placement group."""

    def __init__(self, config: Config, interrupt: InterruptFlag) -> None:
        """Connects to Ray and reserves what the run needs.

        Raises:
            UserError: Ray cannot be reached, or has no room.
            KeyboardInterrupt: somebody does not want to wait for that.
        """
        super().__init__()
        _connect(Path(config.run_dir).name)
        interrupt.arm()  # Ray has taken SIGTERM
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
        self._group = _reserve(config, bundles, interrupt)
        self._here = ray.get_runtime_context().get_node_id()
        alone = len(placed) == 1 and placement_group_table(self._group)["bundles_to_node_id"][0] == self._here
        self._host = "127.0.0.1" if alone else "auto"  # which each process replaces by its node's address
        self._processes: list[_Process] = []
        self._spares: list[list[_Process]] = [[] for _ in bundles]  # by node
        self._libraries: list[str] = []  # that a spare loads
        self._asked: dict[int, list] = {}  # by node: what says of each process that it is there
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

    def make(self, name: str) -> _Process:
        place = self._node[name]
        waiting = self._spares[place]
        while waiting:
            if (process := waiting.pop(0)).alive():
                return process
        return self._make(place, name)

    def keep_spares(self, names: list[str], count: int) -> None:
        """Spares have all libraries loaded; starts one at a time on each node."""
        for place in {self._node[first_name(name)] for name in names}:
            # With GPUs a spare would need a share of one that it does not use.
            if len(self._spares[place]) < count and not self._gpus[place]:
                self._spares[place].append(self._make(place))
                self._spares[place][-1].warm(self._libraries)

    def _make(self, place: int, name: str = "") -> _Process:
        """
        Args:
            name: the first name of the actor it is for; "": of a spare.
        """
        host = _ask(
            _Host,
            self._group,
            place,
            self._share.get(name, 0),
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
        self._ended = False  # and its process id may be another's

    def warm(self, modules: list[str]) -> None:
        """Load what the roles of the run need, before there is one to play; does not wait."""
        self._host.warm.remote(modules)

    def play(self, spec: ActorSpec) -> None:
        self._prepared, self._preparing = None, self._host.prepare.remote(msgspec.structs.asdict(spec), os.getcwd())
        self.running = self._host.run.remote()  # in turn: a Ray actor does one thing at a time

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
        return _outcome(answer) is None  # a spare may be busy with loading

    def kill(self) -> None:
        pid, node, _ = self._prepared if isinstance(self._prepared, tuple) else (0, "", "")
        if node == self._here and not self._ended:
            descriptor = ending.pidfd(pid)  # Ray gives a frozen process seconds to end by itself
            ending.end(descriptor, told=self.running is not None)
            os.close(descriptor)
        ray.kill(self._host)


class _Console:
    """Prints what is written to a file from now on. The controller's process may be on another host, and its output is
    Ray's.
    """

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
    """What a result holds: None if nothing yet, its value, or the exception that came instead of one."""
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


def _connect(namespace: str) -> None:
    """Join the cluster of RAY_ADDRESS or that `ray start` has made on this host; without either start one, as long as
    this process lives.
    """
    # Of each death and each lost node Ray prints a page, log_to_driver or not. They are said in a line here; its own
    # logs have the page.
    ray._private.worker.print_to_stdstream = lambda *args, **kwargs: None
    try:
        ray.init(namespace=namespace, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = os.environ.get("RAY_ADDRESS", "")
        raise UserError(
            f"RAY_ADDRESS={where!r}: {first_line(error)}; expected the address of a Ray cluster, or none to start one"
        ) from None


def _bundles(device: str, counts: list[int]) -> list[dict[str, int]]:
    """What to ask Ray for on each node, for so many actors that compute there: of those that the cluster has, one each
    of CPUs and GPUs.

    Raises:
        UserError: GPUs are wanted and there are none.
    """
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    # The nodes that have most of it are taken, and of those the one that has least counts.
    most = {
        what: int(sorted((node.get(what, 0) for node in alive), reverse=True)[: len(counts)][-1])
        for what in ("CPU", "GPU")
    }
    if device == "cuda" and not most["GPU"]:
        raise ConfigError(
            f"deployment.device='cuda': expected GPUs, {_has()}; nearest valid choice: deployment.device=cpu"
        )
    gpus = 0 if device == "cpu" else most["GPU"]
    return [
        {"CPU": max(1, min(count, most["CPU"]))} | ({"GPU": min(count, gpus)} if min(count, gpus) else {})
        for count in counts
    ]


def _shares(played: Sequence[str], gpus: int) -> list[float]:
    """What each of these actors asks for of a GPU. Ray puts shares together as long as they fit, in the order in which
    it is asked; so each but a GPU's last asks for more than half of what is left there: two that were dealt out in the
    same turn do not fit on one GPU.

    Args:
        played: the role of each.
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


def _ask(actor: type, group, node: int, share: float, asked: list, stop: Callable[[], bool]):
    """A new process of a placement group's node; returns its handle. Where it is to share a GPU, all asked for before
    it there are waited for, and it: Ray serves several requests in any order.

    Args:
        share: of a GPU.
        asked: what says of the node's processes that each is there, of those that have not been waited for; the new
            one's is added.
        stop: whether nobody wants to wait any more.
    """
    shares = 0 < share < 1
    if shares:
        _await(asked, stop)
    # Ray lets a process that asks for no CPU use one thread; actors ask torch for theirs. The bundle has the CPUs.
    host = (
        ray.remote(actor)
        .options(
            num_cpus=0,
            num_gpus=share,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node),
        )
        .remote()
    )
    asked.append(host.__ray_ready__.remote())
    if shares:
        _await(asked, stop)
    return host


def _await(asked: list, stop: Callable[[], bool]) -> None:
    """Until these processes are there. What has no place then shows as one that does not come up."""
    deadline = time.monotonic() + PLACED_S
    while asked and not stop() and time.monotonic() < deadline:
        _, asked[:] = ray.wait(asked, num_returns=len(asked), timeout=0.2)
    asked.clear()


def _reserve(config: Config, bundles: list[dict[str, int]], interrupt: InterruptFlag):
    """A placement group of these bundles.

    Raises:
        UserError: Ray had no room for it in time.
        KeyboardInterrupt: somebody does not want to wait for that.
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
                f"{config.deployment.start_timeout_s:.0f} s "
                f"(deployment.start_timeout_s); asked for {len(bundles)} nodes, {asked}; {_has()}"
            )
    return group


def _has() -> str:
    """What the cluster has, for people."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    has = ", ".join(f"{node['NodeManagerAddress']} with {_resources(node['Resources'])}" for node in alive)
    return f"the cluster has {len(alive)}: {has}; free are {_resources(ray.available_resources())}"


def _resources(amounts: dict[str, float]) -> str:
    return " and ".join(f"{amounts.get(what, 0):g} {what}" for what in ("CPU", "GPU") if what in amounts) or "0 CPU"
