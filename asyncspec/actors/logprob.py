"""The logprob actor: runs the policy once over each finished group.

It adds proximal logprobs (under its newest version, which is no older than any version in the group) and, with a KL
term, reference logprobs. From the same pass it makes supervision and offers it to the draft adapter, after the group
has left for the trainer and only while no other group waits. If the adapter is behind, the oldest offer is dropped and
counted: the trainer never waits for the draft.

With logprob.ranks above 1 it leads the ranks that hold the policy together, see logprob_rank.py.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable

import msgspec
import numpy as np

from asyncspec.actors.base import Actor, first_name
from asyncspec.actors.team import Team
from asyncspec.config.topology import rank_of
from asyncspec.deadlines import COLLECTIVE_S
from asyncspec.rl.scorer import Scorer
from asyncspec.timing.spans import now
from asyncspec.wire import messages as m
from asyncspec.wire.transport import Outbox
from asyncspec.wire.weights import Receiver

# The leading rank's orders to the others, see logprob_rank.py.
SUPERVISE, COMPARE, COLLECT, SWAP = "supervise", "compare", "collect", "swap"
COMPARED_EVERY = 10  # optimizer steps between two groups that are also scored without the policy's adapters


def turns(groups: int, step: int, index: int, actors: int) -> int:
    """Return how many groups of a step one of several logprob actors offers to the draft adapter. All of them together
    offer `groups`. What does not divide goes to other actors in each step.
    """
    return groups // actors + ((step + index) % actors < groups % actors)


class PolicyHolder(Actor):
    """An actor that holds a policy, or its share of one, and receives new versions."""

    scorer_class = Scorer

    def __init__(self, spec) -> None:
        super().__init__(spec)
        self.threads = self.config.logprob.threads
        self.scorer = self.scorer_class(self.config, self.device, *rank_of(first_name(spec.name)))
        self.receiver: Receiver | None = None  # set by `connect`
        self._received: deque[int] = deque()  # versions that have arrived

    def load(self) -> None:
        self.scorer.load()

    def connect(self, welcome: m.Welcome) -> set[str]:
        self.scorer.join(welcome.store_host, welcome.store_port, COLLECTIVE_S)
        self.receiver = Receiver(
            welcome.store_host,
            welcome.store_port,
            "policy",
            me=self.name,
            device=self.device,
            layout=self.scorer.layout,
            received=self._received.append,
            keep=self.scorer.keep if self.scorer.ranks.size > 1 else None,
        )
        self.using["policy"] = 0
        self.workers = [self.receiver]
        return {"policy"}

    def handle(self, message: m.Message) -> None:
        if isinstance(message, m.Membership):
            self.join(self.receiver, message)
        elif isinstance(message, m.Receive):
            self.receiver.expect(message.version, message.epoch, message.catch_up)
            self.fault("receive")

    def tell_received(self) -> list[m.Received]:
        """Report to the controller the versions that arrived since the last call. Return these messages."""
        told = [m.Received(self.name, "policy", self._received.popleft()) for _ in range(len(self._received))]
        for message in told:
            self.control.send(message)
        return told


class Logprob(PolicyHolder):
    """Scores groups on their way from a generator to the trainer."""

    role = "logprob"
    takes = (m.Group, m.Received)

    def __init__(self, spec) -> None:
        super().__init__(spec)
        self.team = Team(self, self.scorer.ranks)
        self.to_trainer: Outbox | None = None  # set by `connect`
        self.to_adapter: Outbox | None = None  # None also if no draft is adapted, or no longer
        self.version, self.swapped, self.looked = 0, 0.0, 0.0
        self.waiting: deque[tuple[m.Group, m.Arrays, float]] = deque()
        # newer version -> the other ranks that have received their whole share
        self.complete: defaultdict[int, set[str]] = defaultdict(set)
        # the newest step with offered groups and the number of these groups
        self.offered: tuple[int, int] = (-1, 0)
        self.largest = 1  # bytes of the largest group that it has offered
        self.compared = 0  # the newest step of which a group was scored without adapters

    def inbox_credits(self) -> int:
        return self.config.rl.groups_per_step

    def connect(self, welcome: m.Welcome) -> set[str]:
        self.to_trainer = self.outbox("trainer", welcome)
        if self.config.adapting:
            self.counters |= {"draft/groups_dropped": 0, "draft/megabytes": 0.0}
            self.to_adapter = self.outbox("draft_adapter", welcome)
        self.team.connect(welcome)
        return super().connect(welcome)

    def handle(self, message: m.Message) -> None:
        if isinstance(message, m.DraftEnded):
            if self.to_adapter is not None:
                self.outboxes.remove(self.to_adapter)
                self.to_adapter.close()
                self.to_adapter = None
        else:
            super().handle(message)

    def turn(self) -> None:
        self.tell_received()
        while (item := self.inbox.take()) is not None:
            message, arrays, sent, _ = item
            if isinstance(message, m.Received):
                self.complete[message.version].add(message.name)
            else:
                # The inbox is checked only between two groups, so the time of arrival is an estimate: when the group
                # was sent, or the last check if that was later. An arrival ends a wait, so its end is a check too.
                self.waiting.append((message, arrays, max(sent, self.looked)))
        self.looked = now()
        self._swap_weights()
        ready = [
            index for index, (_, arrays, _) in enumerate(self.waiting) if int(arrays["versions"].max()) <= self.version
        ]
        if chosen := ready[: self.scorer.ranks.data_size]:
            items = [self.waiting[index] for index in chosen]
            for index in reversed(chosen):
                del self.waiting[index]
            self._process(items)
        else:
            self.wait(0.005 if self.waiting else 0.02)
            self.looked = now()

    def _swap_weights(self) -> None:
        """Swap in, on all ranks, the newest version that every rank has received."""
        self.receiver.check()
        others = len(self.team.outboxes)
        version = max(
            (version for version in self.receiver.complete if len(self.complete[version]) == others), default=None
        )
        if version is None:
            return
        if (new := self.receiver.take(version)) is None:
            return
        self.fault("swap")
        with self.recorder.span("swap policy", version=version):
            self.team.order(SWAP, version)
            self.version, tensors = new
            self.scorer.swap(tensors)
        self.using["policy"] = version
        self.complete = defaultdict(set, {later: names for later, names in self.complete.items() if later > version})
        self.swapped = now()

    def _process(self, items: list[tuple[m.Group, m.Arrays, float]]) -> None:
        """Score groups, the first one on this rank, and send them to the trainer."""
        start, mark, first, cpu = now(), self.recorder.mark(), items[0][0].ticket, time.process_time()
        self.delay("logprob", ticket=first.ticket_id)
        self.fault("work")
        supervision = self.score([(group, arrays) for group, arrays, _ in items], self._wants_supervision(first.step))
        end = now()
        # the other ranks record their own spans
        cpu, about = time.process_time() - cpu, {"step": first.step, "ticket": first.ticket_id}
        self.recorder.add("logprob", start, end, **about, version=self.version, since=mark, cpu=cpu)
        for group, arrays, arrived in items:
            # The group waited for weights if it needed a version that was swapped in after it arrived.
            needed = int(arrays["versions"].max()) == self.version and self.swapped > arrived
            waited_until = self.swapped if needed else arrived
            phases = [
                *group.phases,
                m.Phase("logprob_weights", arrived, waited_until),
                m.Phase("logprob_queue", waited_until, start),
                m.Phase("logprob", start, end),
            ]
            self.to_trainer.put(msgspec.structs.replace(group, phases=phases, proximal_version=self.version), arrays)
            self.fault("send")
        if supervision is not None:
            with self.recorder.span("offer", first.step, first.ticket_id, self.version):
                self._offer(first, supervision())

    def score(self, parts: list[tuple[m.Group, m.Arrays]], supervising: bool) -> Callable | None:
        """Run the policy over groups, one on each data rank. Add proximal and, with a KL term, reference logprobs to
        their arrays.

        Returns:
            With `supervising`, a callable that makes the draft's supervision from the first group; else None.
        """
        if supervising:
            self.scorer.supervising = True
            self.team.order(SUPERVISE)
        if comparing := self._wants_comparison(parts[0][0].ticket.step):
            self.scorer.comparing = True
            self.team.order(COMPARE)
        names = self.scorer.scores
        supervision = self.team.deal(parts, self.scorer)
        tokens = max(len(arrays["tokens"]) for _, arrays in parts)
        self.team.order(COLLECT, tokens)
        values = self.team.together(lambda: self.scorer.collect(tokens))
        for (_, arrays), found in zip(parts, values):
            arrays |= {name: scores[: len(arrays["tokens"])].copy() for name, scores in zip(names, found)}
            if comparing:
                arrays.setdefault("base", arrays.get("reference"))
        return supervision

    def _wants_comparison(self, step: int) -> bool:
        """Whether groups of this step are to be scored without adapters too, so that the trainer can tell whether the
        generator has them (rl/observed.py).
        """
        if self.config.lora is None or step < self.compared + (COMPARED_EVERY if self.compared else 2):
            return False
        self.compared = step
        return True

    def _wants_supervision(self, step: int) -> bool:
        if self.to_adapter is None or self.waiting:
            return False
        newest, groups = self.offered
        return step >= newest and (groups if step == newest else 0) < self._turns(step)

    def _turns(self, step: int) -> int:
        """Return how many groups of a step this actor may offer."""
        d, index = self.config.draft, int(first_name(self.name).removeprefix(self.role) or 0)
        groups = min(d.groups_per_step, max(1, d.bytes_per_step // self.largest))
        return turns(groups, step, index, self.config.deployment.logprobs)

    def _offer(self, ticket: m.Ticket, supervision) -> None:
        from asyncspec.drafts.supervision import pack, size

        d = self.config.draft
        arrays = pack(supervision, d.top_tokens, d.window, np.random.default_rng([self.config.seed, ticket.ticket_id]))
        newest, groups = self.offered
        self.offered = (ticket.step, groups + 1 if newest == ticket.step else 1)
        self.largest = max(self.largest, size(arrays))
        self.counters["draft/megabytes"] += size(arrays) / 1e6
        self.counters["draft/groups_dropped"] += self.to_adapter.offer(
            m.Supervision(ticket.ticket_id, self.version),
            arrays,
            d.bytes_per_step,
            -(-d.groups_per_step // self.config.deployment.logprobs),
        )

    def finish(self) -> None:
        if not self.team.lost:
            self.team.end()
