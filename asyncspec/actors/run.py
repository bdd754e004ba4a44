"""A run, as the controller sees it: its actors, the channels to them, its tickets, its records, and how it is to end.
One object owns all of this. Recovery, schedule, switchboard and conductor act on it.
"""

from __future__ import annotations

import time

from asyncspec.actors.broadcasts import Broadcasts
from asyncspec.actors.crew import Crew
from asyncspec.actors.failures import Failures
from asyncspec.actors.records import Records
from asyncspec.actors.tickets import TicketBook
from asyncspec.config import Config
from asyncspec.wire import messages as m
from asyncspec.wire.control import ControlServer
from asyncspec.wire.transport import Outbox


class RunFailed(RuntimeError):
    """The run cannot continue; the message is one line for the user."""


class Run:
    """The state of a run that the parts of the controller share."""

    def __init__(self, config: Config, records: Records, server: ControlServer, may_restart: bool = False) -> None:
        """
        Args:
            may_restart: whether the launcher can restart all actors.
        """
        self.config, self.records, self.server = config, records, server
        self.book = TicketBook(records.ledger)
        self.crew = Crew(config, server.send)
        self.broadcasts: Broadcasts | None = None  # set once all actors are up
        self.outboxes: dict[str, Outbox] = {}  # to the generators
        self.stop_reason = ""  # why it ends; "": it continues
        self.failure = ""  # what went wrong, in one line for the user
        self.may_restart, self.resuming = may_restart, False  # `resuming`: the launcher should restart all of it
        self.failures = Failures()
        self.moved = time.monotonic()  # when the run last made progress

    def progress(self) -> None:
        """Note that the run has made progress."""
        self.moved = time.monotonic()

    def stop(self, reason: str) -> None:
        """End the run, unless it is ending already."""
        self.stop_reason = self.stop_reason or reason

    def fail(self, failure: str) -> None:
        """End the run because something went wrong. The first failure is the one that is reported."""
        self.failure = self.failure or failure
        self.stop(failure)

    def restart(self, reason: str) -> None:
        """End the run, and have the launcher restart all actors from the last checkpoint."""
        self.resuming, self.stop_reason = True, reason

    def begin_broadcasts(self) -> None:
        """Tell all actors, once they are up, the addresses of all and the members of each broadcast group."""
        crew, config = self.crew, self.config
        self.broadcasts = Broadcasts(config.deployment.host, self.server.send)
        self.broadcasts.devices = {member.name: member.hello.device for member in crew.present}
        for name in crew.generators:
            self.open_outbox(name)
        self.welcome()
        roles = ("trainer", "logprob", "logprob_rank")
        receiving = [member.name for role in roles for member in crew.playing(role)]
        generating = [*crew.generators, *(member.name for member in crew.playing("generator_rank"))]
        self.broadcasts.make("policy", [*receiving, *generating])
        if config.draft_trainer:
            sending = [member.name for member in crew.playing(config.draft_trainer)]
            self.broadcasts.make("draft", [*sending, *generating])

    def welcome(self) -> None:
        """Send the addresses of all actors to every actor that is up."""
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
