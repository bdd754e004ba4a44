"""Runs a job under a launcher that starts all actors itself, and restarts them from the last checkpoint when needed.

A `Pool` starts the processes and carries their results: monarch.py has the one for Monarch, ray.py the one for Ray. A
process whose actor has ended cleanly can play another actor of the same kind.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import msgspec

from asyncspec.actors.base import LEFT_BEHIND, ActorSpec, first_name
from asyncspec.config import Config, work
from asyncspec.console import terminal
from asyncspec.deadlines import EXIT_GRACE_S, LATE_WORD_S, STANDBY_AFTER_S
from asyncspec.errors import last_line
from asyncspec.launch import roles, torchrun
from asyncspec.launch.interrupt import InterruptFlag
from asyncspec.launch.watch import Supervisor
from asyncspec.wire import transport

POLL_S = 0.1


class NotStarted(RuntimeError):
    """The controller did not come up; the message is one line for the user."""


class Ended(RuntimeError):
    """A process ended, and nobody had asked it to."""


class Process(ABC):
    """A process that plays one actor, and later others."""

    @abstractmethod
    def play(self, spec: ActorSpec) -> None:
        """Make the actor and run it. Does not wait for either."""

    @abstractmethod
    def prepared(self) -> str | Exception | None:
        """The controller's address once the controller is made, "" once another actor is made. None before that, and an
        exception if making the actor failed.
        """

    @abstractmethod
    def result(self) -> int | Exception | None:
        """What the actor's `run` returned. None before that, and an exception if it raised one or the process ended."""

    @abstractmethod
    def alive(self) -> bool:
        """Whether the process can play an actor, as far as is known."""

    @abstractmethod
    def kill(self) -> None:
        """End the process at once, even if it is frozen."""


