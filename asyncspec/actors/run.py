"""A run, as the controller sees it: its actors, the channels to them, its tickets, its records, and how it is to end.
One object owns all of this. Recovery, schedule, switchboard and conductor act on it.
"""

from __future__ import annotations

import time
from collections import defaultdict

from asyncspec.actors.base import first_name
from asyncspec.actors.broadcasts import Broadcasts
from asyncspec.actors.crew import Crew
from asyncspec.actors.failures import Failures
from asyncspec.actors.records import Records
from asyncspec.actors.tickets import TicketBook
from asyncspec.config import Config
from asyncspec.wire import messages as m
from asyncspec.wire.control import ControlServer
from asyncspec.wire.waiting import wait

_EVERYONES = ("trainer", "logprob", "draft_adapter")  # roles whose inboxes actors of other teams send to


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
        self.stop_reason = ""  # why it ends; "": it continues
        self.failure = ""  # what went wrong, in one line for the user
        self.may_restart, self.resuming = may_restart, False  # `resuming`: the launcher should restart all of it
        self.failures = Failures()
        self.moved = time.monotonic()  # when the run last made progress
        self._addresses: dict[str, str] = {}  # that have been told
        self._welcomed: set[str] = set()  # the actors that know them

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
        self.welcome()
        roles = ("trainer", "logprob", "logprob_rank")
        receiving = [member.name for role in roles for member in crew.playing(role)]
        generating = [*crew.generators, *(member.name for member in crew.playing("generator_rank"))]
        self.broadcasts.make("policy", [*receiving, *generating])
        if config.draft_trainer:
            sending = [member.name for member in crew.playing(config.draft_trainer)]
            self.broadcasts.make("draft", [*sending, *generating])

    def welcome(self) -> None:
        """Send every actor that is up the addresses of those that it may send to: its own ranks, and all actors that
        others send to. It gets all of them once, and then those that have changed.
        """
        known, host, port = self.crew.addresses, self.config.deployment.host, self.broadcasts.port
        changed = {name: address for name, address in known.items() if self._addresses.get(name) != address}
        self._addresses = known
        versions, everyones, teams = dict(self.broadcasts.versions), set(_EVERYONES), defaultdict(list)
        for member in self.crew.members.values():
            teams[member.leader].append(first_name(member.name))
        shared = {name for name in known if self.crew.role_of(name) in everyones}
        for member in self.crew.present:
            if member.hello is None:
                continue
            new = member.name not in self._welcomed
            told = known if new else changed
            names = shared.union(teams[member.leader]) if new else changed.keys() & shared.union(teams[member.leader])
            addresses = {name: told[name] for name in names if name in told}
            if new or addresses:
                if self.server.send(member.name, m.Welcome(addresses, host, port, versions)):
                    self._welcomed.add(member.name)

    def wait(self, timeout_s: float) -> None:
        """Wait until a message may have arrived, at most timeout_s."""
        wait([self.server], timeout_s)
