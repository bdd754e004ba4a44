"""The section of a configuration that says where a run is shown. check_logging.py refuses combinations."""

from __future__ import annotations

from dataclasses import dataclass

from asyncspec.config.fields import knob

BACKENDS = ("tensorboard", "wandb", "trackio")  # timing/boards.py has them


@dataclass
class LoggingConfig:
    backends: str = knob(
        "tensorboard",
        f"where metrics, rollouts and pictures are shown besides the run's files: {', '.join(BACKENDS)}, separated by "
        "commas; none or empty: nowhere",
    )
    project: str = knob("asyncspec", "project of wandb and trackio that the run belongs to")
    run_name: str = knob("", "name of the run in wandb and trackio; empty: the name of run_dir")
    prometheus: str = knob(
        "",
        "address HOST:PORT at which the controller serves the latest metrics for Prometheus, for example 0.0.0.0:9400; "
        "empty: nowhere",
    )
    rollouts: int = knob(
        1, "groups of a step, and of an evaluation, whose rollouts are written to rollouts.jsonl; 0: none", least=0
    )
    rollouts_every: int = knob(10, "steps from one whose rollouts are written to the next", least=1)

    @property
    def boards(self) -> list[str]:
        """The names of the back ends."""
        names = [name.strip() for name in self.backends.split(",")]
        return [] if names in ([""], ["none"]) else names
