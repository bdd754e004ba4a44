"""Generator, trainer and logprob actors that wait where a GPU would compute.

Their queues, order, lag and broadcasts are the real ones.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from asyncspec.actors.generator import Generator
from asyncspec.actors.logprob import Logprob
from asyncspec.actors.logprob_rank import LogprobRank
from asyncspec.actors.trainer import Trainer
from asyncspec.actors.trainer_rank import TrainerRank
from asyncspec.ledger import checkpoint
from asyncspec.mock.engine import MockEngine, MockModel
from asyncspec.models.parallel import Ranks
from asyncspec.rl.batch import Part
from asyncspec.rl.learner import Learner
from asyncspec.rl.scorer import Scorer
from asyncspec.wire import messages as m


class MockAccumulator:
    """Stands in for GradientAccumulator."""

    whole_step = False

    def __init__(self, model: MockModel, response_s: float, ranks: Ranks) -> None:
        self.model, self.response_s, self.ranks, self.updates = model, response_s, ranks, 0
        self.optimizer = torch.optim.AdamW(model.parameters())

    def state(self) -> dict:
        return {**checkpoint.learned(self.model, self.optimizer), "updates": self.updates}

    def restore(self, state: dict) -> None:
        self.updates = state["updates"]

    def clear(self) -> None:
        pass

    def advantages(self, groups: Sequence[tuple[m.Group, m.Arrays]]) -> list[None]:
        """Return no advantages: a mock learns nothing."""
        return [None] * len(groups)

    def add(self, group: m.Group, arrays: m.Arrays, advantage_G: None = None) -> list[list[list[Part]]]:
        """Return one round in which each rank gets an equal share of the group's responses."""
        whole = Part(group.ticket.prompt_tokens, {name: arrays[name] for name in ("tokens", "lengths")})
        responses, ranks = list(range(len(arrays["lengths"]))), self.ranks.data_size
        return [[[whole.of(responses[rank::ranks])] if responses[rank::ranks] else [] for rank in range(ranks)]]

    def flush(self) -> list[list[list[Part]]]:
        return []

    def run(self, parts: Sequence[Part], last: bool = True) -> None:
        time.sleep(self.response_s * sum(len(part.arrays["lengths"]) for part in parts))

    def step(self) -> dict[str, float]:
        self.ranks.sum_over_groups(torch.zeros(1))
        self.updates += 1
        with torch.no_grad():
            self.model.weight.fill_(self.updates)
        return {}


class MockLearner(Learner):
    def load(self) -> None:
        self.model = MockModel(self.config.mock.weights)

    def join(self, store_host: str, store_port: int, collective_s: float) -> None:
        c = self.config
        self.ranks.join(store_host, store_port, self.device, c.deployment.start_timeout_s, collective_s)
        # per response, with all ranks at work
        seconds = c.mock.train_s * c.mock.time_scale / (c.rl.groups_per_step * c.rl.group_size)
        self.accumulator = MockAccumulator(self.model, seconds * self.ranks.data_size, self.ranks)
        self._hold()


class MockGenerator(Generator):
    def make_engine(self) -> MockEngine:
        return MockEngine(self.config)


class MockTrainer(Trainer):
    learner_class = MockLearner

    def load(self) -> None:
        super().load()
        self.delay.seconds["broadcast"] = self.config.mock.prepare_s * self.config.mock.time_scale

    def save_policy(self, version: int | None = None) -> None:
        """Save nothing: a mock has no policy."""

    def save_best(self) -> None:
        """Save nothing, for the same reason."""


class MockTrainerRank(TrainerRank):
    learner_class = MockLearner


class MockScorer(Scorer):
    def __init__(self, *args) -> None:
        super().__init__(*args)
        c = self.config
        # per group, with all actors and ranks at work
        seconds = c.mock.logprob_s * c.mock.time_scale / c.rl.groups_per_step
        self.group_s = seconds * c.deployment.logprobs * self.ranks.data_size

    def load(self) -> None:
        self.model = MockModel(self.config.mock.weights)

    def join(self, store_host: str, store_port: int, collective_s: float) -> None:
        self.ranks.join(store_host, store_port, self.device, self.config.deployment.start_timeout_s, collective_s)
        self._hold()

    def passes(self, group: m.Group, arrays: m.Arrays) -> int:
        return 1

    def add(self, group: m.Group, arrays: m.Arrays) -> None:
        time.sleep(self.group_s)

    def add_nothing(self) -> None:
        pass


class MockLogprob(Logprob):
    scorer_class = MockScorer


class MockLogprobRank(LogprobRank):
    scorer_class = MockScorer
