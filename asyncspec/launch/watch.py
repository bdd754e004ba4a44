"""The supervisor: what every launcher does while its actors live, however it starts their processes.

It reports interrupts and deaths to the controller and replaces the actors that can be replaced. When another actor
dies, the whole run is restarted from its last checkpoint: that is so for the trainer, whose state is the run, for the
controller, and for one of several ranks of a trainer or of a logprob actor. When a rank of a generator dies, the
controller has the others killed, and each is replaced. A process that ends after an exception is a death like any
other.

An actor that was lost LOST_HERE times on one device is replaced on another one, if the launcher has one that no actor
uses: the device may be faulty.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable

import msgspec

from asyncspec.actors.base import RAISED, RESTART, ActorSpec, first_name, replacement_number
from asyncspec.actors.crew import replaceable
from asyncspec.config import Config, work
from asyncspec.config.topology import GENERATOR_RANK, rank_of
from asyncspec.deadlines import EXIT_GRACE_S
from asyncspec.launch.interrupt import InterruptFlag
from asyncspec.wire.control import ControlClient
from asyncspec.wire.heartbeat import Vigil
from asyncspec.wire.messages import Beat, Dismiss, Interrupt, Kill, Lost, Stop

LOST_HERE = 2  # times; one loss may be chance


def died_of(config: Config, name: str, code: int) -> str:
    """Return how an actor died whose process has ended by itself with this exit code, as the user sees it."""
    what = "an exception" if code == RAISED else f"exit code {code}"
    return f"{what}; see {config.run_dir}/logs/{name}.log"


class Supervisor:
    def __init__(
        self,
        config: Config,
        name: str,
        address: str,
        specs: list[ActorSpec],
        interrupt: InterruptFlag,
        may_restart: bool,
        kill: Callable[[str], None],
        elsewhere: Callable[[ActorSpec], str],
        alone: bool = False,
    ) -> None:
        """
        Args:
            name: this launcher's name.
            address: the controller's address.
            specs: the actors that this launcher starts.
            may_restart: whether the whole run may be restarted.
            kill: callable(name of an actor), which ends the actor's process if this launcher has started it.
            elsewhere: callable(an actor that was lost too often where it is) -> the device for its replacement, which
                is its own if no other is free.
            alone: an interrupt ends only this launcher's actors. The run continues and treats the node as cut off.
        """
        self.config, self.name, self.interrupt, self.may_restart, self._kill = (
            config,
            name,
            interrupt,
            may_restart,
            kill,
        )
        self.alone, self.specs = alone, {spec.name: spec for spec in specs}
        self._elsewhere, self._lost = elsewhere, Counter[tuple[str, str]]()  # by first name and device
        self.replacements, self._stop_s = config.deployment.replacements, work.stop_s(config) + EXIT_GRACE_S
        self.resuming = False  # the run is to be restarted once it has ended
        self._client = ControlClient(address, name)
        self._vigil = Vigil(config.deployment.silent_timeout_s, math.inf)  # watches the controller
        if "controller" in self.specs:
            self._vigil.expect("controller", work.start_s(config))
        self._beaten, self._beat_every_s, self._told = 0.0, work.beat_every_s(config), False

    def turn(self) -> None:
        """Beat, do what the controller asks, pass on an interrupt, and kill a frozen controller. Call it often."""
        if time.monotonic() - self._beaten > self._beat_every_s:
            self._beaten = time.monotonic()
            self._client.send(Beat(self.name))
        while (message := self._client.receive()) is not None:
            if isinstance(message, Beat):
                self._vigil.heard(message.name)
            elif isinstance(message, Stop):  # the controller is about to end and stops its beats
                self._vigil.forget("controller")
            elif isinstance(message, Kill):
                self._kill(message.name)
            elif isinstance(message, Dismiss):
                self.specs.pop(message.name, None)
        for name, what in self._vigil.overdue():
            print(f"{name} is {what}", flush=True)
            self._kill(name)
        if self.interrupt.count and not self._told:
            self._told = True
            if self.alone:
                for name in self.specs:
                    self._kill(name)
            else:
                self._client.send(Interrupt("interrupted"))

    @property
    def overdue(self) -> bool:
        """Whether everything must end now: an interrupt was repeated, or has had no effect for too long."""
        return self.interrupt.count > 1 or bool(
            self.interrupt.count and time.monotonic() - self.interrupt.first > self._stop_s
        )

    def died(self, name: str, how: str) -> ActorSpec | None:
        """Handle an actor's process that ended although nobody had asked it to. Returns the spec of its replacement, if
        there is to be one.

        Args:
            how: the signal or the exit code, as the user sees it.
        """
        if self.alone and self.interrupt.count:
            return None
        spec, going_on = self.specs.get(name), not self.interrupt.count and not self.resuming
        if name == "controller":
            self._vigil.forget(name)
            self.resuming = going_on and self.may_restart
            print(
                f"controller died: {how}" + ("; all actors restart from the last checkpoint" if self.resuming else ""),
                flush=True,
            )
            return None
        new = None
        further = spec is not None and spec.role == GENERATOR_RANK  # its generator counts for it
        if spec is not None and spec.role in replaceable(self.config) and going_on and (self.replacements or further):
            self.replacements -= not further
            new = msgspec.structs.replace(
                spec, name=f"{first_name(name)}.{self._next_number(spec)}", device=self._device(spec)
            )
            self.specs[new.name] = new
        self._client.send(
            Lost(name, f"{name} died: {how}", new.name if new else "", may_restart=going_on and self.may_restart)
        )
        return new

    def _next_number(self, spec: ActorSpec) -> int:
        """Return the replacement number of an actor's successor: that of the generator's other ranks, if they have
        been replaced already.
        """
        number = replacement_number(spec.name)
        if spec.role not in ("generator", GENERATOR_RANK):
            return number + 1
        leader = rank_of(first_name(spec.name))[0]
        ranks = [replacement_number(name) for name in self.specs if rank_of(first_name(name))[0] == leader]
        return max(number + 1, *ranks)

    def _device(self, spec: ActorSpec) -> str:
        """Return the device for the replacement of an actor that was lost."""
        here = first_name(spec.name), spec.device
        self._lost[here] += 1
        if self._lost[here] < LOST_HERE:
            return spec.device
        del self._lost[here]
        return self._elsewhere(spec)

    def ended(self, code: int) -> None:
        """Handle a controller that has ended by itself."""
        self.resuming = code == RESTART and self.may_restart and not self.interrupt.count

    def close(self) -> None:
        self._client.close(None if not self.resuming else 0)
