"""The optimizers of a policy, and their learning rate."""

from __future__ import annotations

import math

import torch

from asyncspec.config import OptimizerConfig


def decayed(model, weight_decay: float) -> list[dict]:
    """Return an optimizer's groups of a policy's trained parameters: the matrices decay; norms, biases and embedding do
    not.

    A tied head is the embedding.
    """
    kept = {id(model.tok_embeddings.weight)}
    matrices, others = [], []
    for parameter in (each for each in model.parameters() if each.requires_grad):
        (matrices if parameter.ndim > 1 and id(parameter) not in kept else others).append(parameter)
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others}]


def make_optimizers(model, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """Return the optimizers that together have all parameters: AdamW; or Muon (arXiv 2502.16982), then AdamW.

    Muon gets the matrices of the layers: not the embedding, the head, or the stacked matrices of experts. It scales its
    steps to the size of AdamW's, so one learning rate fits both.
    """
    groups, muon = decayed(model, config.weight_decay), []
    if config.kind == "muon":
        head = id(model.lm_head.weight)
        matrices = groups[0]["params"]
        muon = [parameter for parameter in matrices if parameter.ndim == 2 and id(parameter) != head]
        taken = {id(parameter) for parameter in muon}
        groups[0]["params"] = [parameter for parameter in matrices if id(parameter) not in taken]
    adamw = torch.optim.AdamW(
        groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, weight_decay=0.0
    )
    if not muon:
        return [adamw]
    return [
        torch.optim.Muon(
            muon,
            lr=config.lr,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            adjust_lr_fn="match_rms_adamw",
        ),
        adamw,
    ]


def learning_rate(config: OptimizerConfig, updates: int, total: int) -> float:
    """Return the learning rate of the optimizer step after `updates` others, in a run of `total` optimizer steps.

    A schedule falls from the end of the warm-up to 0 after the last one.
    """
    warmup = config.warmup_steps
    rate = config.lr * min(1.0, (updates + 1) / max(1, warmup))
    if config.schedule == "constant" or updates < warmup:
        return rate
    passed = min(1.0, (updates - warmup) / max(1, total - warmup))
    return rate * (1 - passed if config.schedule == "linear" else (1 + math.cos(math.pi * passed)) / 2)
