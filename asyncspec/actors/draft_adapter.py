"""The draft adapter: keeps the draft aligned with the moving policy, in its own process, at low priority.

It trains on what the logprob actor offers (hidden states and target distributions, detached arrays) and broadcasts a draft
version every few optimizer steps. It holds no parameter of the policy and sends nothing to the trainer, so it cannot reach
learning; nobody waits for it.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import torch

from asyncspec import messages as m
from asyncspec.actors.base import Actor
from asyncspec.config import resolve_path

NICENESS = 10  # the draft gets the processor time that the others leave


class DraftAdapter(Actor):
    role = "draft_adapter"

    def __init__(self, spec) -> None:
        super().__init__(spec)
        self.published = 0

    def inbox_credits(self) -> int:
        return self.config.draft.groups_per_step

    def load(self) -> None:
        from asyncspec.models import eagle3, policy
        from asyncspec.models.draft_training import DraftTrainer

        os.nice(NICENESS)
        c = self.config
        shape = policy.PolicyShape.from_hf(resolve_path(c.model.path))
        self.draft = eagle3.load(resolve_path(c.draft_directory), shape).to(self.device)
        self.trainer = DraftTrainer(self.draft, partial(eagle3.draft_loss, unroll=c.draft.unroll), c.draft.lr)

    def connect(self, welcome: m.Welcome) -> set[str]:
        from asyncspec.weights import Layout, Publisher

        self.publisher = Publisher(
            welcome.store_host, welcome.store_port, "draft", self.name, self.device,
            Layout.of(dict(self.draft.named_parameters())))
        self.workers = [self.publisher]
        return {"draft"}

    def handle(self, message: m.Message) -> None:
        if isinstance(message, m.Membership):
            self.join(self.publisher, message)

    def turn(self) -> None:
        self.publisher.check()
        item = self.inbox.take()
        if item is None:
            self.wait(0.05)
            return
        supervision, arrays, _ = item
        tensors = [torch.from_numpy(arrays[k].astype("float32")).to(self.device) for k in ("features", "embeds", "target_logprobs")]
        with self.recorder.span("adapt", ticket=supervision.ticket_id, version=supervision.policy_version):
            loss, rates = self.trainer.step(*tensors, torch.from_numpy(arrays["mask"].copy()).to(self.device))
        self.counters |= {"draft/loss": loss, "draft/expected_acceptance_1": rates[0], "draft/updates": self.trainer.steps,
                          "draft/skipped": self.trainer.skipped}
        if self.trainer.steps % self.config.draft.publish_every == 0 and not self.publisher.busy:
            self.published += 1
            self.publisher.publish(self.published, dict(self.draft.named_parameters()), lambda: self.control.send(
                m.Publish("draft", self.published, supervision.policy_version)))

    def finish(self) -> None:
        from asyncspec.models import eagle3

        eagle3.save(self.draft, Path(self.spec.run_dir) / "checkpoint" / "draft")
