"""The tickets that are issued and not sent, and the order in which they are sent.

Training goes first: a step waits for its tickets, and nobody waits for an evaluation. Tickets of evaluations are sent
while no ticket of training is there. If generation is the bottleneck there always is one, so an evaluation gets a share
of it all the same:

    samples sent:  training 3 | evaluation 1 | training 3 | evaluation 1 ...

With `eval.exact`, and before the first step, evaluations go first, see schedule.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from asyncspec.wire.messages import Ticket

TRAINING_SHARE = 3  # samples of training that are sent for each one of an evaluation while both wait


class Pending:
    """Two queues of tickets, of training and of evaluations. Iteration and `bool` are over both."""

    def __init__(self) -> None:
        self._training: deque[Ticket] = deque()
        self._evaluation: deque[Ticket] = deque()
        self._sent = 0  # samples of training that were sent while an evaluation waited, less its share

    def __bool__(self) -> bool:
        return bool(self._training or self._evaluation)

    def __len__(self) -> int:
        return len(self._training) + len(self._evaluation)

    def __iter__(self) -> Iterator[Ticket]:
        yield from self._training
        yield from self._evaluation

    def add(self, ticket: Ticket) -> None:
        self._queue(ticket).append(ticket)

    def add_again(self, tickets: Iterable[Ticket]) -> None:
        """Put tickets that replace others, or were lost, before all others of their kind."""
        for ticket in sorted(tickets, key=lambda t: t.ticket_id, reverse=True):
            self._queue(ticket).appendleft(ticket)

    def remove(self, ticket: Ticket) -> None:
        self._queue(ticket).remove(ticket)

    def take(self, room: bool = True, first: bool = False) -> Ticket | None:
        """Take the ticket that is sent next; None if none may be sent.

        Args:
            room: whether the generator has room for an evaluation that is not owed.
            first: whether evaluations go before training.
        """
        waiting = bool(self._evaluation)
        owed = waiting and self._sent >= TRAINING_SHARE * len(self._evaluation[0].seeds)
        if waiting and (first or owed or (room and not self._training)):
            ticket = self._evaluation.popleft()
            self._sent = max(0, self._sent - TRAINING_SHARE * len(ticket.seeds)) if self._evaluation else 0
            return ticket
        if not self._training:
            return None
        ticket = self._training.popleft()
        if waiting:
            self._sent += len(ticket.seeds)
        return ticket

    def _queue(self, ticket: Ticket) -> deque[Ticket]:
        return self._evaluation if ticket.evaluation else self._training
