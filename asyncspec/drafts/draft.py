"""Makes, reads, writes and trains a draft with weights, of any kind. The one place that knows all kinds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from asyncspec.drafts.training import distillation_loss, unrolled_loss
from asyncspec.files import write_json
from asyncspec.models import CheckpointError, eagle3, mtp, policy
from asyncspec.models.policy import PolicyShape

METHODS = ("eagle3", "mtp", "draft_model")
DRAFT_MODEL_LAYERS = 2  # of a new separate draft model, in other respects shaped as the policy


@dataclass(frozen=True)
class Draft:
    method: str  # one of METHODS
    module: Any  # Eagle3, MTP, or a policy
    shape: Any  # its own

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers of the policy whose inputs it reads; () for a draft model, which reads tokens only."""
        return getattr(self.module, "aux_layers", ())

    def loss(self, unroll: int, temperature: float) -> Callable:
        """What `training.DraftTrainer` takes."""
        if self.method == "draft_model":
            return partial(distillation_loss, temperature=temperature)
        return partial(unrolled_loss, unroll=unroll, temperature=temperature)

    def to_hf(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Its `named_parameters` under the names of its file, which differ for a draft model only."""
        return policy.to_hf(self.module, tensors) if self.method == "draft_model" else dict(tensors)

    def save(self, directory: Path, tokenizer_from: Path | None = None, policy_version: int | None = None) -> None:
        """Write the files the engine reads, and vLLM.

        Args:
            tokenizer_from: where a draft model takes its tokenizer's files from.
            policy_version: the version of the run's policy that it was last trained for, noted in config.json.
        """
        if self.method == "draft_model":
            policy.save(self.module, self.shape, directory, tokenizer_from)
        else:
            {"eagle3": eagle3, "mtp": mtp}[self.method].save(self.module, directory)
        if policy_version is not None:
            file = directory / "config.json"
            write_json(file, json.loads(file.read_text()) | {"trained_for_policy_version": policy_version})


def new(method: str, shape: PolicyShape, model, tokens: torch.Tensor | None = None) -> Draft:
    """An untrained draft for a policy.

    Args:
        model: the policy.
        tokens: for eagle3, int64, the only tokens it is to propose, ascending; None: all.
    """
    if method == "eagle3":
        draft_shape = eagle3.DraftShape.for_policy(shape, 0 if tokens is None else len(tokens))
        return Draft(method, eagle3.Eagle3(draft_shape, tokens), draft_shape)
    if method == "mtp":
        return Draft(method, mtp.MTP(shape, model.lm_head.weight), shape)
    small = replace(shape, n_layers=min(DRAFT_MODEL_LAYERS, shape.n_layers))
    module = policy.build(small)
    module.init_states()
    return Draft(method, module, small)


def load(method: str, directory: Path, shape: PolicyShape, model=None) -> Draft:
    """Read a draft and check that it fits the policy.

    Args:
        model: the policy; mtp uses its head.

    Raises:
        CheckpointError: the files are missing or broken, or were made for another policy.
    """
    if method == "eagle3":
        module = eagle3.load(directory, shape)
        return Draft(method, module, module.shape)
    if method == "mtp":
        return Draft(method, mtp.load(directory, shape, model.lm_head.weight), shape)
    module, own = policy.load(directory)
    if own.vocab_size != shape.vocab_size:
        raise CheckpointError(
            f"{directory}/config.json: vocab_size={own.vocab_size}: the policy has {shape.vocab_size}"
        )
    return Draft(method, module, own)


def skeleton(method: str, directory: Path, shape: PolicyShape) -> Draft:
    """As `load` of an eagle3 or draft_model draft, with its module on the meta device: names and shapes, no values.

    Raises:
        CheckpointError: config.json is missing or broken, or the draft was made for another policy.
    """
    if method == "draft_model":
        own = PolicyShape.from_hf(directory)
        return Draft(method, policy.skeleton(own), own)
    own = eagle3.read_shape(directory, shape)
    with torch.device("meta"):
        return Draft(method, eagle3.Eagle3(own), own)


def aux_layers(method: str, directory: Path, shape: PolicyShape) -> tuple[int, ...]:
    """As `Draft.aux_layers`, without reading the weights."""
    if method == "eagle3":
        return eagle3.read_shape(directory, shape).aux_layers
    return (shape.n_layers,) if method == "mtp" else ()
