"""The policy's MTP module: the trainer trains it beside the policy and publishes it as the draft.

It learns from detached hidden states of the policy's own forward pass: its loss reaches no parameter of the policy.
"""

from __future__ import annotations

from asyncspec.config import Config, resolve_path
from asyncspec.drafts import draft
from asyncspec.drafts.supervision import from_pass
from asyncspec.drafts.training import DraftTrainer
from asyncspec.models.packed import Row, Scores
from asyncspec.rl.learner import Learner
from asyncspec.wire.layout import Layout, WholeSnapshot


class MTPTrainer:
    """Trains the MTP module on the policy's own forward passes."""

    def __init__(self, config: Config, learner: Learner, device: str) -> None:
        """
        Args:
            learner: has loaded the policy. From now on its checkpoints hold the module too.
        """
        self.config, self.learner, self.device = config, learner, device
        directory = resolve_path(config.draft_directory)
        loaded = draft.load("mtp", directory, learner.shape, learner.model, config.positions)
        loss = loaded.loss(config.draft.unroll, config.sampling.temperature)
        self.trainer = DraftTrainer(loaded.module.to(device), loss, config.draft.lr)
        self.layout = Layout.of(dict(self.module.named_parameters()))
        self.groups = 0  # groups trained on in this step
        self._due = config.draft.publish_every  # the module's optimizer step after which it is published next
        learner.more_state = lambda: {"mtp": self.trainer.state()}

    @property
    def module(self):
        return self.trainer.draft

    def restore(self, state: dict) -> None:
        self.trainer.restore(state["mtp"])

    def begin_step(self) -> None:
        self.groups = 0

    def train(self, row: Row, scores: Scores) -> dict[str, float]:
        """Train on a forward pass of the policy, prompt by prompt, up to `draft.groups_per_step` prompts in a step.

        Returns:
            Counters.
        """
        counters: dict[str, float] = {}
        for index in range(len(row.packing.segments)):
            if self.groups == self.config.draft.groups_per_step:
                break
            self.groups += 1
            loss, rates = self.trainer.step(from_pass(row, scores, index))
            counters = {
                "draft/loss": loss,
                "draft/expected_acceptance_1": rates[0],
                "draft/updates": self.trainer.steps,
                "draft/skipped": self.trainer.skipped,
            }
        return counters

    def due(self) -> bool:
        """Whether to publish the module now. If so, it is next due `draft.publish_every` optimizer steps later."""
        if self.trainer.steps < self._due:
            return False
        self._due = self.trainer.steps + self.config.draft.publish_every
        return True

    def snapshot(self) -> WholeSnapshot:
        return WholeSnapshot(self.layout, dict(self.module.named_parameters()), self.device)
