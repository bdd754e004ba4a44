"""The ranks of a logprob actor beyond the first, and what all of its ranks do alike; see team.py.

Every rank is a member of the policy's broadcast group and keeps its share of each version that arrives. The others tell
the first which versions they have all of; it has all take the same one, between two groups, once nobody lacks it:

    logprob         deal g0, g1 | collect |            | swap 4 | deal g2 ...
    rank 1          passes      | sum     | has 4 too  | swap 4 | passes ...
"""

from __future__ import annotations

from collections import deque

from asyncspec import messages as m
from asyncspec.actors.base import Actor, StopRequested, first_name
from asyncspec.actors.team import NOTHING, Follower
from asyncspec.deadlines import COLLECTIVE_S, KILLED_S
from asyncspec.rl.scorer import Scorer
from asyncspec.timing.spans import now
from asyncspec.topology import LOGPROB_RANK, rank_of

SUPERVISE, COLLECT, SWAP = "supervise", "collect", "swap"


class PolicyHolder(Actor):
    """Holds a policy, or its share of one, and receives versions of it."""

    scorer_class = Scorer

    def __init__(self, spec) -> None:
        super().__init__(spec)
        self.threads = self.config.logprob.threads
        self.scorer = self.scorer_class(self.config, self.device, *rank_of(first_name(spec.name)))

    def load(self) -> None:
        self.scorer.load()

    def connect(self, welcome: m.Welcome) -> set[str]:
        from asyncspec.weights import Receiver

        self.scorer.join(welcome.store_host, welcome.store_port, COLLECTIVE_S)
        self._received: deque[int] = deque()
        self.receiver = Receiver(
            welcome.store_host,
            welcome.store_port,
            "policy",
            self.name,
            self.device,
            self.scorer.layout,
            self._received.append,
            self.scorer.keep if self.scorer.ranks.size > 1 else None,
        )
        self.workers = [self.receiver]
        return {"policy"}

    def handle(self, message: m.Message) -> None:
        if isinstance(message, m.Membership):
            self.join(self.receiver, message)
        elif isinstance(message, m.Receive):
            self.receiver.expect(message.version, message.epoch)
            self.fault("receive")

    def tell_received(self) -> list[m.Received]:
        """Tell the controller which versions have arrived since the last call; returns what it was told."""
        told = [m.Received(self.name, "policy", self._received.popleft()) for _ in range(len(self._received))]
        for message in told:
            self.control.send(message)
        return told


class LogprobRank(PolicyHolder, Follower):
    role = LOGPROB_RANK

    def __init__(self, spec) -> None:
        super().__init__(spec)
        self.version = 0

    def connect(self, welcome: m.Welcome) -> set[str]:
        self.to_leader = self.outbox(self.leader, welcome)
        return super().connect(welcome)

    def turn(self) -> None:
        for message in self.tell_received():
            self.to_leader.put(message)
        self.receiver.check()
        super().turn()

    def follow(self, message: m.Message, arrays: m.Arrays) -> None:
        scorer, ranks = self.scorer, self.scorer.ranks
        if isinstance(message, m.Group):
            start, mark = now(), self.recorder.mark()
            self.fault("work")
            scorer.add(message, arrays)
            # the first of those that read this group, and not the leader
            if ranks.rank % ranks.tensor_parallel == 0 and ranks.data_rank:
                self.recorder.add(
                    "logprob", start, now(), message.ticket.step, message.ticket.ticket_id, self.version, mark
                )
        elif message.what == NOTHING:
            for _ in range(message.number):
                scorer.add_nothing()
        elif message.what == SUPERVISE:
            scorer.supervising = ranks.data_rank == 0
        elif message.what == COLLECT:
            scorer.collect(message.number)
        elif message.what == SWAP:
            self.fault("swap")
            self.version, tensors = self.receiver.take(message.number)
            with self.recorder.span("swap policy", version=self.version):
                scorer.swap(tensors)

    def finish(self) -> None:
        """Take part in the passes that the leading rank has begun."""
        try:
            self.follow_to_the_end(KILLED_S)
        except StopRequested as stopped:  # a rank was lost now
            self.log(str(stopped))
