"""Tickets: the prompt of each one, and the stage that each one has reached.

A ticket goes: pending -> generating -> generated -> arrived -> trained. What `TicketMaker` makes depends on the seed
alone. `TicketBook` is the one place that knows where every ticket is. It writes to the ledger when a ticket is issued,
issued again, or ends, and when its group was generated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from asyncspec.actors.pending import Pending
from asyncspec.config import Config
from asyncspec.ledger.ledger import Ledger
from asyncspec.models.tokenizer import encode_prompt
from asyncspec.tasks.problem import Problem
from asyncspec.wire import messages as m

EVALUATION_IDS = 1 << 40  # ticket ids from here on are evaluations
GENERATING, GENERATED, ARRIVED = "generating", "generated", "arrived"


class TicketMaker:
    """Makes the tickets of training steps and of evaluations."""

    def __init__(self, config: Config, tokenizer, problems: Sequence[Problem], held_out: Sequence[Problem]) -> None:
        """
        Args:
            problems: the problem of each try for each place, in order; see `load_problems`.
        """
        self.config, self.tokenizer, self.problems, self.held_out = config, tokenizer, problems, held_out
        # Mocks produce nothing to read.
        self._shown = 0 if config.trainer.kind == "mock" else config.logging.rollouts

    def of_step(self, step: int, min_version: int) -> list[m.Ticket]:
        count = self.config.rl.groups_per_step
        return [self._of_place(place, 0, step, min_version) for place in range(step * count, (step + 1) * count)]

    def after(self, ticket: m.Ticket) -> m.Ticket | None:
        """Return the ticket that replaces one whose group has no signal; None if its place has had all its tries."""
        number = ticket.ticket_id // m.TRY_IDS + 1
        if number == self.config.rl.tries:
            return None
        made = self._of_place(ticket.place, number, ticket.step, ticket.min_version)
        return msgspec.structs.replace(made, asked=ticket.asked or ticket.issued)

    def _of_place(self, place: int, number: int, step: int, min_version: int) -> m.Ticket:
        rl = self.config.rl
        problem = self.problems[place * rl.tries + number]
        shown = step % self.config.logging.rollouts_every == 0 and place % rl.groups_per_step < self._shown
        return self._make(number * m.TRY_IDS + place, step, min_version, problem, rl.group_size, shown=shown)

    def of_evaluation(self, version: int) -> list[m.Ticket]:
        first = EVALUATION_IDS + version * len(self.held_out)
        return [
            self._make(first + i, version, version, problem, self.config.eval.samples, True, i < self._shown)
            for i, problem in enumerate(self.held_out)
        ]

    def encoded(self, ticket: m.Ticket) -> m.Ticket:
        """Return the ticket with its prompt's tokens. Encode only when a ticket is sent: an evaluation may issue many
        thousands at once.
        """
        return msgspec.structs.replace(ticket, prompt_tokens=encode_prompt(self.tokenizer, ticket.prompt))

    def _make(
        self,
        ticket_id: int,
        step: int,
        min_version: int,
        problem: Problem,
        samples: int,
        evaluation: bool = False,
        shown: bool = False,
    ) -> m.Ticket:
        seeds = np.random.default_rng([self.config.seed, ticket_id]).integers(0, 2**62, samples).tolist()
        return m.Ticket(
            ticket_id=ticket_id,
            step=step,
            min_version=min_version,
            prompt=problem.prompt,
            answer=problem.answer,
            row=problem.row,
            prompt_tokens=[],
            seeds=seeds,
            issued=time.monotonic(),
            evaluation=evaluation,
            eval_set=problem.eval_set,
            shown=shown,
        )


@dataclass
class _Entry:
    """A ticket that was sent to a generator."""

    ticket: m.Ticket
    generator: str
    sent: float
    stage: str = GENERATING
    since: float = 0.0  # when it reached that stage


class TicketBook:
    """Keeps where every open ticket is."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.pending = Pending()  # issued, not yet sent
        self.open: dict[int, _Entry] = {}  # sent, and not ended

    def issue(self, tickets: Iterable[m.Ticket]) -> None:
        for ticket in tickets:
            self.pending.add(ticket)
            self.ledger.write("issued", ticket)

    def next_for(self, generator: str, room: bool = True, evaluations_first: bool = False) -> m.Ticket | None:
        """Take the next pending ticket, and note that this generator has it now. For the arguments and None see
        `Pending.take`.
        """
        ticket, now = self.pending.take(room, evaluations_first), time.monotonic()
        if ticket is None:
            return None
        if ticket.lost:  # it is issued again, and the time until now was lost
            ticket = msgspec.structs.replace(ticket, issued=now)
        self.open[ticket.ticket_id] = _Entry(ticket, generator, now)
        return ticket

    def load(self, generators: Iterable[str]) -> dict[str, int]:
        """Return the number of samples in each generator."""
        load = dict.fromkeys(generators, 0)
        for entry in self.open.values():
            if entry.stage == GENERATING and entry.generator in load:
                load[entry.generator] += len(entry.ticket.seeds)
        return load

    def moved(self, ticket_id: int, stage: str, generator: str = "") -> None:
        """Note that a ticket has reached a later stage. Reports of different actors may arrive out of order: outdated
        ones are ignored.

        Args:
            generator: the generator that reports it; "": another actor does.
        """
        entry = self.open.get(ticket_id)
        if entry is not None and entry.stage != ARRIVED and generator in ("", entry.generator):
            entry.stage, entry.since = stage, time.monotonic()

    def generated(self, ticket_id: int, generator: str, checksum: int) -> None:
        """Note that a ticket's group has left its generator, with this checksum of what was sampled."""
        entry = self.open.get(ticket_id)
        if entry is not None and entry.generator == generator:
            self.ledger.write("generated", entry.ticket, generator=generator, checksum=checksum)
        self.moved(ticket_id, GENERATED, generator)

    def end(self, event: str, ticket_id: int, **details) -> m.Ticket | None:
        """Take a ticket off the book and return it; None if it is no longer there."""
        entry = self.open.pop(ticket_id, None)
        ticket = (
            entry.ticket if entry is not None else next((t for t in self.pending if t.ticket_id == ticket_id), None)
        )
        if ticket is None:
            return None
        if entry is None:  # it was issued again, but ended by its first issue
            self.pending.remove(ticket)
        self.ledger.write(event, ticket, **details)
        return ticket

    def unused(self, ticket_id: int, generator: str) -> m.Ticket | None:
        """Return the ticket of a group without signal. None if its end is not known from this generator: it has ended,
        or it was issued again, and a group of it may be on its way.
        """
        entry = self.open.get(ticket_id)
        if entry is None or entry.generator != generator or entry.stage != GENERATING or entry.ticket.lost:
            return None
        return entry.ticket

    def replace(self, ticket: m.Ticket, by: m.Ticket, **details) -> None:
        """Take a ticket off the book, and issue another in its place. It is the next one to be sent."""
        self.pending.add_again([by])
        self.ledger.write("issued", by)
        self.end("dropped", ticket.ticket_id, replaced_by=by.ticket_id, **details)

    def reissue(self, lost: Callable[[str, str, float], bool], reason: str) -> int:
        """Issue again the tickets that were lost with an actor. Return how many they are.

        Args:
            lost: callable(generator, stage, when it reached that stage) that returns whether such a ticket is lost.
        """
        again = []
        for ticket_id, entry in list(self.open.items()):
            if lost(entry.generator, entry.stage, entry.since):
                del self.open[ticket_id]
                again.append(msgspec.structs.replace(entry.ticket, lost=entry.ticket.lost or entry.ticket.issued))
                self.ledger.write("reissued", entry.ticket, reason=reason, generator=entry.generator)
        self.pending.add_again(again)
        return len(again)

    def drop_all(self, reason: str) -> None:
        for entry in self.open.values():
            self.ledger.write("dropped", entry.ticket, reason=reason, generator=entry.generator)
        for ticket in self.pending:
            self.ledger.write("dropped", ticket, reason=reason)
        self.open, self.pending = {}, Pending()

    def training(self) -> tuple[int, int]:
        """Return the number of training tickets in a generator, and of those past it."""
        stages = [entry.stage for entry in self.open.values() if not entry.ticket.evaluation]
        return stages.count(GENERATING), len(stages) - stages.count(GENERATING)

    def oldest(self) -> str:
        """Say where the ticket is that was sent first; "" if none is open."""
        entry = min(self.open.values(), key=lambda e: e.sent, default=None)
        if entry is None:
            return ""
        where = {
            GENERATING: f"in {entry.generator}",
            GENERATED: f"generated by {entry.generator}, on its way through logprob",
            ARRIVED: "at the trainer, not trained yet",
        }[entry.stage]
        ticket = entry.ticket
        if ticket.evaluation:
            return f"an evaluation of version {ticket.step}, {where}"
        return f"ticket {ticket.ticket_id} of step {ticket.step}, {where}"
