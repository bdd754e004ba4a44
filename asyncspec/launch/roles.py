"""Finds the class that plays a role, lists the actors of a configuration, and prepares the run directory."""

from __future__ import annotations

import copy
import errno
import importlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from asyncspec import config as configuration
from asyncspec.actors.base import RAISED, ActorSpec
from asyncspec.config import topology, work
from asyncspec.console import never_fail
from asyncspec.errors import ConfigError
from asyncspec.launch import ending, fingerprints
from asyncspec.launch.machine import check_directory
from asyncspec.launch.preflight import check_inputs
from asyncspec.ledger import checkpoint
from asyncspec.loading import gc_paused
from asyncspec.lock import Lock, Taken
from asyncspec.timing.metrics import read_rows
from asyncspec.wire import transport

CLASSES = {
    "controller": ("asyncspec.actors.controller", "Controller"),
    "generator": ("asyncspec.actors.generator", "Generator"),
    "generator_rank": ("asyncspec.actors.generator_rank", "GeneratorRank"),
    "logprob": ("asyncspec.actors.logprob", "Logprob"),
    "logprob_rank": ("asyncspec.actors.logprob_rank", "LogprobRank"),
    "trainer": ("asyncspec.actors.trainer", "Trainer"),
    "trainer_rank": ("asyncspec.actors.trainer_rank", "TrainerRank"),
    "draft_adapter": ("asyncspec.actors.draft_adapter", "DraftAdapter"),
}
# The classes with engine.kind=mock and trainer.kind=mock, which go together.
MOCKED = {
    "generator": ("asyncspec.mock.actors", "MockGenerator"),
    "trainer": ("asyncspec.mock.actors", "MockTrainer"),
    "trainer_rank": ("asyncspec.mock.actors", "MockTrainerRank"),
    "logprob": ("asyncspec.mock.actors", "MockLogprob"),
    "logprob_rank": ("asyncspec.mock.actors", "MockLogprobRank"),
}
# Modules that most of the computing actors load.
_MODELS = (
    "torch.distributed.checkpoint",
    "asyncspec.drafts.draft",
    "asyncspec.drafts.training",
    "asyncspec.engine.torch_engine",
    "asyncspec.models.policy",
    "asyncspec.drafters.make",
    "asyncspec.wire.weights",
)
# The embedded engine also loads numba. vLLM's engine does not start once numba's modules are loaded: it inspects every
# value in every module.
_DRAFTING = "asyncspec.drafters.numba_draft"


def make(spec: ActorSpec):
    """Make the actor of a spec. Imports only the modules of its role."""
    never_fail()
    ending.make_ready()
    mocked = spec.role in MOCKED and configuration.from_yaml(spec.config_yaml).trainer.kind == "mock"
    module, name = (MOCKED if mocked else CLASSES)[spec.role]
    with gc_paused():
        return getattr(importlib.import_module(module), name)(spec)


def play(actor) -> int:
    """Run an actor. Returns its exit code. If an exception was raised in it, this process ends with that code: it plays
    no other actor, because its state, or its GPU, may be faulty.
    """
    code = actor.run()
    if code == RAISED:
        ending.end_at_once(code)
    return code


def devices(wanted: str, played: Sequence[str]) -> list[str]:
    """Return the device of each actor: one of this host's GPUs, dealt out by topology.deal, or the CPU.

    Args:
        wanted: deployment.device.
        played: the role of each actor.

    Raises:
        ConfigError: deployment.device=cuda, and there is no GPU.
    """
    if wanted == "cpu":
        return ["cpu"] * len(played)
    import torch

    gpus = torch.cuda.device_count()
    if wanted == "cuda" and not gpus:
        raise ConfigError(
            "deployment.device='cuda': expected a GPU, torch sees none; nearest valid choice: deployment.device=cpu"
        )
    return [f"cuda:{gpu}" for gpu in topology.deal(played, gpus)] if gpus else ["cpu"] * len(played)


class SpareGPUs:
    """This host's GPUs that no actor uses, for actors that were lost too often on theirs."""

    def __init__(self, here: Sequence[ActorSpec], first: int = 0, every: int = 1) -> None:
        """
        Args:
            here: the actors on this host.
            first, every: take the spare GPUs with these indices, where several launchers share this host.
        """
        used, gpus = {spec.device for spec in here}, 0
        if any(device.startswith("cuda") for device in used):
            import torch

            gpus = torch.cuda.device_count()
        self._left = [device for device in (f"cuda:{gpu}" for gpu in range(gpus)) if device not in used][first::every]

    def __call__(self, spec: ActorSpec) -> str:
        """Return the device for the replacement of an actor: a spare GPU, or the actor's own device if none is left."""
        return self._left.pop(0) if self._left and spec.device.startswith("cuda") else spec.device


