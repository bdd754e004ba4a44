"""The policy's MTP module: the trainer trains it beside the policy and publishes it as the draft.

It learns from detached hidden states of the policy's own forward pass: its loss reaches no parameter of the policy.

Shape suffixes: G samples of a group, L positions, V vocabulary, D model dimension.
"""

from __future__ import annotations

from asyncspec.config import Config, resolve_path
from asyncspec.drafts import draft
from asyncspec.drafts.supervision import from_pass
from asyncspec.drafts.training import DraftTrainer
from asyncspec.rl.learner import Learner
from asyncspec.wire.weights import Layout, WholeSnapshot


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

    def train(self, tokens_GL, mask_GL, logits_GLV, hidden_GLD) -> dict[str, float]:
        """Train on a forward pass of the policy; skip it after `draft.groups_per_step` in a step. Return counters."""
        if self.groups == self.config.draft.groups_per_step:
            return {}
        self.groups += 1
        supervision = from_pass(
            tokens_GL,
            mask_GL,
            logits_GLV,
            features_BLE=hidden_GLD,
            embeds_BLD=self.learner.model.tok_embeddings(tokens_GL),
            temperature=self.config.sampling.temperature,
        )
        loss, rates = self.trainer.step(supervision)
        return {
            "draft/loss": loss,
            "draft/expected_acceptance_1": rates[0],
            "draft/updates": self.trainer.steps,
            "draft/skipped": self.trainer.skipped,
        }

    def due(self) -> bool:
        """Whether to publish the module now. If so, it is next due `draft.publish_every` optimizer steps later."""
        if self.trainer.steps < self._due:
            return False
        self._due = self.trainer.steps + self.config.draft.publish_every
        return True

    def snapshot(self) -> WholeSnapshot:
        parameters = dict(self.module.named_parameters())
        return WholeSnapshot(Layout.of(parameters), parameters, self.device)
