"""The scorer: one rank's part of a logprob actor. It loads the policy, scores groups and takes new versions.

The actors decide when: the leading rank is the logprob actor (actors/logprob.py); the other ranks follow its orders
(actors/logprob_rank.py). Every method marked as collective must be called in all ranks, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from asyncspec.config import Config, resolve_path, work
from asyncspec.models.contents import check_policy
from asyncspec.models.parallel import Ranks, local, reset_fsdp_state, share
from asyncspec.rl.batch import Part, divide, pack
from asyncspec.wire import messages as m
from asyncspec.wire.facts import EXPERTS
from asyncspec.wire.layout import Layout

if TYPE_CHECKING:
    from asyncspec.models.packed import Row, Scores
    from asyncspec.models.shape import Lora


class Scorer:
    def __init__(self, config: Config, device: str, name: str = "logprob", rank: int = 0) -> None:
        """
        Args:
            name: name of the logprob actor.
            rank: rank of this process in the logprob actor.
        """
        self.config, self.device = config, device
        logprob = config.logprob
        self.ranks = Ranks(name, rank, logprob.ranks, logprob.tensor_parallel, expert_parallel=logprob.expert_parallel)
        self.reference, self.aux_layers = None, ()  # the reference is a model of its own, or `_base`
        self.supervising = False  # whether the next group also makes supervision for the draft
        self.comparing = False  # whether the groups until `collect` are also scored without the policy's adapters
        # name of a score -> of each pass over the last group added, float32 [tokens]
        self._scored: dict[str, list[torch.Tensor]] = {}

    def load(self) -> None:
        """Load the policy and, with a KL term, the reference. If they are sharded, only their shape: a rank knows its
        shards when it has joined the others.
        """
        from asyncspec.drafts import draft

        c = self.config
        self.model, self.shape = self._read(c.model.path, c.lora)
        if c.adapting:
            self.aux_layers = draft.aux_layers(c.speculation.method, resolve_path(c.draft_directory), self.shape)
        if c.rl.kl_coef > 0 and not self._base:
            self.reference, _ = self._read(c.model.reference_path or c.model.path, None)

    @property
    def scores(self) -> list[str]:
        """The names of a group's scores: under the policy, under the reference, and without the policy's adapters."""
        others = ["reference"] * (self.config.rl.kl_coef > 0) + ["base"] * (self.comparing and not self._base)
        return ["proximal", *others]

    @property
    def _base(self) -> bool:
        """Whether the reference is the policy without its adapters."""
        c = self.config
        return c.lora is not None and c.rl.kl_coef > 0 and c.model.reference_path in ("", c.model.path)

    def _read(self, path: str, adapters: Lora | None):
        from asyncspec.models import policy

        dtype, positions, directory = getattr(torch, self.config.model.dtype), self.config.positions, resolve_path(path)
        shape = check_policy(directory, self.config.model.backend)
        model = policy.cast(policy.skeleton(shape, positions, adapters), dtype)
        if not self.ranks.sharded:
            policy.fill(model, directory, self.device)
        return model.requires_grad_(False), shape

    def join(self, store_host: str, store_port: int, collective_s: float) -> None:
        """Connect to the other ranks, and load this rank's shards of policy and reference. Collective."""
        from asyncspec.models import policy

        c = self.config
        self.ranks.join(store_host, store_port, self.device, work.start_s(c), collective_s)
        for model, path in zip(self._models, (c.model.path, c.model.reference_path or c.model.path)):
            self.ranks.shard(model, trained=False)
            if self.ranks.sharded:
                policy.fill(model, resolve_path(path), self.device)
        self.ranks.meet("loaded", work.start_s(c))
        self._hold()

    @property
    def _models(self) -> list:
        return [self.model] if self.reference is None else [self.model, self.reference]

    def _hold(self) -> None:
        from asyncspec.models import lora

        self.parameters = lora.trained(self.model)
        self.layout = Layout.of(self.parameters, self.config.model.dtype)
        self._shares = {name: share(parameter) for name, parameter in self.parameters.items()}

    def keep(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's share of a whole tensor, in the dtype of the passes."""
        return tensor[self._shares[name]].to(self.parameters[name].dtype, copy=True)

    @torch.no_grad()
    def swap(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the policy's trained weights by what `keep` returned for each, or with one rank by whole tensors."""
        for name, parameter in self.parameters.items():
            local(parameter).copy_(tensors[name])

    def passes(self, group: m.Group, arrays: m.Arrays) -> int:
        """Return how many passes `add` makes for a group."""
        return len(self._divided(group, arrays))

    def _divided(self, group: m.Group, arrays: m.Arrays) -> list[Part]:
        used = {name: arrays[name] for name in ("tokens", "lengths", *EXPERTS) if name in arrays}
        return divide(Part(group.ticket.prompt_tokens, used), self.config.trainer.tokens_per_pass)

    @torch.no_grad()
    def add(self, group: m.Group, arrays: m.Arrays) -> Callable | None:
        """Run the policy over a group for each score.

        Collective: the other ranks must make as many passes, with groups of their own or with `add_nothing`.

        Returns:
            If `supervising` is set, which this call unsets: a callable that makes the draft's supervision from the
            first pass, to be called when there is time. Otherwise None.
        """
        from asyncspec.drafts.supervision import from_pass
        from asyncspec.models import packed

        temperature, supervision = self.config.sampling.temperature, None
        self._scored = {name: [] for name in self.scores}
        for part in self._divided(group, arrays):
            row = pack([part], self.device)
            keep, aux_layers = (self.config.draft.top_tokens, self.aux_layers) if self.supervising else (None, ())
            scores = packed.run(self.model, row, temperature, keep, aux_layers)
            if self.supervising:
                self.supervising, supervision = False, partial(from_pass, row, scores)
            self._scored["proximal"].append(scores.chosen.logprob_T)
            for name, found in self._others(row, temperature):
                self._scored[name].append(found.chosen.logprob_T)
        return supervision

    def _others(self, row: Row, temperature: float) -> Iterator[tuple[str, Scores]]:
        """Run a row for each score but the first. Collective."""
        from asyncspec.models import lora, packed

        row = row._replace(experts_LMK=None)
        for name in self.scores[1:]:
            if name == "reference" and self.reference is not None:
                yield name, packed.run(self.reference, row, temperature)
            else:
                with lora.disabled(self.model):
                    yield name, packed.run(self.model, row, temperature)

    @torch.no_grad()
    def add_nothing(self) -> None:
        """Take part in one pass of the other ranks. Collective."""
        from asyncspec.models import packed

        row = packed.empty_row(self.device)
        packed.run(self.model, row, 1.0)
        for _ in self._others(row, 1.0):
            pass

    def collect(self, tokens: int) -> np.ndarray:
        """Return the scores of the last group in each data rank, float32 [data ranks, scores, tokens], padded with
        zeros. Collective.

        Args:
            tokens: the number of response tokens in the largest of these groups.
        """
        values = torch.zeros(self.ranks.data_size, len(self.scores), tokens, device=self.device)
        for index, parts in enumerate(self._scored.values()):
            found = torch.cat(parts)
            values[self.ranks.data_rank, index, : len(found)] = found
        self._scored, self.comparing = {}, False
        for model in self._models:
            reset_fsdp_state(model)
        return self.ranks.sum_over_groups(values).cpu().numpy()
