"""How evenly a mixture's tokens spread over the experts of each layer.

Shape suffixes: M layers with experts, E experts of a layer.
"""

from __future__ import annotations

import torch

from asyncspec.models.parallel import Ranks, local


def _counts(model) -> list[torch.Tensor]:
    """Return the tensors in which torchtitan counts the tokens of each expert, one of each layer that has experts."""
    layers = [layer for layer in model.layers.values() if getattr(layer, "moe_enabled", False)]
    return [local(layer.moe.tokens_per_expert_E) for layer in layers]


def reset(model) -> None:
    """Begin to count anew."""
    for count_E in _counts(model):
        count_E.zero_()


def balance(model, ranks: Ranks | None) -> dict[str, float]:
    """Return how evenly the tokens since `reset` were spread; nothing if the policy has no experts. Collective.

    `experts/max_violation` is MaxVio of arXiv 2408.15664, the load of the busiest expert over the mean load, less 1;
    it is the mean over layers. Layers that are computed again in the backward pass count all tokens twice.
    """
    if not (counts := _counts(model)):
        return {}
    load_ME = torch.stack(counts).double()
    if ranks is not None:
        ranks.sum_over_tokens(load_ME)
    if not load_ME.sum():
        return {}
    violation_M = load_ME.amax(1) / load_ME.mean(1) - 1
    return {"experts/max_violation": float(violation_M.mean()), "experts/unused": float((load_ME == 0).double().mean())}
