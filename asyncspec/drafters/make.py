"""From a configured method to a drafter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from asyncspec.drafts.draft import Draft, load
from asyncspec.models import policy as policies
from asyncspec.models.policy import PolicyShape
from asyncspec.speculation.drafter import Drafter


def drafter_maker(method: str, directory: Path, policy: PolicyShape) -> Callable[..., Drafter] | None:
    """callable(model, slots, settings) -> Drafter for `TorchEngine`; None for "none".

    Raises:
        CheckpointError: the draft's files are missing or broken, or it was made for another policy.
    """
    if method == "none":
        return None
    if method in ("ngram", "suffix"):
        from asyncspec.drafters import lookup

        drafter = {"ngram": lookup.NGramDrafter, "suffix": lookup.SuffixDrafter}[method]
        return lambda model, slots, settings: drafter(slots)
    if method == "mtp":  # its head is that of the engine's own policy
        return lambda model, slots, settings: drafter_for(load(method, directory, policy, model))(
            model, slots, settings
        )
    return drafter_for(load(method, directory, policy))


def drafter_for(draft: Draft) -> Callable[..., Drafter]:
    """The same for a draft at hand."""
    if draft.method == "eagle3":
        from asyncspec.drafters.eagle3 import eagle3_drafter

        return lambda *engine: eagle3_drafter(draft.module, *engine)
    if draft.method == "mtp":
        from asyncspec.drafters.mtp import mtp_drafter

        return lambda *engine: mtp_drafter(draft.module, *engine)
    from asyncspec.drafters.draft_model import DraftModelDrafter

    return lambda model, slots, settings: DraftModelDrafter(
        policies.cast(policies.lengthened(draft.module, draft.shape, slots.positions), policies.dtype_of(model)),
        draft.shape,
        slots,
        settings,
    )
