"""Recovery: decides which lost actors are replaced, which tickets are issued again, and when the run must end or
restart as a whole. See docs/explanation/recovery.md.
"""

from __future__ import annotations

import time

import msgspec

from asyncspec.actors.base import first_name
from asyncspec.actors.crew import Life, Member, replaceable
from asyncspec.actors.delivery import Delivery
from asyncspec.actors.failures import MOST_ALIKE
from asyncspec.actors.run import Run
from asyncspec.actors.tickets import ARRIVED, GENERATED
from asyncspec.config import topology, work
from asyncspec.config.topology import GENERATOR_RANK
from asyncspec.deadlines import KILLED_S, LATE_WORD_S
from asyncspec.wire import messages as m

_KINDS = {  # role -> the broadcast groups that its replacement joins -> whether it is their sender
    "generator": {"policy": False, "draft": False},
    GENERATOR_RANK: {"policy": False, "draft": False},
    "logprob": {"policy": False},
    "draft_adapter": {"draft": True},
}


class Recovery:
    """The controller's answer to actors that fall silent, end, or arrive."""

    def __init__(self, run: Run) -> None:
        self.run, self.config, self.crew, self.records = run, run.config, run.crew, run.records
        self._start_s, self._stop_s = work.start_s(run.config), work.stop_s(run.config)
        self.delivery = Delivery(work.delivery_s(run.config))
        self._given_up = 0.0  # when a logprob actor was last given up; 0: never, or dealt with
        self._without_draft = False  # the draft adapter failed too often, so it is not replaced

    # Actors that fall silent.
    def watch(self) -> None:
        """Kill frozen and stuck actors; continue without unreachable ones."""
        crew, now, limit = self.crew, time.monotonic(), self._start_s
        overdue = crew.overdue()
        self.run.moved += crew.vigil.slept
        for member, what in overdue:
            self.records.note("frozen", actor=member.name, what=what)
            self.records.line(f"{member.name} is {what}")
            crew.condemn(member, what)
        for member in crew.present:
            if member.late and member.life in (Life.STARTING, Life.UP) and now - member.since > limit:
                self.records.line(f"{member.name} did not join within {limit:.0f} s")
                crew.condemn(member, "did not join")
            if member.failed_at and not member.condemned and now - member.failed_at > self._stop_s:
                crew.condemn(member, "failed, and has not ended since")
        for member in crew.unanswered:
            self._cut_off(member)
        self._check_delivery(now)
        if self._given_up and now - self._given_up > KILLED_S:
            # A generator that can still reach that logprob actor may have sent it a group.
            late, self._given_up = self._given_up + LATE_WORD_S, 0.0
            self._reissue_generated("its logprob actor is cut off", late)

    def _check_delivery(self, now: float) -> None:
        """Name the readers of weights that are late, and those that hold other bytes than were sent."""
        members = [member for member in self.crew.present if member.joined]
        for late in self.delivery.late(((each.name, each.using) for each in members), now):
            self.records.line(str(late))
            self.records.note("late", actor=late.name, what=f"{late.kind} version {late.newest}")
        senders = self.run.broadcasts.senders if self.run.broadcasts is not None else {}
        for different in self.delivery.different(senders, [(each.name, each.whole) for each in members]):
            self.records.line(str(different))
            self.records.note("different", actor=different.name, what=f"{different.kind} version {different.version}")

    def _cut_off(self, member: Member) -> None:
        """Handle an actor when neither it nor its launcher answers. Continue without it as soon as the run can spare
        it; until then wait for it.
        """
        news = member.life is Life.CONDEMNED
        if news:
            member.transition(Life.CUT_OFF)
        if not self.run.stop_reason and self._can_spare(member):
            reason = f"{member.name} is cut off"
            self.crew.leave(member)
            self._note_lost(member, reason)
            self._replace(member, reason)
            self._end_ranks_with(member)
            if member.role == "logprob":
                self._given_up = time.monotonic()
            if self.run.broadcasts is not None:
                self.run.welcome()
        elif news and (not self.run.stop_reason or member.role == "trainer"):
            self.records.line(f"nobody answers for {member.name}: the run cannot continue without it and waits")

    def _can_spare(self, member: Member) -> bool:
        """Whether the run can continue without an actor for a while: it is one of several, or it is the draft adapter,
        which nobody waits for.
        """
        if member.role == "draft_adapter":
            return self.run.broadcasts is not None
        others = [other for other in self.crew.playing(member.role) if other.leader != member.leader]
        return member.role in replaceable(self.config) and any(
            other.hello is not None and not other.condemned for other in others
        )

    # Actors that end.
    def lost(self, message: m.Lost) -> None:
        """Handle a launcher's report that an actor's process has ended."""
        member = self.crew.members.get(message.actor)
        if member is None or member.life is Life.GONE:
            return
        if member.life is Life.GIVEN_UP:
            if not self.run.stop_reason:
                self._back(member, message)
            return
        self.crew.died(member)
        how = self._told(member.name, member.error) if member.error else message.how
        if member.role == "draft_adapter" and self._without_draft:  # it failed too often; its launcher learned it late
            self._dismiss(message.replacement)
        elif member.role == "draft_adapter" and not message.replacement and self.run.broadcasts is not None:
            self._without_adapter(member, how)
        else:
            self._go_on_after(member, msgspec.structs.replace(message, how=how))

    def _go_on_after(self, member: Member, message: m.Lost) -> None:
        """Replace an actor that is gone, restart all actors, or end the run."""
        run = self.run
        self._note_lost(member, message.how)
        # An ending run waits only for the trainer's checkpoint.
        if run.resuming or (run.stop_reason and member.role != "trainer"):
            return
        if message.replacement:
            self._replace(member, message.how, message.replacement)
            self._end_ranks_with(member)
        elif message.may_restart and run.stop_reason in ("", "finished"):
            run.restart(message.how)
        else:
            run.fail(message.how)

    def _end_ranks_with(self, member: Member) -> None:
        """Have the other ranks of a generator killed when one is gone. They start only together, so each of them is
        replaced too.
        """
        if self._starts_with_others(member):
            for other in self.crew.present:
                together = other.leader == member.leader and other.number <= member.number
                if together and self._starts_with_others(other) and not other.condemned:
                    self.crew.condemn(other, f"without {member.name}")

    def _back(self, member: Member, message: m.Lost) -> None:
        """Handle the end of a given-up actor whose launcher can be reached again and has killed it."""
        name, role, new = member.name, member.role, message.replacement
        taken = any(first_name(other.name) == first_name(name) for other in self.crew.playing(role))
        if new and taken and role == "draft_adapter":
            self._dismiss(new)
            self.records.line(f"{name} can be reached again; it was already replaced")
        elif new:
            self._expect(new, role)
            self.records.line(f"{name} can be reached again; {new} replaces it")
        elif role == "draft_adapter" and not taken and "draft" in self.run.broadcasts.members:
            self._end_draft(message.how)
        elif not taken:
            self.records.line(f"{message.how}; no replacement is left, so the others continue")

    def failed(self, message: m.Failed) -> None:
        """Handle an exception in an actor: it counts as the actor's death. An actor that can be replaced is, once its
        launcher has reported its end.
        """
        member, told = self.crew.members.get(message.name), self._told(message.name, message.error)
        if member is None or member.life is Life.GIVEN_UP:
            self.records.line(told)
        elif member.error:  # it failed while it stopped, too
            pass
        else:
            member.error, member.failed_at = message.error, time.monotonic()
            alone = member.role in replaceable(self.config)
            if self.run.stop_reason and alone:
                self.records.line(told)
            elif self.run.stop_reason:
                if not self.run.resuming:
                    self.run.fail(told)
            elif not alone:
                self.cannot_go_on(message.name, message.error, message.mistake)
            elif (why := self._hopeless(message.error, message.mistake)) is not None:
                self._end_after(member, f"{told}{why}")

    def cannot_go_on(self, name: str, error: str, mistake: bool) -> None:
        """Handle an exception in an actor that cannot be replaced alone: restart all actors, or end the run.

        Args:
            mistake: see `m.Failed`.
        """
        told, why = self._told(name, error), self._hopeless(error, mistake)
        self._note_lost(self.crew.members.get(name) or Member(name, name, error=error), told)
        if why is not None or not self.run.may_restart:
            self.run.fail(f"{told}{why or ''}")
        elif not self.run.stop_reason:
            self.run.restart(told)

    def _hopeless(self, error: str, mistake: bool) -> str | None:
        """Note an exception. Return None if the run can go on after it, else what to append to the line about it.

        Args:
            mistake: see `m.Failed`.
        """
        alike = self.run.failures.add(error)
        if alike < MOST_ALIKE:
            return "" if mistake else None
        return f"; {alike} errors were alike and no step was trained meanwhile"

    def _end_after(self, member: Member, told: str) -> None:
        """End the run after an exception that would come again. Without its draft adapter a run continues."""
        if member.role == "draft_adapter" and self.run.broadcasts is not None:
            self._without_adapter(member, told)
            self._without_draft = True
            self.crew.tell_launchers(m.Dismiss(member.name))
        else:
            self._note_lost(member, told)
            self.run.fail(told)

    def _told(self, name: str, error: str) -> str:
        """What the user is told of an exception."""
        return f"{name} failed: {error}; see {self.records.run_dir}/logs/{name}.log"

    def _note_lost(self, member: Member, reason: str) -> None:
        if not member.noted:
            error = {"error": member.error} if member.error else {}
            self.records.note("lost", actor=member.name, reason=reason, **error)
        member.noted = True

    def stopped(self, name: str) -> None:
        """Note that an actor has stopped. If one fails while the run goes on, its launcher reports its end, too."""
        member = self.crew.members.get(name)
        if member is not None and (self.run.stop_reason or not member.error):
            self.crew.leave(member)

    def _dismiss(self, name: str) -> None:
        """Have the replacement of an actor that the run does without killed, if there is one."""
        if name:
            self.crew.tell_launchers(m.Dismiss(name))
            self.crew.tell_launchers(m.Kill(name, "the run continues without it"))

    def _without_adapter(self, member: Member, reason: str) -> None:
        """Continue with the present draft: nobody waits for the draft adapter."""
        if "draft" in self.run.broadcasts.members and not self.run.stop_reason:
            self._note_lost(member, reason)
            self._end_draft(reason)

    def _end_draft(self, reason: str) -> None:
        self.records.counters["draft/adapter_lost"] = 1
        self.records.line(f"the draft adapter is gone ({reason}): the draft no longer changes")
        self.run.broadcasts.end_draft()
        for logprob in self.crew.playing("logprob"):
            self.run.server.send(logprob.name, m.DraftEnded())

    # Actors that arrive.
    def claim(self, names: list[str]) -> m.Claimed:
        """Grant names to the actors of a node that has started by itself.

        Returns:
            For each actor its own name, or the name of its replacement if it has been up before. No name, and the
            reason, if one of them is unknown or cannot be replaced alone.
        """
        crew, granted = self.crew, []
        for name in names:
            known = crew.named(name)
            # All ranks of a generator are on one node and have one replacement number.
            ranks = [known]
            if known and self._starts_with_others(known[0]):
                size = self.config.engine.tensor_parallel
                ranks = [crew.named(each) for each in topology.rank_names(known[0].leader, size)]
            came = bool(known) and (
                self.run.broadcasts is not None
                or any(first.hello is not None or not first.present for first, *_ in ranks)
            )
            if not known or (came and known[0].role not in replaceable(self.config)):
                return m.Claimed(
                    [],
                    f"{name} cannot be replaced alone: all actors must restart from the last checkpoint; "
                    "expected the first node's launcher to restart them",
                )
            # A launcher that is cut off counts up by one from the name it has (`Supervisor.died`). Steps of 100 keep
            # the two from giving out the same name.
            granted.append(f"{name}.{100 * max(map(len, ranks))}" if came else name)
        for name, new in zip(names, granted):
            if new == name:
                crew.expect(crew.members[name])
            else:
                self._start_again(name, new)
        return m.Claimed(granted)

    def _start_again(self, name: str, new: str) -> None:
        """Replace an actor whose node has restarted and brings a new one."""
        for before in [member for member in self.crew.named(name) if member.present]:
            reason = f"{before.name}'s node has restarted"
            self.crew.leave(before)
            self._note_lost(before, reason)
            if not self.run.stop_reason:
                self._replace(before, reason, new)
        if new not in self.crew.members:
            self._expect(new, self.crew.role_of(name))

    def arrived(self, hello: m.Hello) -> None:
        """Note that an actor is up. If it is a replacement, tell all actors its address and add it to its groups."""
        member, run = self.crew.arrived(hello), self.run
        if member is None or run.broadcasts is None:
            return
        if not member.late or not member.present or member.name in run.broadcasts.devices:
            return
        run.welcome()
        if member.role == "logprob" and self.config.adapting and "draft" not in run.broadcasts.members:
            run.server.send(member.name, m.DraftEnded())
        if not self._starts_with_others(member):
            run.broadcasts.add(hello, _KINDS[member.role])

    def _starts_with_others(self, member: Member) -> bool:
        """Whether an actor is one of several ranks of a generator, which start their engine after the Welcome."""
        return member.role in ("generator", GENERATOR_RANK) and self.config.engine.tensor_parallel > 1

    def connected(self, name: str) -> None:
        """Note that a rank of a generator has started its engine with the others. If it is a replacement, add it to
        its groups: before that it could not have joined them.
        """
        member, broadcasts = self.crew.members.get(name), self.run.broadcasts
        if member is None or broadcasts is None or member.hello is None:
            return
        if member.late and member.present and name not in broadcasts.devices:
            broadcasts.add(member.hello, _KINDS[member.role])

    def joined(self, name: str) -> None:
        """Note that an actor is ready. A replacement gets work from now on."""
        member = self.crew.members.get(name)
        if member is None or member.hello is None:
            return
        member.said_ready()
        if not member.present:
            return
        self.crew.vigil.heard(name)  # it has loaded: the deadline of working actors applies
        if not member.late:
            return
        self.run.progress()
        seconds = self.run.moved - member.since
        if member.role == "logprob":
            # A generator may have reported after the loss that it sent the dead actor a group.
            self._reissue_generated("its logprob actor died", member.since + LATE_WORD_S)
        self.records.counters[f"recovery/{member.role}_s"] = seconds
        self.records.note("joined", actor=name, seconds=round(seconds, 3))
        self.records.line(f"{name} has joined, {seconds:.1f} s after the loss")

    def _replace(self, member: Member, reason: str, replacement: str = "") -> None:
        """Issue an actor's tickets again. The other actors continue until its replacement is ready."""
        self.run.progress()
        again, counters = 0, self.records.counters
        if member.role == "generator":
            # This includes groups that have left it and not reached the trainer: they may be lost on the way. If a
            # group arrives twice, the first one counts.
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
        after = f"{replacement} replaces it" if replacement else "the others continue"
        self.records.line(f"{reason}: {f'{again} tickets are issued again; ' if again else ''}{after}")

    def _reissue_generated(self, reason: str, before: float = float("inf")) -> int:
        """Issue again the tickets that left their generator before a time and have not reached the trainer."""
        return self.run.book.reissue(lambda generator, stage, since: stage == GENERATED and since < before, reason)

    def _expect(self, name: str, role: str) -> None:
        """Expect a new actor in place of another."""
        self.crew.enlist(name, role, late=self.run.broadcasts is not None)
        if (hello := self.crew.early(name)) is not None:  # its Hello arrived before its launcher's report
            self.arrived(hello)
