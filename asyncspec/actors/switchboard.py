"""The switchboard: handles each kind of message that the controller receives."""

from __future__ import annotations

import time
from functools import singledispatchmethod

from asyncspec import clock
from asyncspec.actors.delivery import Acceptance
from asyncspec.actors.recovery import Recovery
from asyncspec.actors.run import Run
from asyncspec.actors.schedule import Schedule
from asyncspec.actors.tickets import ARRIVED
from asyncspec.wire import messages as m

_RECEIVERS = {"generator", "generator_rank", "logprob", "logprob_rank"}
_SENDERS = {"trainer", "draft_adapter"}
_FROM = {  # message -> the roles that may send it, once all actors are up; others are open to all
    m.Publish: _SENDERS,
    m.Connected: {"generator", "generator_rank"},
    m.Ready: _SENDERS | _RECEIVERS | {"trainer_rank"},
    m.Broken: _SENDERS | _RECEIVERS,
    m.Received: _RECEIVERS,
    m.Generated: {"generator"},
    m.Unused: {"generator"},
    m.EvalDone: {"generator"},
    m.Arrived: {"trainer"},
    m.StepDone: {"trainer"},
    m.Checkpointed: {"trainer"},
}


class Switchboard:
    """Passes each message to the part of the controller that it concerns, and rejects those of a wrong sender."""

    def __init__(self, run: Run, recovery: Recovery, schedule: Schedule) -> None:
        self.run, self.recovery, self.schedule = run, recovery, schedule
        self.records, self.server = run.records, run.server
        self.host, self.acceptance = clock.host(), Acceptance()

    def receive(self) -> None:
        """Handle the messages that have arrived: what launchers say of actors' ends last. An actor that raises says so
        before it ends, but the two messages come from different processes and may wait here in any order.
        """
        arrived = list(iter(self.server.receive, None))
        for sender, message in sorted(arrived, key=lambda item: isinstance(item[1], m.Lost)):
            allowed = _FROM.get(type(message))
            if allowed is None or (self.run.broadcasts is not None and self.run.crew.role_of(sender) in allowed):
                self._handle(message, sender)
            else:
                self.server.rejected += 1

    @singledispatchmethod
    def _handle(self, message: m.Message, sender: str) -> None:
        self.server.rejected += 1

    # Actors and launchers.
    @_handle.register
    def _(self, message: m.Beat, sender: str) -> None:
        self.run.crew.heard(sender, message)

    @_handle.register
    def _(self, message: m.ClockAsked, sender: str) -> None:
        self.server.send(sender, m.ClockTold(message.sent, time.monotonic(), self.host))

    @_handle.register
    def _(self, message: m.Claim, sender: str) -> None:
        self.server.send(sender, self.recovery.claim(message.names))

    @_handle.register
    def _(self, message: m.Hello, sender: str) -> None:
        self.recovery.arrived(message)

    @_handle.register
    def _(self, message: m.Connected, sender: str) -> None:
        self.recovery.connected(message.name)

    @_handle.register
    def _(self, message: m.Ready, sender: str) -> None:
        self.recovery.joined(message.name)

    @_handle.register
    def _(self, message: m.Lost, sender: str) -> None:
        self.recovery.lost(message)

    @_handle.register
    def _(self, message: m.Interrupt, sender: str) -> None:
        self.run.stop(message.reason)

    @_handle.register
    def _(self, message: m.Failed, sender: str) -> None:
        self.recovery.failed(message)

    @_handle.register
    def _(self, message: m.Stopped, sender: str) -> None:
        self.recovery.stopped(message.name)

    # Weights.
    @_handle.register
    def _(self, message: m.Publish, sender: str) -> None:
        if not self.run.broadcasts.relay(sender, message):
            return
        self.recovery.delivery.published(message.kind, message.version, time.monotonic())
        if message.kind == "draft":
            self.records.counters["draft/policy_version"] = message.policy_version
            self.acceptance.published(message)
        else:
            self.schedule.published(message)

    @_handle.register
    def _(self, message: m.Broken, sender: str) -> None:
        if self.run.broadcasts.broken(message):
            self.records.counters[f"broadcast/{message.kind}_epochs"] = self.run.broadcasts.epochs[message.kind]

    @_handle.register
    def _(self, message: m.Received, sender: str) -> None:
        self.run.broadcasts.received(message)
        self.run.progress()

    @_handle.register
    def _(self, message: m.Checkpointed, sender: str) -> None:
        self.schedule.checkpointed(message)
        if message.failed:
            return
        self.records.counters["checkpoint/version"] = message.version
        for member in self.run.crew.playing("draft_adapter"):
            self.server.send(member.name, message)

    # Tickets.
    @_handle.register
    def _(self, message: m.Generated, sender: str) -> None:
        self.run.book.generated(message.ticket_id, sender, message.checksum)
        self.run.progress()

    @_handle.register
    def _(self, message: m.Unused, sender: str) -> None:
        self.schedule.unused(sender, message)

    @_handle.register
    def _(self, message: m.Arrived, sender: str) -> None:
        self.run.book.moved(message.ticket_id, ARRIVED)

    @_handle.register
    def _(self, message: m.EvalDone, sender: str) -> None:
        self.schedule.evaluated(sender, message)

    @_handle.register
    def _(self, message: m.StepDone, sender: str) -> None:
        if self.server.rejected:
            self.records.counters["wire/controller_rejected"] = self.server.rejected
        self.schedule.step_done(message)
        sampling = self.run.config.sampling
        if sampling.top_p == 1 and not sampling.top_k:  # otherwise drafts propose from another distribution
            for line in self.acceptance.wrong(message.groups):
                self.records.line(line)

    # Records.
    @_handle.register
    def _(self, message: m.Spans, sender: str) -> None:
        self.records.spans(message)

    @_handle.register
    def _(self, message: m.Notice, sender: str) -> None:
        self.records.line(f"{message.name}: {message.text}")
