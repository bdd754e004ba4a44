"""From a role's name to the actor that plays it, and from a configuration to the actors of a run."""

from __future__ import annotations

import importlib
from pathlib import Path

from asyncspec import config as configuration
from asyncspec.actors.base import ActorSpec

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

    text = configuration.to_yaml(config)
    names = {"controller": "controller", **actor_names(config)}
    return [ActorSpec(role, name, config.run_dir, text) for name, role in names.items()]


def prepare_run_dir(config: configuration.Config) -> None:
    """Choose and make the run directory, and write config.yaml into it.

    Raises:
        ConfigError: the directory holds a run already, or cannot be written.
    """
    config.run_dir = str(Path(config.run_dir or configuration.default_run_dir()).absolute())
    run_dir = Path(config.run_dir)
    if (run_dir / "metrics.jsonl").exists():
        raise configuration.ConfigError(f"run_dir={config.run_dir!r}: holds a run already; expected a new or empty directory")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(configuration.to_yaml(config))
    except OSError as error:
        raise configuration.ConfigError(f"run_dir={config.run_dir!r}: {error.strerror}; expected a directory to write to") from None