def specs(
    config: configuration.Config,
    resume: int = -1,
    node: int | None = None,
    host: str = "127.0.0.1",
    deal: Callable[[str, list[str]], list[str]] = devices,
) -> list[ActorSpec]:
    """The actors of a run, or of one of its nodes, the controller first. Their `control_address` is still empty.

    Args:
        resume: the version to resume from; -1: a new run.
        node: index of a node in `deployment.nodes`; None: all nodes.
        host: the address that deployment.host=auto stands for.
        deal: callable(deployment.device, roles of the actors that compute) -> the device of each.
    """
    from asyncspec.actors.crew import actor_names, computing

    text, names = _yaml_at(copy.deepcopy(config), host), {"controller": "controller", **actor_names(config)}
    here = list(names) if node is None else topology.assign(topology.parse(config.deployment.nodes), names)[node]
    on_devices = computing(config, {name: names[name] for name in here})
    placed = dict.fromkeys(here, "cpu") | dict(
        zip(on_devices, deal(config.deployment.device, [names[name] for name in on_devices]))
    )
    return [ActorSpec(names[name], name, config.run_dir, text, placed[name], resume=resume) for name in here]


def at_host(spec: ActorSpec, host: str) -> ActorSpec:
    """Return the same spec, with deployment.host=auto replaced by `host`. Its `specs` were made with host="auto"."""
    return msgspec.structs.replace(spec, config_yaml=_yaml_at(configuration.from_yaml(spec.config_yaml), host))


def _yaml_at(config: configuration.Config, host: str) -> str:
    """Return a configuration as YAML, with deployment.host=auto replaced by `host`."""
    if config.deployment.host == "auto":
        config.deployment.host = host
    return configuration.to_yaml(config)


def prepare_run_dir(config: configuration.Config, local: bool = True) -> Lock:
    """Check the run's inputs, choose, make and lock the run directory, and write config.yaml and the keys into it.
    Paths become absolute, so that the run resumes from any directory. Returns the directory's lock, see `hold`.

    Args:
        local: whether the actors compute on this host.

    Raises:
        ConfigError: an input cannot be used; the directory holds a run already, or cannot be written; or
            deployment.device=cuda, and there is no GPU.
        UserError: the working directory was removed.
    """
    check_directory()
    if local:
        devices(config.deployment.device, [])
    check_inputs(config)
    _make_run_dir(config)
    lock = hold(config.run_dir)  # before a file is written: another run may be using the directory
    try:
        if os.path.exists(Path(config.run_dir) / "metrics.jsonl"):
            raise ConfigError(
                f"run_dir={config.run_dir!r}: holds a run already; expected a new or empty directory, or --resume "
                f"{config.run_dir}"
            )
        configuration.make_paths_absolute(config)
        _write_run_dir(config)
        fingerprints.write(config)
    except BaseException:
        lock.release()
        raise
    return lock


def _make_run_dir(config: configuration.Config) -> None:
    """Make the run's directory, and set `config.run_dir` to its absolute path. One that is named by date and time is
    new, even if another run starts in the same second.
    """
    wanted = str(configuration.resolve_path(config.run_dir or configuration.default_run_dir()).absolute())
    named, config.run_dir, number = bool(config.run_dir), wanted, 1
    try:
        while True:
            try:
                os.makedirs(config.run_dir, exist_ok=named)
                return
            except FileExistsError:
                if named:
                    raise
                number += 1
                config.run_dir = f"{wanted}-{number}"
    except (OSError, RecursionError) as error:  # RecursionError: thousands of folders inside each other
        why = getattr(error, "strerror", None) or os.strerror(errno.ENAMETOOLONG)
        raise ConfigError(f"run_dir={config.run_dir!r}: {why}; expected a directory to write to") from None


