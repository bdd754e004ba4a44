"""Make, load, save and train a draft with weights, of any method. Only this module knows all methods."""

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
from asyncspec.models import eagle3, mtp, policy
from asyncspec.models.contents import check_draft
from asyncspec.models.draft_shape import DraftShape
from asyncspec.models.shape import PolicyShape

METHODS = ("eagle3", "mtp", "draft_model")
DRAFT_MODEL_LAYERS = 2  # layers of a new separate draft model; its shape is otherwise the policy's


@dataclass(frozen=True)
class Draft:
    method: str  # one of METHODS
    module: Any  # Eagle3, MTP, or a policy
    shape: Any  # the module's own shape
    source: Path | None = None  # the directory that it was loaded from

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The policy's layers whose inputs the draft takes; () for a draft model, which takes tokens only."""
        return getattr(self.module, "aux_layers", ())

    def loss(self, unroll: int, temperature: float) -> Callable:
        """Return the loss function for `training.DraftTrainer`.

        Args:
            unroll: see `training.unrolled_loss`; a draft model ignores it.
            temperature: temperature of the sampling.
        """
        if self.method == "draft_model":
            return partial(distillation_loss, temperature=temperature)
        return partial(unrolled_loss, unroll=unroll, temperature=temperature)

    def to_hf(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Rename its `named_parameters` to the names in its file. They differ for a draft model only."""
        return policy.to_hf(self.module, tensors) if self.method == "draft_model" else dict(tensors)

    def save(self, directory: Path, tokenizer_from: Path | None = None, policy_version: int | None = None) -> None:
        """Write the files that the engine and vLLM load. Files and fields of `source` are carried over.

        Args:
            tokenizer_from: directory from which a new draft model copies the tokenizer's files.
            policy_version: the version of the run's policy that the draft was last trained for; config.json notes it.
        """
        if self.method == "draft_model":
            policy.save(self.module, self.shape, directory, self.source or tokenizer_from)
        elif self.method == "eagle3":
            eagle3.save(self.module, directory, self.source)
        else:
            mtp.save(self.module, directory)
        if policy_version is not None:
            file = directory / "config.json"
            write_json(
                file, json.loads(file.read_text(encoding="utf-8")) | {"trained_for_policy_version": policy_version}
            )


def new(method: str, shape: PolicyShape, model, tokens: torch.Tensor | None = None) -> Draft:
    """Make an untrained draft for a policy.

    Args:
        shape: the policy's shape.
        model: the policy.
        tokens: int64, ascending: the only tokens that an eagle3 draft may propose; None: all.
    """
    if method == "eagle3":
        draft_shape = DraftShape.for_policy(shape, 0 if tokens is None else len(tokens))
        return Draft(method, eagle3.Eagle3(draft_shape, tokens), draft_shape)
    if method == "mtp":
        return Draft(method, mtp.MTP(shape, model.lm_head.weight), shape)
    small = replace(shape, n_layers=min(DRAFT_MODEL_LAYERS, shape.n_layers))
    module = policy.build(small)
    module.init_states()
    return Draft(method, module, small)


def load(method: str, directory: Path, shape: PolicyShape, model=None, positions: int = 0) -> Draft:
    """Load a draft and check that it fits the policy.

    Args:
        shape: the policy's shape.
        model: the policy; mtp uses its head.
        positions: length of the RoPE table, which is the longest sequence that a pass may take; 0: the shape's.

    Raises:
        CheckpointError: the files are missing or broken, or the draft was made for another policy.
    """
    if method == "eagle3":
        module = eagle3.load(directory, shape)
        return Draft(method, module, module.shape, directory)
    if method == "mtp":
        return Draft(method, mtp.load(directory, shape, model.lm_head.weight, positions), shape, directory)
    check_draft(method, directory, shape)
    module, own = policy.load(directory, positions=positions)
    return Draft(method, module, own, directory)


def skeleton(method: str, directory: Path, shape: PolicyShape) -> Draft:
    """Load an eagle3 or draft_model draft with its module on the meta device: names and shapes, no values.

    Raises:
        CheckpointError: config.json is missing or broken, or the draft was made for another policy.
    """
    if method == "draft_model":
        own = PolicyShape.from_hf(directory)
        return Draft(method, policy.skeleton(own), own)
    own = DraftShape.from_hf(directory, shape)
    with torch.device("meta"):
        return Draft(method, eagle3.Eagle3(own), own)


def aux_layers(method: str, directory: Path, shape: PolicyShape) -> tuple[int, ...]:
    """Return `Draft.aux_layers` without loading the weights."""
    if method == "eagle3":
        return DraftShape.from_hf(directory, shape).aux_layers
    return (shape.n_layers,) if method == "mtp" else ()
