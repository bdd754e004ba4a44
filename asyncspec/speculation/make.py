"""From a configured method to a drafter."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Callable

from asyncspec.models import CheckpointError
from asyncspec.models.policy import PolicyShape
from asyncspec.speculation.base import Drafter


def drafter_maker(method: str, directory: Path, policy: PolicyShape) -> Callable[..., Drafter] | None:
    """callable(model, slots, settings) -> Drafter for `TorchEngine`; None for "none".

    Raises:
        CheckpointError: the draft's files are missing or broken, or it was made for another policy.
    """
    if method == "none":
        return None
    if method in ("ngram", "suffix"):
        from asyncspec.speculation import lookup

        drafter = {"ngram": lookup.NGramDrafter, "suffix": lookup.SuffixDrafter}[method]
        return lambda model, slots, settings: drafter(slots)
    if method == "eagle3":
        from asyncspec.models import eagle3
        from asyncspec.speculation.eagle3 import eagle3_drafter

        return partial(eagle3_drafter, eagle3.load(directory, policy))
    if method == "mtp":
        from asyncspec.models import mtp
        from asyncspec.speculation.mtp import mtp_drafter

        return lambda model, slots, settings: mtp_drafter(mtp.load(directory, policy, model.lm_head.weight), model, slots, settings)
    from asyncspec.models import policy as policies
    from asyncspec.speculation.draft_model import DraftModelDrafter

    small, shape = policies.load(directory)
    if shape.vocab_size != policy.vocab_size:
        raise CheckpointError(f"{directory}/config.json: vocab_size={shape.vocab_size}: the policy has {policy.vocab_size}")
    return lambda model, slots, settings: DraftModelDrafter(policies.lengthened(small, shape, slots.positions), shape, slots, settings)
