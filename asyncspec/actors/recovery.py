"""What the controller does about actors that are lost: who takes their place, which tickets are issued again, and when
the run must end or be started again as a whole. See docs/recovery.md.
"""

from __future__ import annotations

import time

from asyncspec.actors.base import first_name
from asyncspec.actors.crew import Life, Member, replaceable
from asyncspec.actors.run import Run
from asyncspec.actors.tickets import ARRIVED, GENERATED
from asyncspec.deadlines import KILLED_S, LATE_WORD_S
from asyncspec.wire import messages as m

_KINDS = {  # the broadcast groups that a role's replacement joins, and whether as their sender
    "generator": {"policy": False, "draft": False},
    "logprob": {"policy": False},
    "draft_adapter": {"draft": True},
}


class Recovery:
    def __init__(self, run: Run) -> None:
        self.run, self.config, self.crew, self.records = run, run.config, run.crew, run.records
        self._given_up = 0.0  # when the run last went on without a logprob actor

    # Actors that fall silent.
    def watch(self) -> None:
        """Kill frozen and stuck actors; go on without those that nobody answers for."""
        crew, now, limit = self.crew, time.monotonic(), self.config.deployment.start_timeout_s
        overdue = crew.overdue()
        self.run.moved += crew.vigil.slept
        for member, what in overdue:
            self.records.note("frozen", actor=member.name, what=what)
            self.records.line(f"{member.name} is {what}")
            crew.condemn(member, what)
        for member in crew.present:
            if member.late and member.life in (Life.STARTING, Life.UP) and now - member.since > limit:
                self.records.line(f"{member.name} has not joined within {limit:.0f} s")
                crew.condemn(member, "did not join")
        for member in crew.unanswered:
            self._cut_off(member)
        if self._given_up and now - self._given_up > KILLED_S:
            # A group may have gone to a logprob actor that could still be reached from its generator.
            late, self._given_up = self._given_up + LATE_WORD_S, 0.0
            self._reissue_generated("its logprob actor is cut off", late)

    def _cut_off(self, member: Member) -> None:
        """Neither an actor nor its launcher has answered: go on without it, as soon as the run can, until it can be
        reached again.
        """
        news = member.life is Life.CONDEMNED
        if news:
            member.transition(Life.CUT_OFF)
        if not self.run.stop_reason and self._can_spare(member):
            reason = f"{member.name} is cut off"
            self.crew.leave(member)
            self.records.note("lost", actor=member.name, reason=reason)
            self._replace(member, reason)
            if member.role == "logprob":
                self._given_up = time.monotonic()
            if self.run.broadcasts is not None:
                self.run.welcome()
        elif news and (not self.run.stop_reason or member.role == "trainer"):
            self.records.line(f"nobody answers for {member.name}: it is waited for, the run cannot go on without it")

    def _can_spare(self, member: Member) -> bool:
        """True if the run can go on without an actor for a while: it is one of several, or the draft adapter, which
        nobody waits for.
        """
        if member.role == "draft_adapter":
            return self.run.broadcasts is not None
        others = [other for other in self.crew.playing(member.role) if other is not member]
        return member.role in replaceable(self.config) and any(
            other.hello is not None and not other.condemned for other in others
        )

    # Actors that end.
    def lost(self, message: m.Lost) -> None:
        """A launcher tells that an actor's process has ended."""
        member = self.crew.members.get(message.actor)
        if member is None or member.life is Life.GONE:
            return
        if member.life is Life.GIVEN_UP:
            if not self.run.stop_reason:
                self._back(member, message)
            return
        self.crew.died(member)
        if member.role == "draft_adapter" and not message.replacement and self.run.broadcasts is not None:
            self._without_adapter(member, message.how)
        else:
            self._go_on_after(member, message)

    def _go_on_after(self, member: Member, message: m.Lost) -> None:
        """An actor is gone: replace it, have all started again, or end the run."""
        run = self.run
        self.records.note("lost", actor=member.name, reason=message.how)
        if run.stop_reason and member.role != "trainer":  # of a run that ends only its checkpoint is waited for
            return
        if message.replacement:
            self._replace(member, message.how, message.replacement)
        elif message.may_restart and run.stop_reason in ("", "finished"):
            run.resuming, run.stop_reason = True, message.how
        else:
            run.fail(message.how)

    def _back(self, member: Member, message: m.Lost) -> None:
        """One that was cut off can be reached again, and has been ended by its launcher."""
        name, role, new = member.name, member.role, message.replacement
        taken = any(first_name(other.name) == first_name(name) for other in self.crew.playing(role))
        if new and taken and role == "draft_adapter":  # nobody welcomes it: it ends by itself
            self.records.line(f"{name} can be reached again; its place is taken")
        elif new:
            self._expect(new, role)
            self.records.line(f"{name} can be reached again; {new} takes its place")
        elif role == "draft_adapter" and not taken and "draft" in self.run.broadcasts.members:
            self._end_draft(message.how)
        elif not taken:
            self.records.line(f"{message.how}; no replacement is left for it: the others go on")

    def failed(self, message: m.Failed) -> None:
        """An actor says that it cannot go on."""
        name, member = message.name, self.crew.members.get(message.name)
        if member is None or not member.present:
            self.records.line(f"{name}, which was given up, failed: {message.error}")
        elif member.role == "draft_adapter" and self.run.broadcasts is not None:
            self.crew.leave(member)
            self._without_adapter(member, message.error)
        elif not self.run.failure:
            failure = f"{name} failed: {message.error}; see {self.records.run_dir}/logs/{name}.log"
            self.run.failure = self.run.stop_reason = failure

    def _without_adapter(self, member: Member, reason: str) -> None:
        """The run goes on with the draft it has: nobody waits for the draft adapter."""
        if "draft" in self.run.broadcasts.members and not self.run.stop_reason:
            self.records.note("lost", actor=member.name, reason=reason)
            self._end_draft(reason)

    def _end_draft(self, reason: str) -> None:
        self.records.counters["draft/adapter_lost"] = 1
        self.records.line(f"the draft adapter is gone ({reason}): the draft stays as it is")
        self.run.broadcasts.end_draft()
        for logprob in self.crew.playing("logprob"):
            self.run.server.send(logprob.name, m.DraftEnded())

    # Actors that come.
    def claim(self, names: list[str]) -> m.Claimed:
        """A node has started by itself. A name never seen before is granted as it is; a known name is granted as its
        own replacement.
        """
        crew, granted = self.crew, []
        for name in names:
            known = crew.named(name)
            came = bool(known) and (
                self.run.broadcasts is not None or known[0].hello is not None or not known[0].present
            )
            if not known or (came and known[0].role not in replaceable(self.config)):
                return m.Claimed(
                    [],
                    f"{name} cannot be started alone: with it all actors start again from the last checkpoint; "
                    "expected the first node's launcher to do so",
                )
            # A launcher that is cut off goes on by one from the name it has (`Supervisor.died`): no name is given out
            # by both.
            granted.append(f"{name}.{100 * len(known)}" if came else name)
        for name, new in zip(names, granted):
            if new == name:
                crew.expect(crew.members[name])
            else:
                self._start_again(name, new)
        return m.Claimed(granted)

    def _start_again(self, name: str, new: str) -> None:
        """Whoever plays a part has lost its node, which has started again and brings another."""
        for before in [member for member in self.crew.named(name) if member.present]:
            reason = f"{before.name}'s node has started again"
            self.crew.leave(before)
            self.records.note("lost", actor=before.name, reason=reason)
            if not self.run.stop_reason:
                self._replace(before, reason, new)
        if new not in self.crew.members:
            self._expect(new, self.crew.role_of(name))

    def arrived(self, hello: m.Hello) -> None:
        """Note that an actor is up. Tell all where a replacement is, and take it into its broadcast groups."""
        member, run = self.crew.arrived(hello), self.run
        if member is None or run.broadcasts is None:
            return
        if not member.late or not member.present or member.name in run.broadcasts.devices:
            return
        run.welcome()
        if member.role == "logprob" and self.config.adapting and "draft" not in run.broadcasts.members:
            run.server.send(member.name, m.DraftEnded())
        run.broadcasts.add(hello, _KINDS[member.role])

    def joined(self, name: str) -> None:
        """An actor is ready."""
        member = self.crew.members.get(name)
        if member is None or member.hello is None:
            return
        member.said_ready()
        if not member.present:
            return
        self.crew.vigil.heard(name)  # it loads no more: its patience is that of those at work
        if not member.late:
            return
        self.run.progress()
        seconds = self.run.moved - member.since
        if member.role == "logprob":
            # Word of a group that left its generator for the dead one may have come after the loss.
            self._reissue_generated("its logprob actor died", member.since + LATE_WORD_S)
        if member.role == "generator":
            self.run.open_outbox(name)
        self.records.counters[f"recovery/{member.role}_s"] = seconds
        self.records.note("joined", actor=name, seconds=round(seconds, 3))
        self.records.line(f"{name} has joined, {seconds:.1f} s after the loss")

    def _replace(self, member: Member, reason: str, replacement: str = "") -> None:
        """Issue again what an actor had, and let the others go on until its replacement is there."""
        self.run.progress()
        again, counters = 0, self.records.counters
        if member.role == "generator":
            self.run.close_outbox(member.name)
            # Also what has left it and is not with the trainer: it may have been on its way. Should a group come twice
            # the first counts.
            again = self.run.book.reissue(
                lambda generator, stage, since: generator == member.name and stage != ARRIVED, reason
            )
        elif member.role == "logprob":
            again = self._reissue_generated(reason)
        for counter, count in ((f"recovery/{member.role}s_lost", 1), ("recovery/tickets_reissued", again)):
            counters[counter] = counters.get(counter, 0) + count
        if self.run.broadcasts is not None:
            self.run.broadcasts.remove(member.name)
        if replacement:
            self._expect(replacement, member.role)
        after = f"{replacement} takes its place" if replacement else "the others go on"
        self.records.line(f"{reason}: {f'{again} tickets are issued again; ' if again else ''}{after}")

    def _reissue_generated(self, reason: str, before: float = float("inf")) -> int:
        """Issue again the tickets that left their generator before some time and are not with the trainer."""
        return self.run.book.reissue(lambda generator, stage, since: stage == GENERATED and since < before, reason)

    def _expect(self, name: str, role: str) -> None:
        """An actor is coming up in place of another."""
        self.crew.enlist(name, role, late=self.run.broadcasts is not None)
        if (hello := self.crew.early(name)) is not None:  # its own word was quicker than its launcher's
            self.arrived(hello)
