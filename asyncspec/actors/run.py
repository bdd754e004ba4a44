"""A run, as the controller holds it: who plays in it, what is sent to whom, where every ticket is, what is written down,
and how the run is to end. One object owns all of this; who acts on it (recovery, schedule, switchboard, conductor) is
given the run.
"""

from __future__ import annotations

import time

from asyncspec.actors.broadcasts import Broadcasts
from asyncspec.actors.crew import Crew
from asyncspec.actors.records import Records
from asyncspec.actors.tickets import TicketBook
from asyncspec.config import Config
from asyncspec.wire import messages as m
from asyncspec.wire.control import ControlServer
from asyncspec.wire.transport import Outbox


class RunFailed(RuntimeError):
    """The run cannot go on; the message is one line for the user."""


class Run:
    def __init__(self, config: Config, records: Records, server: ControlServer) -> None:
        self.config, self.records, self.server = config, records, server
        self.book = TicketBook(records.ledger)
        self.crew = Crew(config, server.send)
        self.broadcasts: Broadcasts | None = None  # once all actors are up
        self.outboxes: dict[str, Outbox] = {}  # to the generators
        self.stop_reason = ""  # why it is to end; "": it goes on
        self.failure = ""  # what went wrong, in a line for the user
        self.resuming = False  # the launcher is to start all of it again
        self.moved = time.monotonic()  # when anything last went forward

    def progress(self) -> None:
        """Something has gone forward."""
        self.moved = time.monotonic()

    def stop(self, reason: str) -> None:
        """End the run, if it is not ending already."""
        self.stop_reason = self.stop_reason or reason

    def fail(self, failure: str) -> None:
        """End the run because something went wrong; the first failure is the one that is told."""
        self.failure = self.failure or failure
        self.stop(failure)

    def begin_broadcasts(self) -> None:
        """All actors are up: tell them where everybody is, and who is in which broadcast group."""
        crew, config = self.crew, self.config
        self.broadcasts = Broadcasts(config.deployment.host, self.server.send)
        self.broadcasts.devices = {member.name: member.hello.device for member in crew.present}
        for name in crew.generators:
            self.open_outbox(name)
        self.welcome()
        roles = ("trainer", "logprob", "logprob_rank")
        receiving = [member.name for role in roles for member in crew.playing(role)]
        self.broadcasts.make("policy", [*receiving, *crew.generators])
        if config.draft_trainer:
            sending = [member.name for member in crew.playing(config.draft_trainer)]
            self.broadcasts.make("draft", [*sending, *crew.generators])

    def welcome(self) -> None:
        """Tell all that are up where everybody is."""
        broadcasts = self.broadcasts
        welcome = m.Welcome(
            self.crew.addresses, self.config.deployment.host, broadcasts.port, dict(broadcasts.versions)
        )
        for member in self.crew.present:
            if member.hello is not None:
                self.server.send(member.name, welcome)

    def open_outbox(self, generator: str) -> None:
        if generator not in self.outboxes:
            self.outboxes[generator] = Outbox(self.crew.members[generator].hello.address)

    def close_outbox(self, generator: str) -> None:
        if generator in self.outboxes:
            self.outboxes.pop(generator).close()
