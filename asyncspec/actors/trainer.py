"""The trainer: accumulates the gradient as groups arrive in ticket order, steps, publishes the next version.

- Step s trains exactly the tickets s * G .. s * G + G - 1, in that order, whatever order they arrive in.
- A group outside the policy lag is refused with `LagError`, before it touches the gradient.
- Losses are summed over tokens; gradients are divided once a step by the number of tokens.
- With speculation.method=mtp it also trains the policy's MTP module, on detached hidden states of the same forward pass: the
  module's loss reaches no parameter of the policy.
- Every so many steps it writes a checkpoint to resume from, in the background.
- Its wall time is a sequence without gaps: waits (attributed to causes later), data, train, prepare, and the rest.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import torch

from asyncspec import messages as m
from asyncspec import checkpoint
from asyncspec.actors.base import Actor, StopRequested
from asyncspec.config import Config, OptimizerConfig, RLConfig, resolve_path
from asyncspec.lag import check_lag
from asyncspec.timing.spans import now

MOST_SKIPPED = 3  # steps in a row that may be left out because their gradient is not finite


class GradientAccumulator:
    """One policy update from any number of groups, added one at a time.

    The gradient is that of sum(token losses) / number of tokens over all groups added, however they were divided.
    """

    def __init__(self, model, optimizer_config: OptimizerConfig, rl: RLConfig, temperature: float) -> None:
        self.model, self.rl, self.temperature, self.cfg = model, rl, temperature, optimizer_config
        o = optimizer_config
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda s: min(1.0, (s + 1) / max(1, o.warmup_steps)))
        self.clear()

    def state(self) -> dict:
        """All that the next step depends on; `restore` takes it back."""
        return {**checkpoint.learned(self.model, self.optimizer), "updates": self.schedule.last_epoch}

    def restore(self, state: dict) -> None:
        """Take back what `checkpoint.load` has read into `state`. The learning rate is that of the configuration, as far along its schedule."""
        self.schedule.last_epoch = updates = state["updates"]
        self.schedule._last_lr = [base * factor(updates) for base, factor in zip(self.schedule.base_lrs, self.schedule.lr_lambdas)]
        for group, lr in zip(self.optimizer.param_groups, self.schedule._last_lr):
            group["lr"] = lr

    def clear(self) -> None:
        """Forget the groups added since the last step."""
        self.optimizer.zero_grad()
        self.tokens, self.tokens_with_signal, self.sums = 0, 0, defaultdict(float)

    def add(self, group: m.Group, arrays: m.Arrays) -> tuple[torch.Tensor, ...] | None:
        """Forward and backward over one group.

        Returns:
            tokens_GL, mask_GL, logits_GLV and hidden_GLD of the forward pass, detached; None if the group has no gradient.
        """
        from asyncspec.models.policy import hidden_states
        from asyncspec.rl.batch import padded, response_logprobs
        from asyncspec.rl.grpo import group_advantages, policy_loss

        device = self.model.lm_head.weight.device
        advantage_G = group_advantages(group.rewards, self.rl.advantage)
        tokens = int(arrays["lengths"].sum())
        self.tokens += tokens
        if not advantage_G.any() and self.rl.kl_coef == 0:
            return None  # all samples alike: the gradient is exactly zero
        self.tokens_with_signal += tokens
        lengths_G = torch.from_numpy(arrays["lengths"].astype(np.int64))
        tokens_GL, mask_GL = padded(group.ticket.prompt_tokens, arrays, device)
        proximal_T, behaviour_T = (torch.from_numpy(arrays[k].copy()).to(device) for k in ("proximal", "behaviour"))
        hidden_GLD, _ = hidden_states(self.model, tokens_GL)
        logits_GLV = self.model.lm_head(hidden_GLD)
        logprob_T = response_logprobs(logits_GLV, tokens_GL, mask_GL, self.temperature)
        reference_T = torch.from_numpy(arrays["reference"].copy()).to(device) if "reference" in arrays else None
        loss, stats = policy_loss(
            logprob_T, proximal_T, behaviour_T, advantage_G.repeat_interleave(lengths_G).to(device), reference_T, self.rl)
        loss.backward()
        for name, value in stats.items():
            self.sums[name] += float(value)
        return tokens_GL, mask_GL, logits_GLV.detach(), hidden_GLD.detach()

    def step(self) -> dict[str, float]:
        """Divide once, clip, update; returns the gradient norm, and means over the tokens of groups with signal.

        Raises:
            FloatingPointError: the gradient is not finite; nothing was changed.
        """
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= self.tokens
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.max_grad_norm))
        if not np.isfinite(norm):
            raise FloatingPointError(f"gradient norm {norm}: the step was not taken")
        stats = {name: value / self.tokens_with_signal for name, value in self.sums.items()}
        stats |= {"grad/norm": norm, "optimizer/lr": self.schedule.get_last_lr()[0]}
        self.optimizer.step()
        self.schedule.step()
        self.clear()
        return stats


def save_step(directory: Path, step: int, groups: list[tuple[m.Group, m.Arrays]]) -> Path:
    """Keep what a step was to be trained on: arrays "TICKET/NAME", and the groups as JSON under "groups"."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"step-{step}.npz"
    arrays = {f"{group.ticket.ticket_id}/{name}": array for group, arrays in groups for name, array in arrays.items()}
    np.savez(file, groups=np.array(msgspec.json.encode([group for group, _ in groups]).decode()), **arrays)
    return file


