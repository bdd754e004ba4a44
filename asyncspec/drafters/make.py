"""Make the drafter that the configuration names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from asyncspec.drafts.draft import Draft, load
from asyncspec.engine.backend import Target
from asyncspec.models import policy as policies
from asyncspec.models.policy import PolicyShape
from asyncspec.speculation.drafter import Drafter

DrafterMaker = Callable[[Target], Drafter]


def drafter_maker(method: str, directory: Path, policy: PolicyShape) -> DrafterMaker | None:
    """Return the function with which `TorchEngine` makes its drafter; None for "none".

    Args:
        method: `speculation.method` of the configuration.
        directory: where the draft's files are.
        policy: the shape of the engine's policy.

    Raises:
        CheckpointError: the draft's files are missing or broken, or the draft was made for another policy.
    """
    if method == "none":
        return None
    if method in ("ngram", "suffix"):
        from asyncspec.drafters.lookup import NGramDrafter, SuffixDrafter

        return {"ngram": NGramDrafter, "suffix": SuffixDrafter}[method].of
    if method == "mtp":  # it shares the head of the engine's policy
        return lambda target: drafter_for(load(method, directory, policy, target.model, 1))(target)
    return drafter_for(load(method, directory, policy, positions=1))  # a drafter has a table of its own


def drafter_for(draft: Draft) -> DrafterMaker:
    """Return the function with which `TorchEngine` makes its drafter from a loaded draft."""
    if draft.method == "draft_model":
        from asyncspec.drafters.draft_model import DraftModelDrafter

        def of_any_length(target: Target) -> Drafter:
            model = policies.lengthened(draft.module, draft.shape, target.slots.positions)
            return DraftModelDrafter(policies.cast(model, target.backend.dtype), draft.shape, target)

        return of_any_length
    from asyncspec.drafters.eagle3 import DecodeEagle3
    from asyncspec.drafters.features import feature_drafter
    from asyncspec.drafters.mtp import DecodeMTP

    return partial(feature_drafter, {"eagle3": DecodeEagle3, "mtp": DecodeMTP}[draft.method], draft.module)
