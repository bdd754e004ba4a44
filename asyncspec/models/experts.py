"""A mixture's router and experts as trainer and logprob compute them, and how evenly its tokens are spread.

Routing replay: a token may be sent to the experts that the generator chose for it, in the place of those that the
router would choose now. The router's own scores weigh them, so it learns as before. (R3, arXiv 2510.11370.) A token
without such a choice, for example padding, is told the same expert twice; the router chooses for it.

Shape suffixes: B batch, L positions, D model dimension, M layers with experts, E experts of a layer, K experts of a
token, F hidden dimension of an expert, R tokens sorted by their expert, I and O inputs and outputs of a matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from asyncspec.loading import compiling_later
from asyncspec.models.parallel import Ranks, local

with compiling_later():
    from torchtitan.models.common.moe import GroupedExperts, TokenChoiceTopKRouter


class ExactExperts(GroupedExperts):
    """A mixture's feed-forward networks, computed in the dtype of their parameters. torchtitan's own class rounds
    everything to bfloat16.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        w1_EFD, w2_EDF, w3_EFD = (
            w.to_local() if isinstance(w, DTensor) else w for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        )
        ends_E = num_tokens_per_expert_E.cumsum(0, dtype=torch.int32)

        def times(x_RI: torch.Tensor, weight_EOI: torch.Tensor) -> torch.Tensor:
            return self._grouped_mm(A=x_RI, B_t=weight_EOI.transpose(-2, -1), offs=ends_E)

        return times(F.silu(times(x_RD, w1_EFD)) * times(x_RD, w3_EFD), w2_EDF)


class ReplayRouter(TokenChoiceTopKRouter):
    """A router with softmax scores that may be told its tokens' experts."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        pass

    @classmethod
    def like(cls, config: TokenChoiceTopKRouter.Config) -> ReplayRouter.Config:
        return cls.Config(**{field.name: getattr(config, field.name) for field in fields(config)})

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.told_LK: torch.Tensor | None = None  # int64, of the next passes; None: the router chooses
        self.told = self.otherwise = 0  # experts that it was told, and those of them that it would not have chosen

    def forward(self, x_BLD: torch.Tensor, expert_bias_E: torch.Tensor | None = None):
        """Return the weights of each token's experts [B, L, K], the experts [B, L, K], and all scores [B, L, E]."""
        weight_BLK, own_BLK, score_BLE = super().forward(x_BLD, expert_bias_E)
        if self.told_LK is None:
            return weight_BLK, own_BLK, score_BLE
        told_BLK = self.told_LK.view_as(own_BLK)
        known_BLK = torch.ones_like(own_BLK, dtype=torch.bool)
        if self.top_k > 1:  # torchtitan counts an expert once a token, so one that is told twice would upset all tokens
            known_BLK = (told_BLK[..., :1] != told_BLK[..., 1:2]).expand_as(own_BLK)
            told_BLK = torch.where(known_BLK, told_BLK, own_BLK)
        self.told += known_BLK.sum()
        self.otherwise += (told_BLK.unsqueeze(-1) != own_BLK.unsqueeze(-2)).all(-1).sum()
        weight_BLK = score_BLE.gather(-1, told_BLK)
        if self.route_norm:
            weight_BLK = weight_BLK / (weight_BLK.sum(-1, keepdim=True) + 1e-20)
        return weight_BLK * self.route_scale, told_BLK, score_BLE


def _mixtures(model) -> list:
    """Return the mixtures of the layers that have experts."""
    return [layer.moe for layer in model.layers.values() if getattr(layer, "moe_enabled", False)]


def replay(model, chosen_LMK: torch.Tensor | None) -> None:
    """Tell the routers the experts of each token of the next passes; None: they choose."""
    for index, mixture in enumerate(_mixtures(model)):
        mixture.router.told_LK = None if chosen_LMK is None else chosen_LMK[:, index].long()


def reset(model) -> None:
    """Begin to count anew."""
    for mixture in _mixtures(model):
        local(mixture.tokens_per_expert_E).zero_()
        mixture.router.told = mixture.router.otherwise = 0


def balance(model, ranks: Ranks | None) -> dict[str, float]:
    """Return how evenly the tokens since `reset` were spread; nothing if the policy has no experts. Collective.

    `experts/max_violation` is MaxVio of arXiv 2408.15664, the load of the busiest expert over the mean load, less 1;
    it is the mean over layers. Layers that are computed again in the backward pass count all tokens twice.
    """
    if not (mixtures := _mixtures(model)):
        return {}
    load_ME = torch.stack([local(mixture.tokens_per_expert_E) for mixture in mixtures]).double()
    routers = [(mixture.router.told, mixture.router.otherwise) for mixture in mixtures]
    told = torch.tensor([[float(each) for each in router] for router in routers], dtype=torch.float64).sum(0)
    told = told.to(load_ME.device)
    if ranks is not None:
        ranks.sum_over_tokens(load_ME)
        ranks.sum_over_tokens(told)
    if not load_ME.sum():
        return {}
    violation_M = load_ME.amax(1) / load_ME.mean(1) - 1
    found = {"experts/max_violation": violation_M.mean(), "experts/unused": (load_ME == 0).double().mean()}
    if told[0]:
        found["experts/replayed_otherwise"] = told[1] / told[0]
    return {name: float(value) for name, value in found.items()}
