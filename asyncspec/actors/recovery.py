"""What the controller does about actors that are lost: who takes their place, which tickets are issued again, and when
the run must end or be started again as a whole. See docs/recovery.md.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from asyncspec.actors.base import first_name
from asyncspec.actors.broadcasts import Broadcasts
from asyncspec.actors.crew import Crew, replaceable
from asyncspec.actors.records import Records
from asyncspec.actors.tickets import ARRIVED, GENERATED, TicketBook
from asyncspec.config import Config
from asyncspec.deadlines import KILLED_S, LATE_WORD_S
from asyncspec.wire import messages as m
from asyncspec.wire import transport

_KINDS = {  # the broadcast groups that a role's replacement joins, and whether as their sender
    "generator": {"policy": False, "draft": False},
    "logprob": {"policy": False},
    "draft_adapter": {"draft": True},
}


@dataclass
class RunState:
    """How the run is going, and how it is to end."""

    stop_reason: str = ""  # why it is to end; "": it goes on
    failure: str = ""  # what went wrong, in a line for the user
    resuming: bool = False  # the launcher is to start all of it again
    moved: float = field(default_factory=time.monotonic)  # when anything last went forward


class Recovery:
    def __init__(
        self,
        config: Config,
        crew: Crew,
        book: TicketBook,
        state: RunState,
        records: Records,
        server: transport.ControlServer,
    ) -> None:
        self.config, self.crew, self.book, self.state, self.records, self.server = (
            config,
            crew,
            book,
            state,
            records,
            server,
        )
        self.broadcasts: Broadcasts | None = None  # once all actors are up
        self.outboxes: dict[str, transport.Outbox] = {}  # to the generators
        self._given_up = 0.0  # when a logprob actor was last gone on without

    def watch(self) -> None:
        """Have those killed that live no more as they should, and go on without those that nobody answers for."""
        crew, now, limit = self.crew, time.monotonic(), self.config.deployment.start_timeout_s
        overdue = crew.vigil.overdue()
        self.state.moved += crew.vigil.slept
        for name in crew.condemned:
            crew.condemned[name] = min(now, crew.condemned[name] + crew.vigil.slept)
        for name, what in overdue:
            if name in crew.condemned and name in crew.present:  # its launcher has been told
                continue
            self.records.note("frozen", actor=name, what=what)
            self.records.line(f"{name} is {what}")
            crew.condemn(name, what)
        for name, since in crew.joining.items():
            if name in crew.present - crew.ready - crew.condemned.keys() and now - since > limit:
                self.records.line(f"{name} has not joined within {limit:.0f} s")
                crew.condemn(name, "did not join")
        for name in [name for name, since in crew.condemned.items() if now - since > KILLED_S and name in crew.present]:
            self._cut_off(name)
        if self._given_up and now - self._given_up > KILLED_S:
            # A group may have gone to a logprob actor that could still be reached from its generator.
            late, self._given_up = self._given_up + LATE_WORD_S, 0.0
            self.book.reissue(
                lambda generator, place, since: place == GENERATED and since < late, "its logprob actor is cut off"
            )

    def _cut_off(self, name: str) -> None:
        """Neither an actor nor its launcher has answered: go on without it until it can be reached again, as soon as
        that can be.
        """
        crew, role, reason, news = self.crew, self.crew.roles[name], f"{name} is cut off", name not in self.crew.cut_off
        crew.cut_off.add(name)
        if not self.state.stop_reason and self._can_spare(name):
            crew.leave(name)
            self.records.note("lost", actor=name, reason=reason)
            self._replace(name, role, m.Interrupt(reason, name))
            if role == "logprob":
                self._given_up = time.monotonic()
            if self.broadcasts is not None:
                self.welcome()
        elif news and (not self.state.stop_reason or role == "trainer"):
            self.records.line(f"nobody answers for {name}: it is waited for, the run cannot go on without it")

    def _can_spare(self, name: str) -> bool:
        """Whether the run goes on without an actor for a while: one of several, or the draft adapter, which nobody
        waits for.
        """
        crew, role = self.crew, self.crew.roles[name]
        if role == "draft_adapter":
            return self.broadcasts is not None
        return role in replaceable(self.config) and any(
            other != name and other in crew.hellos and other not in crew.condemned for other in crew.playing(role)
        )

    def lost(self, message: m.Interrupt) -> None:
        """An actor's process has died."""
        crew, state, name = self.crew, self.state, message.lost
        if name not in crew.roles:
            return
        role = crew.roles[name]
        if name in crew.gone:
            if name in crew.condemned and not state.stop_reason:
                self._back(name, role, message)
            return
        if role == "draft_adapter" and not message.replacement and self.broadcasts is not None:
            self.lost_adapter(name, message.reason)
            return
        crew.leave(name)
        self.records.note("lost", actor=name, reason=message.reason)
        ending = state.stop_reason
        if ending and role != "trainer":  # whose checkpoint alone is waited for
            return
        if message.replacement:
            self._replace(name, role, message)
        elif message.may_restart and ending in ("", "finished"):
            state.resuming, state.stop_reason = True, message.reason
        else:
            state.failure, state.stop_reason = state.failure or message.reason, ending or message.reason

    def _back(self, name: str, role: str, message: m.Interrupt) -> None:
        """Who was cut off can be reached again, and has been ended by its launcher."""
        crew, new = self.crew, message.replacement
        taken = any(first_name(other) == first_name(name) for other in crew.playing(role))
        if new and taken and role == "draft_adapter":  # nobody welcomes it: it ends by itself
            self.records.line(f"{name} can be reached again; its place is taken")
        elif new:
            self._expect(new, role)
            self.records.line(f"{name} can be reached again; {new} takes its place")
        elif role == "draft_adapter" and not taken and "draft" in self.broadcasts.members:
            self._end_draft(message.reason)
        elif not taken:
            self.records.line(f"{message.reason}; no replacement is left for it: the others go on")

    def claim(self, names: list[str]) -> m.Claimed:
        """A node has started by itself. Who was never there comes as is planned; who was comes in place of itself."""
        crew, granted = self.crew, []
        for name in names:
            known = [other for other in crew.roles if first_name(other) == name]
            came = self.broadcasts is not None or name in crew.hellos or name in crew.gone
            if not known or (came and crew.roles[name] not in replaceable(self.config)):
                return m.Claimed(
                    [],
                    f"{name} cannot be started alone: with it all actors start again from the last checkpoint; "
                    f"expected the first node's "
                    "launcher to do so",
                )
            # A launcher that is cut off goes on by one from the name it has (`Supervisor.died`): no name is given out
            # by both.
            granted.append(f"{name}.{100 * len(known)}" if came else name)
        for name, new in zip(names, granted):
            if new == name:
                crew.expect(name)
            else:
                for before in [other for other in crew.present if first_name(other) == name]:
                    self.lost(m.Interrupt(f"{before}'s node has started again", before, new))
                self._expect(new, crew.roles[name])
        return m.Claimed(granted)

    def lost_adapter(self, name: str, reason: str) -> None:
        """The run goes on with the draft it has: nobody waits for the draft adapter."""
        self.crew.leave(name)
        if "draft" in self.broadcasts.members and not self.state.stop_reason:
            self.records.note("lost", actor=name, reason=reason)
            self._end_draft(reason)

    def _end_draft(self, reason: str) -> None:
        self.records.counters["draft/adapter_lost"] = 1
        self.records.line(f"the draft adapter is gone ({reason}): the draft stays as it is")
        self.broadcasts.end("draft")
        for other in self.crew.playing("logprob"):
            self._end_offers(other)

    def arrived(self, hello: m.Hello) -> None:
        """Note that an actor is up. Tell all where a replacement is, and take it into its broadcast groups."""
        crew, name = self.crew, hello.name
        crew.hellos.setdefault(name, hello)
        if name in crew.present:
            crew.vigil.heard(name, loading=True)
        if self.broadcasts is None or name not in crew.joining or name in crew.gone or name in self.broadcasts.devices:
            return
        self.welcome()
        if crew.roles[name] == "logprob" and self.config.adapting and "draft" not in self.broadcasts.members:
            self._end_offers(name)
        self.broadcasts.add(hello, _KINDS[crew.roles[name]])

    def joined(self, name: str) -> None:
        """An actor is ready."""
        crew = self.crew
        crew.ready.add(name)
        if name in crew.present:
            crew.vigil.heard(name)  # it loads no more: its patience is that of those at work
        if name not in crew.joining or name in crew.gone:
            return
        self.state.moved, role = time.monotonic(), crew.roles[name]
        seconds = self.state.moved - crew.joining[name]
        if role == "logprob":
            # Word of a group that left its generator for the dead one may have come after the loss.
            late = crew.joining[name] + LATE_WORD_S
            self.book.reissue(
                lambda generator, place, since: place == GENERATED and since < late, "its logprob actor died"
            )
        if role == "generator" and name not in self.outboxes:
            self.outboxes[name] = transport.Outbox(crew.hellos[name].address)
        self.records.counters[f"recovery/{role}_s"] = seconds
        self.records.note("joined", actor=name, seconds=round(seconds, 3))
        self.records.line(f"{name} has joined, {seconds:.1f} s after the loss")

    def welcome(self) -> None:
        """Tell all that are up where everybody is."""
        welcome = m.Welcome(
            self.crew.addresses, self.config.deployment.host, self.broadcasts.port, self.broadcasts.versions
        )
        for name in self.crew.present & self.crew.hellos.keys():
            self.server.send(name, welcome)

    def _replace(self, name: str, role: str, message: m.Interrupt) -> None:
        """Issue again what it had, and let the others go on until its replacement is there."""
        self.state.moved = time.monotonic()
        again = 0
        if role == "generator":
            if name in self.outboxes:
                self.outboxes.pop(name).close()
            # Also what has left it and is not with the trainer: it may have been on its way. Should a group come twice
            # the first counts.
            again = self.book.reissue(
                lambda generator, place, since: generator == name and place != ARRIVED, message.reason
            )
        elif role == "logprob":
            again = self.book.reissue(lambda generator, place, since: place == GENERATED, message.reason)
        for counter, count in ((f"recovery/{role}s_lost", 1), ("recovery/tickets_reissued", again)):
            self.records.counters[counter] = self.records.counters.get(counter, 0) + count
        if self.broadcasts is not None:
            self.broadcasts.remove(name)
        if message.replacement:
            self._expect(message.replacement, role)
        after = f"{message.replacement} takes its place" if message.replacement else "the others go on"
        self.records.line(f"{message.reason}: {f'{again} tickets are issued again; ' if again else ''}{after}")

    def _expect(self, name: str, role: str) -> None:
        """An actor is coming up in place of another."""
        self.crew.roles[name] = role
        self.crew.expect(name)
        if self.broadcasts is not None:
            self.crew.joining[name] = time.monotonic()
        if name in self.crew.hellos:  # its own word was quicker than its launcher's
            self.arrived(self.crew.hellos[name])

    def _end_offers(self, logprob: str) -> None:
        """There is no draft adapter any more for logprob to offer anything to."""
        self.server.send(logprob, m.Membership("draft", 0, [], ""))