class Trainer(Actor):
    role = "trainer"

    def __init__(self, spec) -> None:
        super().__init__(spec)
        self.threads = self.config.trainer.threads
        self.step_index = max(0, spec.resume)
        self.saved_version = self.step_index  # of the newest checkpoint begun
        self.arrived: dict[int, tuple[m.Group, m.Arrays]] = {}  # by ticket, until its turn
        self.step_start = 0.0
        self.next_ticket = self.step_index * self.config.rl.groups_per_step
        self.skipped = self.skipped_in_a_row = 0  # steps whose gradient was not finite

    def inbox_credits(self) -> int:
        return (self.config.policy_lag + 1) * self.config.rl.groups_per_step

    def load(self) -> None:
        from asyncspec.models import policy

        c: Config = self.config
        self.model, self.shape = policy.load(resolve_path(c.model.path), self.device)
        self.accumulator = GradientAccumulator(self.model, c.trainer.optimizer, c.rl, c.sampling.temperature)
        self.mtp, self.mtp_due = None, c.draft.publish_every
        if c.draft_trainer == "trainer":
            from asyncspec.drafts import draft
            from asyncspec.drafts.training import DraftTrainer

            mtp = draft.load("mtp", resolve_path(c.draft_directory), self.shape, self.model)
            self.mtp = DraftTrainer(mtp.module.to(self.device), mtp.loss(c.draft.unroll, c.sampling.temperature), c.draft.lr)
        self.load_checkpoint()

    def load_checkpoint(self) -> None:
        """Go on from where the run was, if it was begun before."""
        run_dir = Path(self.spec.run_dir)
        self.checkpoints = checkpoint.Checkpoints(run_dir, "trainer", self.config.checkpoint.keep)
        if self.step_index:
            self._restore(checkpoint.where(run_dir, "trainer", self.step_index))

    def connect(self, welcome: m.Welcome) -> set[str]:
        from asyncspec.weights import Layout, Publisher

        self.publisher = Publisher(
            welcome.store_host, welcome.store_port, "policy", self.name, self.device,
            Layout.of(dict(self.model.named_parameters())), self.delay.seconds.get("broadcast", 0.0))
        self.publishers = {"policy": self.publisher}
        if self.step_index:
            self.publisher.begin_with(m.Publish("policy", self.step_index), dict(self.model.named_parameters()))
        if self.mtp is not None:
            self.publishers["draft"] = Publisher(
                welcome.store_host, welcome.store_port, "draft", self.name, self.device,
                Layout.of(dict(self.mtp.draft.named_parameters())))
            if self.step_index:
                self.publishers["draft"].begin_with(
                    m.Publish("draft", self.step_index, self.step_index), dict(self.mtp.draft.named_parameters()))
        self.workers = list(self.publishers.values())
        return set(self.publishers)

    def handle(self, message: m.Message) -> None:
        if isinstance(message, m.Membership):
            self.join(self.publishers[message.kind], message)

    def turn(self) -> None:
        """One optimizer step, waits included."""
        self._tend_checkpoint()
        if self.step_index == self.config.steps:
            self.publisher.check()
            self.idle = True
            self.wait(0.05)
            return
        step, start = self.step_index, self.step_start or now()
        self.mtp_groups = 0
        self.kept: list[tuple[m.Group, m.Arrays]] = []
        self.waits, self.busy = [], {"data": 0.0, "train": 0.0, "prepare": 0.0}
        records, versions = [], []
        count = self.config.rl.groups_per_step
        for ticket_id in range(step * count, (step + 1) * count):
            group, arrays = self._next_group(ticket_id)
            self.next_ticket = ticket_id + 1
            self.pump()
            if self.stopping:
                raise StopRequested
            with self._part("train", step, ticket_id):
                records.append(self._train(step, group, arrays))
            versions.append(arrays["versions"])
        # Before the update, so that nothing can fail between it and its report.
        with self._part("prepare", step):
            while self.publisher.busy:
                self.publisher.check()
                self.wait_step(0.005)
            self.publisher.check()
        with self._part("train", step):
            stats = self._update(step)
        lags = step - np.concatenate(versions)
        stats |= {"lag/mean": float(lags.mean()), "lag/max": float(lags.max())}
        with self._part("prepare", step):
            self.publisher.publish(m.Publish("policy", step + 1), dict(self.model.named_parameters()), self.control.send)
            self.fault("send")
            if self.mtp is not None and not self.publishers["draft"].busy and self.mtp.steps >= self.mtp_due:
                self.mtp_due = self.mtp.steps + self.config.draft.publish_every
                self.publishers["draft"].publish(
                    m.Publish("draft", step + 1, step), dict(self.mtp.draft.named_parameters()), self.control.send)
        end = now()
        self.control.send(m.StepDone(step, start, end, self.waits, self.busy, stats, records))
        self.step_index, self.step_start = step + 1, end
        every = self.config.checkpoint.every
        if every and self.step_index - self.saved_version >= every and not self.checkpoints.busy:
            with self.recorder.span("checkpoint", version=self.step_index):
                self._save()

    def _state(self) -> dict:
        """What a run goes on from; the order of the data and the samples' seeds are functions of the run's seed."""
        state = {"trainer": self.accumulator.state(), "skipped": [self.skipped, self.skipped_in_a_row]}
        return state | ({"mtp": self.mtp.state()} if self.mtp is not None else {})

    def _restore(self, path: Path) -> None:
        state = self._state()
        checkpoint.load(path, state)
        self.accumulator.restore(state["trainer"])
        self.skipped, self.skipped_in_a_row = state["skipped"]
        if self.mtp is not None:
            self.mtp.restore(state["mtp"])

    def _save(self) -> None:
        self.saved_version = self.step_index
        try:
            self.checkpoints.save(self.step_index, self._state())
            self.fault("checkpoint")
        except OSError as error:
            self._not_saved(error)

    def _tend_checkpoint(self, wait: bool = False) -> None:
        try:
            if (version := self.checkpoints.saved(wait)) is not None:
                self.control.send(m.Checkpointed(version))
        except OSError as error:
            self._not_saved(error)

    def _not_saved(self, error: OSError) -> None:
        self.counters["checkpoint/failed"] = self.counters.get("checkpoint/failed", 0) + 1
        self.control.send(m.Notice(self.name, f"{error}; the run goes on, the checkpoints before it are as they were"))

    def finish(self) -> None:
        """Write the policy, and a checkpoint to resume from."""
        self.save_policy()
        self._tend_checkpoint(wait=True)
        self.accumulator.clear()  # of a step that was begun
        if self.saved_version < self.step_index and not self._code:
            self._save()
            self._tend_checkpoint(wait=True)

    def save_policy(self) -> None:
        """Write the policy as a Hugging Face directory."""
        from asyncspec.models import policy

        directory = Path(self.spec.run_dir) / "checkpoint" / "policy"
        policy.save(self.model, self.shape, directory, resolve_path(self.config.model.path), self.mtp and self.mtp.draft)
        self.log(f"policy of version {self.step_index} written to {directory}")

    def _train(self, step: int, group: m.Group, arrays: m.Arrays) -> m.GroupRecord:
        versions = arrays["versions"]
        check_lag(step, self.config.policy_lag, group.ticket.ticket_id, (int(versions.min()), int(versions.max())))
        self.kept.append((group, arrays))
        self.delay("train")
        self.fault("work")
        forward = self.accumulator.add(group, arrays)
        if self.mtp is not None and forward is not None and self.mtp_groups < self.config.draft.groups_per_step:
            self.mtp_groups += 1
            self._train_mtp(*forward)
        return m.GroupRecord(
            group.ticket.ticket_id, group.generator, float(np.mean(group.rewards)), len(set(group.rewards)) > 1,
            arrays["lengths"].tolist(), int(versions.min()), int(versions.max()), group.proximal_version,
            group.verifications, group.proposed, group.accepted, group.truncated, group.draft_version, group.phases)

    def _update(self, step: int) -> dict[str, float]:
        """The optimizer's step; one whose gradient is not finite is left out, kept for inspection and reported.

        Raises:
            FloatingPointError: so many in a row were not finite that nothing is learned any more.
        """
        try:
            stats = self.accumulator.step()
            self.skipped_in_a_row = 0
            return stats
        except FloatingPointError as error:
            self.skipped += 1
            self.skipped_in_a_row += 1
            file = save_step(Path(self.spec.run_dir) / "skipped", step, self.kept)
            self.control.send(m.Notice(self.name, f"step {step} left the policy as it was: {error}; its groups are in {file}"))
            self.accumulator.clear()
            if self.skipped_in_a_row == MOST_SKIPPED:
                raise FloatingPointError(f"{MOST_SKIPPED} steps in a row without a finite gradient; their groups are in {file.parent}; a smaller "
                                         f"trainer.optimizer.lr (now {self.config.trainer.optimizer.lr:g}) is the usual cure") from None
            return {"grad/skipped": self.skipped}

    def _train_mtp(self, tokens_GL, mask_GL, logits_GLV, hidden_GLD) -> None:
        from asyncspec.drafts.supervision import from_pass

        supervision = from_pass(self.model, tokens_GL, mask_GL, logits_GLV, hidden_GLD, self.config.sampling.temperature)
        loss, rates = self.mtp.step(supervision)
        self.counters |= {"draft/loss": loss, "draft/expected_acceptance_1": rates[0], "draft/updates": self.mtp.steps,
                          "draft/skipped": self.mtp.skipped}

    def _next_group(self, ticket_id: int) -> tuple[m.Group, m.Arrays]:
        start = now()
        self._sort_inbox()
        if ticket_id not in self.arrived:
            while ticket_id not in self.arrived:
                self.publisher.check()
                self.wait_step()
                self._sort_inbox()
            end = now()
            self.waits.append(m.Wait(ticket_id, start, end))
            self.recorder.add("wait", start, end, self.step_index, ticket_id)
        else:
            self.busy["data"] += now() - start
        return self.arrived.pop(ticket_id)

    def _sort_inbox(self) -> None:
        while (item := self.inbox.take()) is not None:
            group, arrays, _ = item
            ticket_id = group.ticket.ticket_id
            self.control.send(m.Arrived(ticket_id))
            # A ticket that was issued again because its generator died may come twice: the first one counts.
            if ticket_id in self.arrived or ticket_id < self.next_ticket:
                self.counters["tickets/duplicates"] = self.counters.get("tickets/duplicates", 0) + 1
            else:
                self.arrived[ticket_id] = (group, arrays)

    @contextmanager
    def _part(self, name: str, step: int, ticket: int = -1):
        start = now()
        yield
        end = now()
        self.busy[name] += end - start
        self.recorder.add(name, start, end, step, ticket, step)