class Pool(ABC):
    """The processes of a run."""

    def __init__(self) -> None:
        self._idle: dict[str, list[Process]] = {}  # first name of an actor -> processes that played it

    @abstractmethod
    def specs(self, config: Config, version: int) -> list[ActorSpec]:
        """The actors of the run, the controller first. Their `control_address` is still empty."""

    @abstractmethod
    def make(self, name: str) -> Process:
        """Start a process for the actor with this first name."""

    def keep_spares(self, names: list[str], count: int) -> None:
        """Keep `count` spare processes ready wherever one of these actors plays, if a process takes long to start.

        Called often.
        """

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Return after timeout_s, or earlier if a process may have ended."""

    @abstractmethod
    def stop(self) -> None:
        """End every process."""

    def elsewhere(self, spec: ActorSpec) -> str:
        """Return the device for the replacement of an actor that was lost too often where it is: one that no actor
        uses, or its own if there is none. The next process made for it is to be there.
        """
        return spec.device

    def began(self, config: Config, address: str, version: int) -> None:
        """Called once the controller is up at `address`; all actors start from `version`."""

    def ended(self, config: Config, code: int) -> None:
        """Called once the run has ended with this exit code."""

    def take(self, name: str) -> Process:
        """Return a process for an actor: an idle one that has played it before, if there is one, else a new one."""
        waiting = self._idle.get(first_name(name), [])
        while waiting:
            if (process := waiting.pop(0)).alive():
                return process
        return self.make(first_name(name))

    def give_back(self, name: str, process: Process) -> None:
        self._idle.setdefault(first_name(name), []).append(process)


def run(config: Config, resume: bool, start: Callable[[InterruptFlag], Pool], local: bool) -> int:
    """Run the job. Returns the exit code: 0 finished, 1 failed, 130 interrupted.

    Args:
        resume: continue the run in config.run_dir.
        start: callable(interrupt) -> the pool; raises KeyboardInterrupt if it was interrupted.
        local: whether the actors compute on this host.
    """
    if not resume:
        lock = roles.prepare_run_dir(config, local)
    else:
        lock = roles.hold(config.run_dir)
    pool, code = None, 1
    try:
        version = roles.prepare_resume(config) if resume else -1
        torchrun.warn(config)
        interrupt = InterruptFlag()
        pool = start(interrupt)
        for left in range(config.deployment.restarts, -1, -1):
            attempt = _Attempt(config, version, interrupt, left, pool)
            try:
                code = attempt.watch()
            finally:
                attempt.end()
            if not attempt.resuming or interrupt.count:
                break
            version = roles.prepare_resume(config)
        if code not in (0, 130):
            # The controller prints this line if it can; it has not, for example because it was still starting.
            if interrupt.count:
                print("stopped early: interrupted", flush=True)
            code = 130 if interrupt.count else 1
    except KeyboardInterrupt:
        print("stopped early: interrupted while starting", flush=True)
        code = 130
    except NotStarted as error:
        print(f"failed: {error}", flush=True)
        code = 1
    finally:
        if pool is not None:
            pool.ended(config, code)
            pool.stop()
        terminal().show_cursor()  # the bars hide it, and a controller that was killed has not shown it again
        lock.release()
    return code


class _Attempt:
    """All actors of the run, from one start to their end."""

    def __init__(self, config: Config, version: int, interrupt: InterruptFlag, restarts_left: int, pool: Pool) -> None:
        transport.use_keys(config.run_dir if config.deployment.encrypt else None)
        self.config, self.interrupt, self.restarts_left, self.pool = config, interrupt, restarts_left, pool
        self.resuming = False
        self.playing: dict[str, Process] = {}
        self.left_behind: dict[str, float] = {}  # actors whose `run` returned LEFT_BEHIND, and when
        self.started = time.monotonic()
        self.specs, self.version = pool.specs(config, version), version

    def _play(self, spec: ActorSpec, process: Process) -> None:
        process.play(spec)
        self.playing[spec.name], self.started = process, time.monotonic()

    def _keep_spares(self) -> None:
        if (
            time.monotonic() - self.started > STANDBY_AFTER_S
            and not self.interrupt.count
            and all(process.prepared() is not None for process in self.playing.values())
        ):
            self.pool.keep_spares(list(self.playing), min(self.config.deployment.standby, self.supervisor.replacements))

    def watch(self) -> int:
        """Start all actors and look after them until the controller has ended. Returns the exit code."""
        first, *others = [(spec, self.pool.take(spec.name)) for spec in self.specs]
        self._play(msgspec.structs.replace(first[0], may_restart=self.restarts_left > 0), first[1])
        if not (address := self._controller()):
            return 1
        self.pool.began(self.config, address, self.version)
        for spec, process in others:
            self._play(msgspec.structs.replace(spec, control_address=address), process)
        self.supervisor = Supervisor(
            self.config,
            "launcher",
            address,
            self.specs,
            self.interrupt,
            self.restarts_left > 0,
            self._kill,
            self.pool.elsewhere,
        )
        code = None
        while code is None:
            self.pool.wait(POLL_S)
            for name, process in list(self.playing.items()):
                if (value := self._result(name, process)) is None:
                    continue
                del self.playing[name]
                if isinstance(value, Exception):  # most likely its process ended
                    process.kill()
                    if (spec := self.supervisor.died(name, last_line(value)[:200])) is not None:
                        self._play(msgspec.structs.replace(spec, control_address=address), self.pool.take(spec.name))
                    value = 1
                else:
                    self.pool.give_back(name, process)
                    if name == "controller":
                        self.supervisor.ended(value)
                if name == "controller":
                    code = value
            self.supervisor.turn()
            self._keep_spares()
            if self.supervisor.overdue:
                code = 1
        self.resuming = self.supervisor.resuming
        self.supervisor.close()
        return code

    def _result(self, name: str, process: Process) -> int | Exception | None:
        """The result of the process. An actor that has lost the controller, or its host's Ray, counts as dead, but only
        after LATE_WORD_S: the controller may just have ended.
        """
        since = self.left_behind.get(name)
        if since is None and (value := process.result()) != LEFT_BEHIND:
            return value
        since = self.left_behind.setdefault(name, time.monotonic())
        return RuntimeError("it lost the controller") if time.monotonic() - since > LATE_WORD_S else None

    def end(self) -> None:
        """End the processes that still play. Before a restart they have EXIT_GRACE_S to end by themselves, because the
        controller has asked those that it can reach to stop.
        """
        deadline = time.monotonic() + (EXIT_GRACE_S if self.resuming else 0.0)
        while self.playing:
            self.pool.wait(POLL_S / 10)
            for name, process in list(self.playing.items()):
                if name in self.left_behind or (value := process.result()) is not None:
                    del self.playing[name]
                    if name in self.left_behind or not isinstance(value, Exception):
                        self.pool.give_back(name, process)
            if time.monotonic() > deadline:
                break
        for process in self.playing.values():
            process.kill()

    def _kill(self, name: str) -> None:
        if name in self.playing:
            self.playing[name].kill()

    def _controller(self) -> str:
        """Wait for the controller's address. Returns "" if the controller's process ended or did not come up in time,
        and a restart is left.

        Raises:
            NotStarted: the controller failed to start, and a restart would not help or none is left.
            KeyboardInterrupt: the user interrupted the wait.
        """
        limit = work.start_s(self.config)
        deadline = time.monotonic() + limit
        while (outcome := self.playing["controller"].prepared()) is None:
            if self.interrupt.count:
                raise KeyboardInterrupt
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        if (outcome is None or isinstance(outcome, Ended)) and self.restarts_left:
            how = (
                "its process ended while starting"
                if outcome is not None
                else f"frozen: no sign of life for {limit:.1f} s"
            )
            print(f"controller died: {how}; all actors restart from the last checkpoint", flush=True)
            self.resuming = True
            return ""
        if outcome is None:
            raise NotStarted(
                f"the controller's process did not start within {limit:.0f} s; raise deployment.start_timeout_s"
            )
        if isinstance(outcome, Exception):
            raise NotStarted(f"the controller did not start: {type(outcome).__name__}: {last_line(outcome)}")
        return outcome
