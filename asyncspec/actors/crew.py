"""The crew: the actors of a run, their roles, and the state of each one's life.

                  Hello          Ready
       STARTING ---------> UP ---------> READY
          |                |               |
          +----------------+---------------+  <--------+
                           | frozen, stuck, or late    | it answers again, and
                           v                           | returns to where it was
                       CONDEMNED -----------------> CUT_OFF
                           |       nobody answers      |
                           |                           | the run can spare it
                           +-----------+---------------+
                                       v
       GONE                        GIVEN_UP

- CONDEMNED: the controller asked its launcher to kill it. CUT_OFF: the launcher did not answer either; the run waits.
- GIVEN_UP: the run continues without it, and its launcher has not reported its end yet. If it is heard again, its
  launcher is asked again to kill it.
- GONE: it has stopped, or its launcher reported its death. Every state but GIVEN_UP can lead here.

An actor may send Hello and Ready while it is CONDEMNED or CUT_OFF: `Member.reached` keeps how far it has come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from asyncspec.actors.base import first_name, replacement_number
from asyncspec.config import Config, topology, work
from asyncspec.deadlines import KILLED_S
from asyncspec.wire import messages as m
from asyncspec.wire.heartbeat import SUFFIX, Vigil


def actor_names(config: Config) -> dict[str, str]:
    """Return name -> role of every actor except the controller."""
    return topology.name_actors(
        config.trainer.ranks,
        config.deployment.logprobs,
        config.logprob.ranks,
        config.deployment.generators,
        config.engine.tensor_parallel,
        config.adapting,
    )


def replaceable(config: Config) -> set[str]:
    """Return the roles whose actors can be replaced. The ranks of a generator are replaced together; those of a trainer
    or of a logprob actor start only with all others.
    """
    return {"draft_adapter", "generator", topology.GENERATOR_RANK, *(["logprob"] if config.logprob.ranks == 1 else [])}


def computing(config: Config, names: Mapping[str, str]) -> list[str]:
    """Return the actors among `names` (name -> role) that use a device. The controller uses none, and neither does a
    generator whose SGLang server computes for it.
    """
    waiting = ("controller", "generator") if config.engine.kind == "sglang" else ("controller",)
    return [name for name, role in names.items() if role not in waiting]


class Life(Enum):
    """The states of an actor's life; the module's docstring explains them."""

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
    """A change of an actor's life that `NEXT` does not allow."""


