"""The crew: which actors play which roles, and where each one is in its life.

                  Hello          Ready
       STARTING ---------> UP ---------> READY
          |                |               |
          +----------------+---------------+  <--------+
                           | frozen, stuck, or late    | it is heard of again,
                           v                           | and goes on where it was
                       CONDEMNED -----------------> CUT_OFF
                           |       nobody answers      |
                           |                           | the run can spare it
                           +-----------+---------------+
                                       v
       GONE                        GIVEN_UP

- CONDEMNED: its launcher was asked to kill it. CUT_OFF: the launcher has not answered either, and the run waits.
- GIVEN_UP: the run goes on without it, and its launcher has not told of its end yet. It may come back to life: then its
  launcher is asked again to kill it.
- GONE: it has stopped, or its launcher told of its death. Every state but GIVEN_UP leads there.

An actor says Hello and Ready also while it is CONDEMNED or CUT_OFF: `Member.reached` keeps how far it has come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from asyncspec.actors.base import first_name
from asyncspec.config import Config, topology
from asyncspec.deadlines import KILLED_S
from asyncspec.wire import messages as m
from asyncspec.wire.heartbeat import SUFFIX, Vigil


def actor_names(config: Config) -> dict[str, str]:
    """name -> role of every actor but the controller."""
    return topology.name_actors(
        config.trainer.ranks,
        config.deployment.logprobs,
        config.logprob.ranks,
        config.deployment.generators,
        config.adapting,
    )


def replaceable(config: Config) -> set[str]:
    """The roles whose actors can be replaced one by one. The ranks of one model cannot: they start together."""
    return {"generator", "draft_adapter", *(["logprob"] if config.logprob.ranks == 1 else [])}


def computing(config: Config, names: Mapping[str, str]) -> list[str]:
    """The actors among `names` (name -> role) that take a device: not the controller, nor a generator whose server
    computes for it.
    """
    waiting = ("controller", "generator") if config.engine.kind == "sglang" else ("controller",)
    return [name for name, role in names.items() if role not in waiting]


class Life(Enum):
    STARTING = "starting"
    UP = "up"
    READY = "ready"
    CONDEMNED = "condemned"
    CUT_OFF = "cut off"
    GIVEN_UP = "given up"
    GONE = "gone"


NEXT: dict[Life, set[Life]] = {
    Life.STARTING: {Life.UP, Life.CONDEMNED, Life.GONE},
    Life.UP: {Life.READY, Life.CONDEMNED, Life.GONE},
    Life.READY: {Life.CONDEMNED, Life.GONE},
    Life.CONDEMNED: {Life.CUT_OFF, Life.GIVEN_UP, Life.GONE},
    Life.CUT_OFF: {Life.STARTING, Life.UP, Life.READY, Life.GIVEN_UP, Life.GONE},
    Life.GIVEN_UP: set(),
    Life.GONE: set(),
}


class ImpossibleTransition(RuntimeError):
    """An actor's life does not go this way."""


@dataclass
class Member:
    """One actor: every process that plays or played a role has a name, and a member, of its own."""

    name: str
    role: str
    late: bool = False  # it joins a run that is under way, in place of another
    since: float = 0.0  # when it began to come up
    life: Life = Life.STARTING
    hello: m.Hello | None = None
    joined: bool = False  # it has said Ready
    condemned_at: float = 0.0  # when its launcher was last asked to kill it; 0: never

    @property
    def present(self) -> bool:
        return self.life not in (Life.GIVEN_UP, Life.GONE)

    @property
    def settled(self) -> bool:
        """It is present, and not still coming up in place of another."""
        return self.present and (self.joined or not self.late)

    @property
    def condemned(self) -> bool:
        return self.life in (Life.CONDEMNED, Life.CUT_OFF)

    @property
    def reached(self) -> Life:
        """How far it has come up."""
        return Life.READY if self.joined else Life.STARTING if self.hello is None else Life.UP

    def transition(self, to: Life) -> None:
        """
        Raises:
            ImpossibleTransition: no actor goes from its state to that one.
        """
        if to not in NEXT[self.life]:
            raise ImpossibleTransition(f"{self.name} is {self.life.value}: it cannot become {to.value}")
        self.life = to

    def said_hello(self, hello: m.Hello) -> None:
        self.hello = self.hello or hello
        if self.life is Life.STARTING:
            self.transition(Life.UP)

    def said_ready(self) -> None:
        self.joined = True
        if self.life is Life.UP:
            self.transition(Life.READY)


