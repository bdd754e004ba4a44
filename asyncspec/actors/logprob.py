"""The logprob actor: one pass of the target over each finished group.

It adds proximal logprobs (under the newest version it has, which is at least every version in the group) and, with a KL
term, reference logprobs; and from the same pass offers the draft adapter its supervision. It offers only when no other group
waits here, after the group has left for the trainer; where the adapter is behind, what has waited longest for it is dropped and
counted: the trainer never waits for the draft.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Callable

import numpy as np
import torch

from asyncspec import messages as m
from asyncspec.actors.base import Actor
from asyncspec.config import resolve_path
from asyncspec.timing.spans import now


class Logprob(Actor):
    role = "logprob"

    def __init__(self, spec) -> None:
        super().__init__(spec)
        self.threads = self.config.trainer.logprob_threads
        self.version, self.swapped, self.looked = 0, 0.0, 0.0
        self.waiting: deque[tuple[m.Group, m.Arrays, float]] = deque()
        self.offered: tuple[int, int, int] = (-1, 0, 0)  # the newest step of which groups were offered; how many, and bytes

    def inbox_credits(self) -> int:
        return self.config.rl.groups_per_step

    def load(self) -> None:
        from asyncspec.drafts import draft
        from asyncspec.models import policy

        c = self.config
        self.model, self.shape = policy.load(resolve_path(c.model.path), self.device)
        policy.cast(self.model, getattr(torch, c.trainer.dtype)).requires_grad_(False)
        if c.adapting:
            self.aux_layers = draft.aux_layers(c.speculation.method, resolve_path(c.draft_directory), self.shape)
        self.reference = None
        if c.rl.kl_coef > 0:
            self.reference, _ = policy.load(resolve_path(c.model.reference_path or c.model.path), self.device)
            policy.cast(self.reference, getattr(torch, c.trainer.dtype)).requires_grad_(False)

    def connect(self, welcome: m.Welcome) -> set[str]:
        from asyncspec.weights import Layout, Receiver

        self.to_trainer = self.outbox("trainer", welcome)
        self.to_adapter = None
        if self.config.adapting:
            self.counters |= {"draft/groups_dropped": 0, "draft/megabytes": 0.0}
            self.to_adapter = self.outbox("draft_adapter", welcome)
        self._received: deque[int] = deque()
        self.receiver = Receiver(
            welcome.store_host, welcome.store_port, "policy", self.name, self.device,
            Layout.of(dict(self.model.named_parameters())), self._received.append)
        self.workers = [self.receiver]
        return {"policy"}

    def handle(self, message: m.Message) -> None:
        if isinstance(message, m.Membership) and message.kind == "draft":  # the draft adapter is gone
            if self.to_adapter is not None:
                self.outboxes.remove(self.to_adapter)
                self.to_adapter.close()
                self.to_adapter = None
        elif isinstance(message, m.Membership):
            self.join(self.receiver, message)
        elif isinstance(message, m.Receive):
            self.receiver.expect(message.version, message.epoch)
            self.fault("receive")

    def turn(self) -> None:
        while self._received:
            self.control.send(m.Received(self.name, "policy", self._received.popleft()))
        self._swap_weights()
        while (item := self.inbox.take()) is not None:
            group, arrays, _ = item
            # The inbox is looked into only between two groups: one that came meanwhile has been waiting here since then.
            self.waiting.append((group, arrays, max(group.phases[-1].end, self.looked)))
        self.looked = now()
        for index, (_, arrays, _) in enumerate(self.waiting):
            if int(arrays["versions"].max()) <= self.version:
                item = self.waiting[index]
                del self.waiting[index]
                self._process(*item)
                return
        self.wait(0.005 if self.waiting else 0.02)

    def _swap_weights(self) -> None:
        if (new := self.receiver.take()) is not None:
            self.version, tensors = new
            self.fault("swap")
            with self.recorder.span("swap policy", version=self.version), torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    parameter.copy_(tensors[name])
            self.swapped = now()

    def _process(self, group: m.Group, arrays: m.Arrays, arrived: float) -> None:
        start, mark, ticket = now(), self.recorder.mark(), group.ticket
        self.delay("logprob")
        self.fault("work")
        # Weights that came while the group lay here are what it waited for, if it needed them.
        needed = int(arrays["versions"].max()) == self.version and self.swapped > arrived
        waited_until = self.swapped if needed else arrived
        supervision = self.score(group, arrays, self._wants_supervision(ticket.step))
        end = now()
        self.recorder.add("logprob", start, end, ticket.step, ticket.ticket_id, self.version, mark)
        phases = [*group.phases, m.Phase("logprob_weights", arrived, waited_until),
                  m.Phase("logprob_queue", waited_until, start), m.Phase("logprob", start, end)]
        self.to_trainer.put(
            m.Group(ticket, group.generator, group.rewards, group.truncated, group.verifications, group.proposed,
                    group.accepted, group.draft_version, phases, self.version), arrays)
        self.fault("send")
        if supervision is not None:
            with self.recorder.span("offer", ticket.step, ticket.ticket_id, self.version):
                self._offer(ticket, supervision())

    @torch.inference_mode()
    def score(self, group: m.Group, arrays: m.Arrays, supervising: bool) -> Callable | None:
        """The target's pass over a group: adds proximal and, with a KL term, reference logprobs to its arrays.

        Returns:
            With `supervising`, what makes the draft's supervision from the first pass, once there is time for it.
        """
        from asyncspec.drafts.supervision import from_pass
        from asyncspec.models.policy import hidden_states
        from asyncspec.rl.batch import padded, passes, response_logprobs

        temperature, supervision = self.config.sampling.temperature, None
        scored: dict[str, list] = {"proximal": []} | ({} if self.reference is None else {"reference": []})
        for part in passes(group.ticket.prompt_tokens, arrays, self.config.trainer.tokens_per_pass):
            tokens_GL, mask_GL = padded(group.ticket.prompt_tokens, part, self.device)
            wanted = supervising and supervision is None
            hidden_GLD, features_GLE = hidden_states(self.model, tokens_GL, None, self.aux_layers if wanted else ())
            logits_GLV = self.model.lm_head(hidden_GLD).float()
            scored["proximal"].append(response_logprobs(logits_GLV, tokens_GL, mask_GL, temperature).cpu().numpy())
            if self.reference is not None:
                reference_GLV = self.reference.lm_head(hidden_states(self.reference, tokens_GL)[0]).float()
                scored["reference"].append(response_logprobs(reference_GLV, tokens_GL, mask_GL, temperature).cpu().numpy())
            if wanted:
                supervision = torch.inference_mode()(partial(from_pass, self.model, tokens_GL, mask_GL, logits_GLV, features_GLE, temperature))
        arrays |= {name: np.concatenate(parts) for name, parts in scored.items()}
        return supervision

    def _wants_supervision(self, step: int) -> bool:
        if self.to_adapter is None or self.waiting:
            return False
        newest, groups, size = self.offered
        d, actors = self.config.draft, self.config.deployment.logprobs  # which offer a share each
        return step > newest or (step == newest and groups * actors < d.groups_per_step and size * actors < d.bytes_per_step)

    def _offer(self, ticket: m.Ticket, supervision) -> None:
        from asyncspec.drafts.supervision import pack, size

        d = self.config.draft
        arrays = pack(supervision, d.top_tokens, d.window, np.random.default_rng([self.config.seed, ticket.ticket_id]))
        newest, groups, offered = self.offered if self.offered[0] == ticket.step else (ticket.step, 0, 0)
        self.offered = (newest, groups + 1, offered + size(arrays))
        self.counters["draft/megabytes"] += size(arrays) / 1e6
        self.counters["draft/groups_dropped"] += self.to_adapter.offer(
            m.Supervision(ticket.ticket_id, self.version), arrays, d.bytes_per_step)