@dataclass
class Member:
    """One actor. Every process that plays or played a role has its own name and its own Member."""

    name: str
    role: str
    late: bool = False  # it joins a run under way, as a replacement
    since: float = 0.0  # when it began to start, or to load
    life: Life = Life.STARTING
    hello: m.Hello | None = None
    joined: bool = False  # it has sent Ready
    using: dict[str, int] = field(default_factory=dict)  # kind of weights -> the version that it uses
    # kind of weights -> the newest version that it has sent or received whole
    whole: dict[str, m.Whole] = field(default_factory=dict)
    condemned_at: float = 0.0  # when its launcher was last asked to kill it; 0: never
    error: str = ""  # the exception that was raised in it, in one line; "": none
    failed_at: float = 0.0  # when it reported that exception
    noted: bool = False  # the ledger says that it was lost

    @property
    def leader(self) -> str:
        """The first name of the rank that leads it: its own, unless it is one of several ranks of a model."""
        return topology.rank_of(first_name(self.name))[0]

    @property
    def number(self) -> int:
        """Its replacement number. All ranks of a model share it."""
        return replacement_number(self.name)

    @property
    def present(self) -> bool:
        return self.life not in (Life.GIVEN_UP, Life.GONE)

    @property
    def settled(self) -> bool:
        """Whether it is present and not a replacement that is still starting."""
        return self.present and (self.joined or not self.late)

    @property
    def condemned(self) -> bool:
        return self.life in (Life.CONDEMNED, Life.CUT_OFF)

    @property
    def reached(self) -> Life:
        """The state that its own messages have brought it to: STARTING, UP or READY."""
        return Life.READY if self.joined else Life.STARTING if self.hello is None else Life.UP

    def transition(self, to: Life) -> None:
        """Change to another state of life.

        Raises:
            ImpossibleTransition: `NEXT` does not allow it.
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
    """All actors that the run has or ever had, and the launchers that started them."""

    def __init__(self, config: Config, send: Callable[[str, m.Message], bool]) -> None:
        """
        Args:
            send: callable(name of an actor or a launcher, message).
        """
        self.members = {name: Member(name, role) for name, role in actor_names(config).items()}  # lost ones too
        self.launchers: set[str] = set()
        self.vigil = Vigil(config.deployment.silent_timeout_s, work.turn_s(config))
        self._early: dict[str, m.Hello] = {}  # Hello of actors that no launcher has announced yet
        self._send, self._start_s = send, work.start_s(config)

    # The actors.
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
        """Inbox address by first name. A lost actor keeps its address until its replacement sends Hello. The name of a
        logprob actor that was cut off leads to another logprob actor.
        """
        known = sorted((member for member in self.members.values() if member.hello), key=lambda member: member.present)
        found = {first_name(member.name): member.hello.address for member in known}  # present actors come last, and win
        here = [member for member in self.playing("logprob") if member.hello]
        away = {
            first_name(member.name)
            for member in self.members.values()
            if member.role == "logprob" and member.life in (Life.CUT_OFF, Life.GIVEN_UP)
        } - {first_name(member.name) for member in here}
        best = [member for member in here if member.settled and not member.condemned] or here
        return found | {name: best[0].hello.address for name in away if best}

    def playing(self, role: str) -> list[Member]:
        """Return the present actors of a role, also those that are still starting."""
        return [member for member in self.present if member.role == role]

    def named(self, first: str) -> list[Member]:
        """Return all actors with a first name, oldest first: generator0, generator0.1 and so on."""
        return [member for member in self.members.values() if first_name(member.name) == first]

    def role_of(self, name: str) -> str:
        return self.members[name].role if name in self.members else ""

    # Changes in their lives.
    def expect(self, member: Member) -> None:
        """Note that an actor is being started."""
        member.since = time.monotonic()
        self.vigil.expect(member.name, self._start_s)

    def enlist(self, name: str, role: str, late: bool) -> Member:
        """Add an actor that is being started as a replacement, and return it."""
        member = self.members[name] = Member(name, role, late)
        self.expect(member)
        return member

    def arrived(self, hello: m.Hello) -> Member | None:
        """Note that an actor is up, and return it. None if no launcher has announced it yet: see `early`."""
        member = self.members.get(hello.name)
        if member is None:
            self._early.setdefault(hello.name, hello)
            return None
        member.said_hello(hello)
        if member.present:
            self.vigil.heard(member.name, loading=True)
        return member

    def early(self, name: str) -> m.Hello | None:
        """Take the Hello that an actor sent before its launcher announced it; None if there is none."""
        return self._early.pop(name, None)

    def heard(self, sender: str, beat: m.Beat) -> None:
        """Note a beat of an actor or of a launcher."""
        member = self.members.get(beat.name)
        if sender == beat.name:  # a launcher: it beats from its main loop
            self.launchers.add(sender)
        elif member is None:
            pass
        elif member.life is Life.GIVEN_UP:
            if time.monotonic() - member.condemned_at > KILLED_S:
                self._have_killed(member, "was cut off")
        elif member.present and sender == member.name + SUFFIX:
            self.vigil.heard(member.name, beat.turn_s, loading=not member.joined)
            member.using, member.whole = beat.using, beat.whole
            if member.life is Life.CUT_OFF:
                self._answers_again(member, beat)

    def _answers_again(self, member: Member, beat: m.Beat) -> None:
        """Handle a beat of a cut-off actor: kill the actor if it is stuck, else restore its state."""
        if member.joined and beat.turn_s > self.vigil.turn_s:
            self.tell_launchers(m.Kill(member.name, "stuck"))
        elif not all(
            rank.present
            for rank in self.members.values()
            if (rank.leader, rank.number) == (member.leader, member.number)
        ):
            self.tell_launchers(m.Kill(member.name, "without the other ranks"))
        else:
            member.transition(member.reached)
            member.condemned_at = 0.0

    def overdue(self) -> list[tuple[Member, str]]:
        """Return the actors that are frozen or stuck, each once, and what is wrong. Call it often."""
        found = self.vigil.overdue()
        for member in self.members.values():
            if member.condemned_at:  # do not count the time in which this process slept
                member.condemned_at = min(time.monotonic(), member.condemned_at + self.vigil.slept)
        members = [(self.members[name], what) for name, what in found]
        return [(member, what) for member, what in members if not member.condemned]  # launchers know about the others

    def condemn(self, member: Member, what: str) -> None:
        """Ask the launchers to kill an actor; the one that started it will."""
        member.transition(Life.CONDEMNED)
        self._have_killed(member, what)

    def _have_killed(self, member: Member, what: str) -> None:
        member.condemned_at = time.monotonic()
        self.tell_launchers(m.Kill(member.name, what))

    @property
    def unanswered(self) -> list[Member]:
        """The condemned actors whose launcher has not reported their end in time."""
        now = time.monotonic()
        return [member for member in self.members.values() if member.condemned and now - member.condemned_at > KILLED_S]

    def died(self, member: Member) -> None:
        """Note that the launcher reported an actor's end."""
        member.transition(Life.GONE)
        self.vigil.forget(member.name)

    def leave(self, member: Member) -> None:
        """Note that an actor has stopped, or that the run continues without it. A condemned actor becomes GIVEN_UP: its
        launcher has yet to report its end.
        """
        if member.present:
            member.transition(Life.GIVEN_UP if member.condemned else Life.GONE)
            self.vigil.forget(member.name)

    def tell_launchers(self, message: m.Message) -> None:
        for launcher in self.launchers:
            self._send(launcher, message)