class Crew:
    def __init__(self, config: Config, send: Callable[[str, m.Message], bool]) -> None:
        """
        Args:
            send: callable(name of an actor or a launcher, message).
        """
        self.members = {name: Member(name, role) for name, role in actor_names(config).items()}  # all that ever were
        self.launchers: set[str] = set()
        self.vigil = Vigil(config.deployment.silent_timeout_s, config.deployment.turn_timeout_s)
        self._early: dict[str, m.Hello] = {}  # from actors that their launcher has not told of yet
        self._send, self._start_s = send, config.deployment.start_timeout_s

    # Who there is.
    @property
    def present(self) -> list[Member]:
        return [member for member in self.members.values() if member.present]

    @property
    def settled(self) -> list[Member]:
        return [member for member in self.members.values() if member.settled]

    @property
    def generators(self) -> list[str]:
        """The generators that tickets can be sent to."""
        return [member.name for member in self.settled if member.role == "generator"]

    @property
    def addresses(self) -> dict[str, str]:
        """Inbox address by first name. A lost actor keeps its address until its replacement says Hello. What goes to a
        logprob actor that was cut off goes to another one.
        """
        known = sorted((member for member in self.members.values() if member.hello), key=lambda member: member.present)
        found = {first_name(member.name): member.hello.address for member in known}  # one that is present comes last
        here = [member for member in self.playing("logprob") if member.hello]
        away = {
            first_name(member.name)
            for member in self.members.values()
            if member.role == "logprob" and member.life in (Life.CUT_OFF, Life.GIVEN_UP)
        } - {first_name(member.name) for member in here}
        best = [member for member in here if member.settled and not member.condemned] or here
        return found | {name: best[0].hello.address for name in away if best}

    def playing(self, role: str) -> list[Member]:
        """Those who play a role, or are coming up to play it."""
        return [member for member in self.present if member.role == role]

    def named(self, first: str) -> list[Member]:
        """Those who have played one part, in turn: generator0, generator0.1 and so on."""
        return [member for member in self.members.values() if first_name(member.name) == first]

    def role_of(self, name: str) -> str:
        return self.members[name].role if name in self.members else ""

    # What becomes of them.
    def expect(self, member: Member) -> None:
        """An actor is being started."""
        member.since = time.monotonic()
        self.vigil.expect(member.name, self._start_s)

    def enlist(self, name: str, role: str, late: bool) -> Member:
        """Another actor is being started, in place of one that was lost."""
        member = self.members[name] = Member(name, role, late)
        self.expect(member)
        return member

    def arrived(self, hello: m.Hello) -> Member | None:
        """An actor is up; None if its launcher has not told of it yet, see `early`."""
        member = self.members.get(hello.name)
        if member is None:
            self._early.setdefault(hello.name, hello)
            return None
        member.said_hello(hello)
        if member.present:
            self.vigil.heard(member.name, loading=True)
        return member

    def early(self, name: str) -> m.Hello | None:
        """What an actor said before its launcher told of it."""
        return self._early.pop(name, None)

    def heard(self, sender: str, beat: m.Beat) -> None:
        """A sign of life, of an actor or of a launcher."""
        member = self.members.get(beat.name)
        if sender == beat.name:  # a launcher's: its own loop beats
            self.launchers.add(sender)
        elif member is None:
            pass
        elif member.life is Life.GIVEN_UP:
            if time.monotonic() - member.condemned_at > KILLED_S:
                self._have_killed(member, "was cut off")
        elif member.present and sender == member.name + SUFFIX:
            self.vigil.heard(member.name, beat.turn_s, loading=not member.joined)
            if member.life is Life.CUT_OFF:
                self._answers_again(member, beat)

    def _answers_again(self, member: Member, beat: m.Beat) -> None:
        """One that the run has waited for beats again."""
        if member.joined and beat.turn_s > self.vigil.turn_s:
            self.tell_launchers(m.Kill(member.name, "stuck"))
        else:
            member.transition(member.reached)
            member.condemned_at = 0.0

    def overdue(self) -> list[tuple[Member, str]]:
        """The actors that are frozen or stuck, each once, and what is wrong. Call it often."""
        found = self.vigil.overdue()
        for member in self.members.values():
            if member.condemned_at:  # time in which this process slept counts for nobody
                member.condemned_at = min(time.monotonic(), member.condemned_at + self.vigil.slept)
        members = [(self.members[name], what) for name, what in found]
        return [(member, what) for member, what in members if not member.condemned]  # launchers know of the others

    def condemn(self, member: Member, what: str) -> None:
        """Ask whichever launcher has it to end its process."""
        member.transition(Life.CONDEMNED)
        self._have_killed(member, what)

    def _have_killed(self, member: Member, what: str) -> None:
        member.condemned_at = time.monotonic()
        self.tell_launchers(m.Kill(member.name, what))

    @property
    def unanswered(self) -> list[Member]:
        """The condemned whose launcher had time enough to tell of their end."""
        now = time.monotonic()
        return [
            member for member in self.members.values() if member.condemned and now - member.condemned_at > KILLED_S
        ]

    def died(self, member: Member) -> None:
        """Its launcher tells of its end."""
        member.transition(Life.GONE)
        self.vigil.forget(member.name)

    def leave(self, member: Member) -> None:
        """It has stopped, or is done without: where it was condemned its launcher has yet to tell of its end."""
        if member.present:
            member.transition(Life.GIVEN_UP if member.condemned else Life.GONE)
            self.vigil.forget(member.name)

    def tell_launchers(self, message: m.Message) -> None:
        for launcher in self.launchers:
            self._send(launcher, message)