def prepare_resume(config: configuration.Config, tell: Callable[[str], None] = print) -> int:
    """Prepare a run's directory for resuming from its newest undamaged checkpoint that its records reach. Returns the
    checkpoint's version, 0 if there is none.

    Args:
        tell: called with one line for each damaged checkpoint that is skipped, and for a reward that has changed.

    Raises:
        ConfigError: an input cannot be used, or the directory cannot be written.
    """
    check_directory()
    check_inputs(config)
    fingerprints.compare(config, tell)
    run_dir = Path(config.run_dir)
    rows = read_rows(run_dir / "metrics.jsonl") if (run_dir / "metrics.jsonl").exists() else []
    found = checkpoint.newest(run_dir, "trainer", tell, at_most=len(rows))
    version = found[0] if found else 0
    for kind in ("trainer", "draft"):
        checkpoint.drop_after(run_dir, kind, version)
        checkpoint.drop_cut_short(run_dir, kind)
    _write_run_dir(config, f"config-until-step-{version}.yaml")
    fingerprints.write(config)
    return version


def hold(run_dir: str) -> Lock:
    """Lock a run's directory for this process until it ends.

    Raises:
        ConfigError: another process has locked it, or the lock file cannot be opened.
    """
    try:
        return Lock(Path(run_dir) / "lock")
    except OSError as error:
        expected = "a file system that can lock now" if error.errno == errno.ENOLCK else "a directory to write to"
        raise ConfigError(f"run_dir={run_dir!r}: lock: {error.strerror}; expected {expected}") from None
    except Taken:
        raise ConfigError(
            f"run_dir={run_dir!r}: another process is training in it; expected a run that has ended"
        ) from None


def _write_run_dir(config: configuration.Config, before: str = "") -> None:
    """Write the configuration and the keys into the run directory, and check for room on the disk.

    Args:
        before: name of the file that keeps the directory's previous configuration, if that differs.
    """
    run_dir, text = Path(config.run_dir), configuration.to_yaml(config)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if not config.deployment.disk_mb_s and config.trainer.kind != "mock":
            config.deployment.disk_mb_s = work.measured_mb_s(run_dir)
            text = configuration.to_yaml(config)
        if before and (there := (run_dir / "config.yaml").read_text(encoding="utf-8")) != text:
            (run_dir / before).write_text(there, encoding="utf-8")
        (run_dir / "config.yaml").write_text(text, encoding="utf-8")
        if config.deployment.encrypt:
            transport.make_keys(run_dir)
        # New checkpoints replace those that the run already has, so their bytes count as free.
        held = sum(
            file.stat().st_size
            for name in ("checkpoints", "checkpoint")
            for file in (run_dir / name).rglob("*")
            if file.is_file()
        )
        free, needed = shutil.disk_usage(run_dir).free + held, room_needed(config)
    except OSError as error:
        raise ConfigError(f"run_dir={config.run_dir!r}: {error.strerror}; expected a directory to write to") from None
    if free < needed:
        raise ConfigError(
            f"run_dir={config.run_dir!r}: {free / 1e6:.0f} MB are free there; expected at least {needed / 1e6:.0f} "
            f"MB for checkpoint.keep={config.checkpoint.keep} checkpoints and the policy; nearest valid choice: "
            f"another disk"
        )


def room_needed(config: configuration.Config) -> int:
    """The bytes that a run's checkpoints take at most. A checkpoint holds the weights and the optimizer's moments in
    float32. There are checkpoint.keep of them, one more that is being written, and the weights alone: in the end, and
    every checkpoint.export_every steps.
    """
    exports = 1 + (config.steps // config.checkpoint.export_every if config.checkpoint.export_every else 0)
    return (config.checkpoint.keep + 1) * work.checkpoint_bytes(config) + exports * work.export_bytes(config)


def libraries(config: configuration.Config, specs: Sequence[ActorSpec]) -> list[str]:
    """The modules that these actors load, for a process that loads them once for all."""
    found = {"torch": None}
    for spec in specs:
        mocked = spec.role in MOCKED and config.trainer.kind == "mock"
        found[(MOCKED if mocked else CLASSES)[spec.role][0]] = None
        generating = spec.role.startswith("generator")
        if not mocked and spec.role != "controller" and (not generating or config.engine.kind == "torch"):
            found |= dict.fromkeys(_MODELS)
        if generating and config.engine.kind == "torch":
            found[_DRAFTING] = None
    return list(found)


def warm(modules: Sequence[str]) -> None:
    """Load these `libraries` in a process that waits for a role."""
    with gc_paused():
        for module in modules:
            importlib.import_module(module)
