"""The crew: which actors play which roles, and where each one is in its life.

Coming up, then up (it has said Hello), ready (it has joined its broadcast groups), and gone (it has stopped, or was
lost). One that comes up in place of another is joining until it is ready. One that has frozen or cannot be reached is
condemned: its launcher is to kill it. One whose launcher does not answer either is cut off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

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
    """The roles of actors in whose place others can be started alone. The ranks of one model cannot: they start
    together.
    """
    return {"generator", "draft_adapter", *(["logprob"] if config.logprob.ranks == 1 else [])}


def computing(config: Config, names: Mapping[str, str]) -> list[str]:
    """Those of some actors (name -> role) that take a device: not the controller, nor a generator whose server computes
    for it.
    """
    waiting = ("controller", "generator") if config.engine.kind == "sglang" else ("controller",)
    return [name for name, role in names.items() if role not in waiting]


class Crew:
    def __init__(self, config: Config, send: Callable[[str, m.Message], bool]) -> None:
        """
        Args:
            send: callable(name of an actor or a launcher, message).
        """
        self.roles = actor_names(config)  # of all that ever were, by name
        self.hellos: dict[str, m.Hello] = {}
        self.ready: set[str] = set()
        self.gone: set[str] = set()
        self.since: dict[str, float] = {}  # when each began to come up, or to join
        self.joining: dict[str, float] = {}  # those that came in place of others, and when those were lost
        self.condemned: dict[str, float] = {}  # those whose launcher was asked to kill them, and when
        self.cut_off: set[str] = set()  # those of them that nobody has answered for
        self.launchers: set[str] = set()
        self.vigil = Vigil(config.deployment.silent_timeout_s, config.deployment.turn_timeout_s)
        self._send, self._start_s = send, config.deployment.start_timeout_s

    @property
    def present(self) -> set[str]:
        """Those that are up or are coming up."""
        return set(self.roles) - self.gone

    @property
    def settled(self) -> set[str]:
        """Those of them that are not still coming up in place of another."""
        return self.present - (self.joining.keys() - self.ready)

    @property
    def generators(self) -> list[str]:
        """Those that tickets can be sent to."""
        return self.at_work("generator")

    @property
    def addresses(self) -> dict[str, str]:
        """Of the inboxes, by first name; of one that is lost until another has its place, but another logprob actor's
        for one that is cut off.
        """
        # of several of one name the last that is present
        hellos = sorted(self.hellos.items(), key=lambda item: item[0] not in self.gone)
        found = {first_name(name): hello.address for name, hello in hellos if name in self.roles}
        here = [name for name in self.playing("logprob") if name in self.hellos]
        away = {first_name(name) for name in self.cut_off if self.roles[name] == "logprob"} - {
            first_name(name) for name in here
        }
        best = [name for name in here if name in self.settled and name not in self.condemned] or here
        return found | {name: found[first_name(best[0])] for name in away if best}

    def at_work(self, role: str) -> list[str]:
        """Those that play it now."""
        settled = self.settled
        return [name for name in self.playing(role) if name in settled]

    def playing(self, role: str) -> list[str]:
        return [name for name, played in self.roles.items() if played == role and name not in self.gone]

    def heard(self, sender: str, beat: m.Beat) -> None:
        """A sign of life, of an actor or of a launcher."""
        name = beat.name
        if sender == name:  # a launcher's: its own loop beats
            self.launchers.add(sender)
        elif name in self.gone and name in self.condemned:
            if time.monotonic() - self.condemned[name] > KILLED_S:
                self.condemn(name, "was cut off")
        elif name in self.present and sender == name + SUFFIX:
            self.vigil.heard(name, beat.turn_s, loading=name not in self.ready)
            if name in self.cut_off and name in self.ready and beat.turn_s > self.vigil.turn_s:
                self.tell_launchers(m.Kill(name, "stuck"))
            elif name in self.cut_off:  # the run has waited for it
                self.cut_off.discard(name)
                self.condemned.pop(name, None)

    def expect(self, name: str) -> None:
        """An actor is being started."""
        self.since[name] = time.monotonic()
        self.vigil.expect(name, self._start_s)

    def leave(self, name: str) -> None:
        """An actor is gone."""
        self.gone.add(name)
        self.vigil.forget(name)

    def condemn(self, name: str, what: str) -> None:
        """Ask whichever launcher has it to end its process."""
        self.condemned[name] = time.monotonic()
        self.tell_launchers(m.Kill(name, what))

    def tell_launchers(self, message: m.Message) -> None:
        for launcher in self.launchers:
            self._send(launcher, message)
