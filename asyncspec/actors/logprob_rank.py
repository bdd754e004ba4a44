"""The ranks of a logprob actor beyond the first; see team.py.

Every rank is a member of the policy's broadcast group and keeps its share of each version that arrives. The other ranks
report to the first which versions have arrived whole. Once all ranks have a version, the first orders all of them to
swap it in, between two groups:

    logprob         deal g0, g1 | collect |            | swap 4 | deal g2 ...
    rank 1          passes      | sum     | reports 4  | swap 4 | passes ...
"""

from __future__ import annotations

from asyncspec.actors.logprob import COLLECT, COMPARE, SUPERVISE, SWAP, PolicyHolder
from asyncspec.actors.team import NOTHING, Follower
from asyncspec.config.topology import LOGPROB_RANK
from asyncspec.timing.spans import now
from asyncspec.wire import messages as m
from asyncspec.wire.transport import Outbox


class LogprobRank(PolicyHolder, Follower):
    """A rank of a logprob actor that follows the first."""

    role = LOGPROB_RANK

    def __init__(self, spec) -> None:
        super().__init__(spec)
        self.version = 0
        self.to_leader: Outbox | None = None  # set by `connect`

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
            # one rank records each group; the leader records its own
            if ranks.rank % ranks.tensor_parallel == 0 and ranks.data_rank:
                ticket = message.ticket
                self.recorder.add(
                    "logprob",
                    start,
                    now(),
                    step=ticket.step,
                    ticket=ticket.ticket_id,
                    version=self.version,
                    since=mark,
                )
        elif message.what == NOTHING:
            for _ in range(message.number):
                scorer.add_nothing()
        elif message.what == SUPERVISE:
            scorer.supervising = ranks.data_rank == 0
        elif message.what == COMPARE:
            scorer.comparing = True
        elif message.what == COLLECT:
            scorer.collect(message.number)
        elif message.what == SWAP:
            self.fault("swap")
            self.version, tensors = self.receiver.take(message.number)
            with self.recorder.span("swap policy", version=self.version):
                scorer.swap(tensors)
            self.using["policy"] = self.version
