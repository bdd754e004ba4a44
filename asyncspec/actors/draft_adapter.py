"""The draft adapter: keeps the draft aligned with the moving policy, in its own process, at low priority.

It trains on what the logprob actor offers (detached arrays of hidden states and target distributions) and broadcasts a
draft version every few optimizer steps. It holds no parameter of the policy and sends nothing to the trainer, so it
cannot affect learning. Nobody waits for it. Whenever the trainer has written a checkpoint, it writes its own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from asyncspec.actors.base import Actor
from asyncspec.config import resolve_path
from asyncspec.errors import Damaged
from asyncspec.ledger import checkpoint
from asyncspec.wire import messages as m

if TYPE_CHECKING:
    from asyncspec.drafts.draft import Draft
    from asyncspec.drafts.training import DraftTrainer
    from asyncspec.wire.layout import Layout
    from asyncspec.wire.weights import Publisher

NICENESS = 10  # the adapter gets the processor time that the other actors leave


class DraftAdapter(Actor):
    role = "draft_adapter"
    takes = (m.Supervision,)

    def __init__(self, spec) -> None:
        super().__init__(spec)
        self.published = 0  # the newest draft version
        self.policy_version = 0  # the policy version that the draft was last trained for
        self.draft: Draft | None = None  # set by `load`
        self.module = None
        self.trainer: DraftTrainer | None = None
        self.checkpoints: checkpoint.Checkpoints | None = None
        self.publisher: Publisher | None = None  # set by `connect`
        self.layout: Layout | None = None

    def inbox_credits(self) -> int:
        return 2  # further offers wait at the sender, which drops the oldest

    def load(self) -> None:
        from asyncspec.drafts import draft
        from asyncspec.drafts.training import DraftTrainer
        from asyncspec.models import policy

        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
        c, run_dir = self.config, Path(self.spec.run_dir)
        shape = policy.PolicyShape.from_hf(resolve_path(c.model.path))
        self.checkpoints = checkpoint.Checkpoints(
            run_dir, "draft", c.checkpoint.keep, visit=lambda: self.fault("checkpoint")
        )
        while True:
            self.draft = draft.load(c.speculation.method, resolve_path(c.draft_directory), shape, positions=c.positions)
            self.module = self.draft.module.to(self.device)
            loss = self.draft.loss(c.draft.unroll, c.sampling.temperature)
            self.trainer = DraftTrainer(self.module, loss, c.draft.lr)
            if (found := checkpoint.newest(run_dir, "draft", self.log)) is None:
                return
            state = self._state()
            try:
                checkpoint.load(found[1], state)
            except Damaged as error:  # the one before is the newest now
                self.log(str(error))
                continue
            self.trainer.restore(state["trainer"])
            self.published, self.policy_version = state["versions"]
            return

    def _state(self) -> dict:
        return {"trainer": self.trainer.state(), "versions": [self.published, self.policy_version]}

    def connect(self, welcome: m.Welcome) -> set[str]:
        from asyncspec.wire.layout import Layout
        from asyncspec.wire.weights import Publisher

        self.layout = Layout.of(dict(self.module.named_parameters()), self.config.model.dtype)
        self.publisher = Publisher(welcome.store_host, welcome.store_port, "draft", self.name, self.device, self.layout)
        if self.published:  # newer than what the generators have, also from a predecessor
            self.published = max(self.published, welcome.versions["draft"] + 1)
            self.publisher.begin_with(m.Publish("draft", self.published, self.policy_version), self._snapshot())
        else:
            self.published = welcome.versions["draft"]
        self.workers = [self.publisher]
        return {"draft"}

    def _snapshot(self):
        from asyncspec.wire.layout import WholeSnapshot

        return WholeSnapshot(self.layout, dict(self.module.named_parameters()), self.device)

    def handle(self, message: m.Message) -> None:
        if isinstance(message, m.Membership):
            self.join(self.publisher, message)
        elif isinstance(message, m.Checkpointed) and not self.checkpoints.busy:
            self._checkpoint()

    def turn(self) -> None:
        from asyncspec.drafts.supervision import unpack

        self._tend_checkpoint()
        item = self.inbox.take()
        if item is None:
            self.wait(0.05)
            return
        supervision, arrays, *_ = item
        self.fault("work")
        with self.recorder.span("adapt", ticket=supervision.ticket_id, version=supervision.policy_version):
            loss, rates = self.trainer.step(unpack(arrays, self.device))
        self.policy_version = supervision.policy_version
        self.counters |= {
            "draft/loss": loss,
            "draft/expected_acceptance_1": rates[0],
            "draft/updates": self.trainer.steps,
            "draft/skipped": self.trainer.skipped,
        }
        if self.trainer.steps % self.config.draft.publish_every == 0 and not self.publisher.busy:
            self.published += 1
            self.publisher.publish(
                m.Publish("draft", self.published, self.policy_version, self.trainer.expected()),
                self._snapshot(),
                self.control.send,
            )
            self.fault("send")

    def _checkpoint(self) -> None:
        """Begin a checkpoint, under the policy version that the draft was last trained for."""
        self._tend_checkpoint()  # the one before may have ended in this turn
        try:
            self.checkpoints.save(self.policy_version, self._state())
        except OSError as error:
            self.log(str(error))

    def _tend_checkpoint(self, wait: bool = False) -> None:
        try:
            self.checkpoints.saved(wait)
        except OSError as error:
            self.log(str(error))

    def finish(self) -> None:
        self._tend_checkpoint(wait=True)
        if self.trainer.steps and not self._code:
            self._checkpoint()
            self._tend_checkpoint(wait=True)
        folder = Path(self.spec.run_dir) / "checkpoint" / "draft"
        try:
            self.draft.save(folder, resolve_path(self.config.model.path), self.policy_version)
        except OSError as error:
            self.control.send(m.Notice(self.name, f"the draft was not written: {error}"))
