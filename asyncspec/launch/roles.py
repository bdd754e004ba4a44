"""From a role's name to the actor that plays it, and from a configuration to the actors of a run."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import msgspec

from asyncspec import config as configuration
from asyncspec import transport
from asyncspec.actors.base import ActorSpec
from asyncspec.launch.preflight import check_inputs

CLASSES = {
    "controller": ("asyncspec.actors.controller", "Controller"),
    "generator": ("asyncspec.actors.generator", "Generator"),
    "logprob": ("asyncspec.actors.logprob", "Logprob"),
    "trainer": ("asyncspec.actors.trainer", "Trainer"),
    "draft_adapter": ("asyncspec.actors.draft_adapter", "DraftAdapter"),
}


def make(spec: ActorSpec):
    """The actor object; modules are imported only for the role that is played."""
    module, name = CLASSES[spec.role]
    return getattr(importlib.import_module(module), name)(spec)


def specs(config: configuration.Config) -> list[ActorSpec]:
    """All actors of a run, the controller first; all but the controller lack its address still."""
    from asyncspec.actors.controller import actor_names

    text, names = configuration.to_yaml(config), actor_names(config)
    placed = zip(names.items(), devices(config.deployment.device, len(names)))
    return [ActorSpec("controller", "controller", config.run_dir, text),
            *(ActorSpec(role, name, config.run_dir, text, device) for (name, role), device in placed)]


class Replacements:
    """What is started in place of actors that die; generators only, and so many."""

    def __init__(self, config: configuration.Config, specs_: list[ActorSpec]) -> None:
        self.left, self.specs = config.deployment.replacements, {spec.name: spec for spec in specs_}

    def of(self, name: str) -> ActorSpec | None:
        """The next one for an actor; None: the run cannot do without it."""
        spec = self.specs.get(name)
        if spec is None or spec.role != "generator" or not self.left:
            return None
        self.left -= 1
        base, _, number = name.partition(".")
        new = msgspec.structs.replace(spec, name=f"{base}.{int(number or 0) + 1}")
        self.specs[new.name] = new
        return new


def devices(wanted: str, count: int) -> list[str]:
    """What each of `count` actors computes on: this host's GPUs in turn, or the CPU.

    Raises:
        ConfigError: GPUs are wanted and there are none.
    """
    if wanted == "cpu":
        return ["cpu"] * count
    import torch

    gpus = torch.cuda.device_count()
    if wanted == "cuda" and not gpus:
        raise configuration.ConfigError("deployment.device='cuda': expected a GPU, torch sees none; "
                                        "nearest valid choice: deployment.device=cpu")
    return [f"cuda:{i % gpus}" if gpus else "cpu" for i in range(count)]


def prepare_run_dir(config: configuration.Config) -> None:
    """Check what the run will read, choose and make the run directory, and write config.yaml and the keys into it.

    Raises:
        ConfigError: an input cannot be used; the directory holds a run already, or cannot be written; or GPUs are wanted
            and there are none.
    """
    devices(config.deployment.device, 1)
    check_inputs(config)
    config.run_dir = os.path.abspath(os.path.expanduser(config.run_dir or configuration.default_run_dir()))
    run_dir = Path(config.run_dir)
    if (run_dir / "metrics.jsonl").exists():
        raise configuration.ConfigError(f"run_dir={config.run_dir!r}: holds a run already; expected a new or empty directory")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(configuration.to_yaml(config))
        if config.deployment.encrypt:
            transport.make_keys(run_dir)
    except OSError as error:
        raise configuration.ConfigError(f"run_dir={config.run_dir!r}: {error.strerror}; expected a directory to write to") from None
