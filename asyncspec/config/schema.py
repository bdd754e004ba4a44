"""All fields of a run's configuration: its sections are in sections.py, training.py, learning.py, deployment.py and
showing.py.

`asyncspec train --help` prints this list. `load.py` fills it from YAML and overrides; `check.py` refuses combinations
that cannot run. This file imports no torch, so reading a configuration is instant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from asyncspec.config.deployment import DeploymentConfig, MockConfig
from asyncspec.config.fields import knob, value_of
from asyncspec.config.learning import RLConfig
from asyncspec.config.sections import (
    CheckpointConfig,
    DataConfig,
    DraftConfig,
    EngineConfig,
    EnvironmentConfig,
    EvalConfig,
    ModelConfig,
    SamplingConfig,
    SpeculationConfig,
)
from asyncspec.config.showing import LoggingConfig
from asyncspec.config.training import LogprobConfig, TrainerConfig
from asyncspec.models.shape import Lora

LONGEST_DRAFT = 15  # the longest draft that speculation.draft_length=auto considers


@dataclass
class Config:
    steps: int = knob(120, "optimizer steps of the run", least=1)
    policy_lag: int = knob(
        1,
        "maximum number of versions by which a rollout may be older than the policy trained on it; 0: synchronous",
        least=0,
    )
    seed: int = knob(
        0,
        "random seed for the data, its order and every sample; runs with speculation.draft_length=auto are still not "
        "bitwise repeatable, since auto reads the clock",
        least=0,
        most=2**32 - 1,
    )
    run_dir: str = knob("", "directory for the results; empty: runs/<date>-<time>")
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    rl: RLConfig = field(default_factory=RLConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    logprob: LogprobConfig = field(default_factory=LogprobConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    mock: MockConfig = field(default_factory=MockConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    deployment: DeploymentConfig = field(default_factory=DeploymentConfig)

    @property
    def drafting(self) -> bool:
        return self.speculation.method != "none"

    @property
    def fixed_draft_length(self) -> int | None:
        """The draft length k of every verification: 0 without speculation, None if the engine chooses it (auto)."""
        if not self.drafting:
            return 0
        return None if self.speculation.draft_length == "auto" else int(self.speculation.draft_length)

    @property
    def longest_draft(self) -> int:
        """The largest number of tokens that a verification may propose."""
        return LONGEST_DRAFT if self.fixed_draft_length is None else self.fixed_draft_length

    @property
    def episodes(self) -> int:
        """The most episodes that a generator has open."""
        return self.environment.episodes or 4 * self.engine.slots

    @property
    def kept(self) -> int:
        """The conversations whose KV cache the embedded engine keeps between two turns."""
        return (self.environment.kept or self.engine.slots) if self.environment.name else 0

    @property
    def positions(self) -> int:
        """Positions of the longest sequence: prompt, response, and the tokens of a last verification."""
        return self.engine.max_prompt_tokens + self.sampling.max_response_tokens + self.longest_draft + 1

    @property
    def adapting(self) -> bool:
        """Whether the run has a draft adapter."""
        return self.draft_trainer == "draft_adapter"

    @property
    def draft_trainer(self) -> str:
        """The role that trains the draft during the run: "draft_adapter", "trainer" (for mtp) or "" for none."""
        if not self.draft.adapt or self.trainer.kind == "mock":
            return ""
        trainers = {"eagle3": "draft_adapter", "draft_model": "draft_adapter", "mtp": "trainer"}
        return trainers.get(self.speculation.method, "")

    @property
    def lora(self) -> Lora | None:
        """The adapters that are trained; None if the policy's weights are."""
        found = self.model.lora
        return Lora(found.rank, found.alpha, found.target_modules) if found.rank else None

    @property
    def server_urls(self) -> list[str]:
        """The addresses of the SGLang servers, one for each generator."""
        return [url.strip() for url in self.engine.url.split(",") if url.strip()]

    @property
    def draft_directory(self) -> str:
        """The directory of the draft's files, to be given to `resolve_path`; "" for a method without files."""
        method = self.speculation.method
        with_files = ("eagle3", "mtp", "draft_model")
        return (self.speculation.draft_path or f"asset:tiny/{method}") if method in with_files else ""


def default_of(key: str) -> Any:
    """Return the default of a configuration field, given its dotted name."""
    return value_of(Config(), key)
