"""The base class of all actors: how an actor starts, listens to the controller, reports, and ends.

An actor opens its inbox, loads, and sends Hello. It receives Welcome with the addresses of all actors, joins its
broadcast groups, and sends Ready. Then it calls `turn` again and again until the controller sends Stop. It calls
`finish` and sends Stopped. An exception goes to the controller as one line, and in full to the actor's log. The process
then ends with a code that tells its launcher to handle it like a death.

An actor does not know what launched it: a launcher passes it an `ActorSpec` and nothing else.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from asyncspec import clock
from asyncspec.config import Config, from_yaml, work
from asyncspec.console import never_fail
from asyncspec.deadlines import LOADING_PATIENCE
from asyncspec.errors import Damaged, UserError, first_line
from asyncspec.faults import Faults
from asyncspec.loading import gc_paused, use_threads
from asyncspec.timing.delays import Delays
from asyncspec.timing.spans import Recorder
from asyncspec.wire import messages as m
from asyncspec.wire import transport, waiting
from asyncspec.wire.addresses import use_ports
from asyncspec.wire.control import ControlClient
from asyncspec.wire.heartbeat import Heart

REPORT_EVERY_S = 1.0
GONE = "the controller or the launcher is gone"
RESTART = 75  # exit code of a controller: its launcher should restart all actors from the last checkpoint
LEFT_BEHIND = 76  # exit code of an actor that has lost its controller
STOPPING = 1  # exit code of an actor in which an exception was raised while it stopped, as it was asked to
RAISED = 77  # exit code of an actor in which an exception was raised: its launcher handles it like a death


class ActorSpec(msgspec.Struct, frozen=True):
    """Everything that a launcher passes to an actor."""

    role: str
    name: str
    run_dir: str
    config_yaml: str
    device: str = "cpu"
    control_address: str = ""  # empty for the controller, which opens it
    resume: int = -1  # the version to resume from; -1: a new run
    may_restart: bool = False  # for the controller: whether its launcher can restart all actors


def first_name(name: str) -> str:
    """Return the name without its replacement number: logprob for logprob, logprob.1 and so on."""
    return name.partition(".")[0]


def replacement_number(name: str) -> int:
    """Return how many times an actor was replaced, as its name says: 1 for generator0.1, 0 for generator0."""
    return int(name.partition(".")[2] or 0)


class StopRequested(Exception):
    """Raised inside a wait when this actor has to stop."""


class Actor(ABC):
    """One process of a run that plays one role."""

    role = ""
    threads = 1
    takes: tuple[type[m.Message], ...] = ()  # the messages that its inbox accepts
    played = False  # whether an actor has run in this process before

    def __init__(self, spec: ActorSpec) -> None:
        self.spec, self.name, self.device = spec, spec.name, spec.device
        self.config: Config = from_yaml(spec.config_yaml)
        self.recorder = Recorder(self.config.deployment.record)
        self.delay = Delays(self.config.deployment.delays, self.recorder, first_name(self.name))
        self.fault = Faults(self.config.deployment.faults, self.name, Path(spec.run_dir))
        self.counters: dict[str, float] = {}
        self.stopping = ""  # why it stops; "": it keeps running
        self.control: ControlClient | None = None  # set by `run`
        self.heart: Heart | None = None
        # What the heart tells: kind of weights -> the version in use, and the newest one sent or received whole.
        self.using: dict[str, int] = {}
        self.whole: dict[str, m.Whole] = {}
        self.idle = False  # no work is left
        self._waited = {"blocked_input": 0.0, "blocked_output": 0.0, "idle": 0.0}  # seconds since the last report
        self.inbox: transport.Inbox | None = None
        self.outboxes: list[transport.Outbox] = []
        self._outbox_to: dict[str, transport.Outbox] = {}  # the consumer's first name -> outbox
        self.workers: list = []  # broadcast threads, see wire/weights.py
        self._to_join: set[str] = set()
        self._reported = time.monotonic()
        self.host, self._clock = clock.host(), clock.Estimate()
        self._parent = os.getppid()
        self._patience_s = self.config.deployment.silent_timeout_s  # how long the controller may be out of reach
        self._loaded, self._code = False, 0

    # Each role overrides these.
    def load(self) -> None:
        """Load models. The other actors' addresses are not known yet."""

    def connect(self, welcome: m.Welcome) -> set[str]:
        """Open outboxes and make broadcast threads. Return the kinds of broadcast groups to join before Ready."""
        return set()

    @abstractmethod
    def turn(self) -> None:
        """Do one bounded piece of work, or wait briefly."""

    def handle(self, message: m.Message) -> None:
        """Handle a control message that is specific to the role."""

    def finish(self) -> None:
        """Write what must outlive the process."""

    def inbox_credits(self) -> int:
        return 8

    # All roles share these.
    def run(self) -> int:
        """Run until asked to stop. Return the exit code: 0 if all went well, RAISED, STOPPING, or LEFT_BEHIND."""
        redirect_output(self.spec)
        self.log(f"{self.name} starts, pid {os.getpid()}")
        with suppress(OSError):
            Path("/proc/self/comm").write_text(self.name)  # for `top`: forked processes share one command line
        use_ports(self.config.deployment.ports)
        transport.use_keys(self.spec.run_dir if self.config.deployment.encrypt else None)
        try:
            self.fault("start")
            self.control = ControlClient(self.spec.control_address, self.name)
            every_s = work.beat_every_s(self.config)
            self.heart = Heart(self.spec.control_address, self.name, self.using, self.whole, every_s)
        except Exception:  # nobody but the launcher can be told
            self.log(traceback.format_exc())
            return RAISED
        try:
            with gc_paused():
                import torch

                use_threads(self.threads)
                if self.device.startswith("cuda"):
                    torch.cuda.set_device(self.device)
                    self.recorder.use(self.device)
                self.inbox = transport.Inbox(self.config.deployment.host, self.inbox_credits(), self.takes)
                self.load()
            self._loaded = True
            # Freeze what is loaded, because it stays. Every full collection would otherwise scan it, and stop all
            # threads, the heart's too, for half a second.
            if Actor.played:
                gc.unfreeze()  # what the actor that ran here before had loaded
            Actor.played = True
            gc.collect()
            gc.freeze()
            self.fault("boot")
            # Not earlier: the broadcast groups wait for every actor that has sent Hello.
            self.control.send(m.Hello(self.name, self.inbox.address, device_uuid(self.device)))
            welcome = self._await(m.Welcome)
            self._to_join = self.connect(welcome)
            self.ready_if_joined()
            while not self.stopping:
                self.pump()
                self.turn()
        except StopRequested:
            pass
        except Damaged as error:
            self._die(error)
        except Exception as error:
            self._failed(error)
        self.heart.ending()
        if self.stopping == GONE:  # the run may continue without this actor, so it must not write
            self._code = LEFT_BEHIND
        elif self._loaded:  # after a failure too: what was learned is worth saving
            try:
                self.finish()
            except Exception as error:
                self._failed(error, " while stopping")
        self.report(force=True)
        self.control.send(m.Stopped(self.name))
        self.log(f"{self.name} stopped: {self.stopping}")
        self._leave()
        return self._code

    def _failed(self, error: Exception, when: str = "") -> None:
        self.log(traceback.format_exc())
        text = f"{type(error).__name__}{when}: {first_line(error)}"
        self.control.send(m.Failed(self.name, text, mistake=isinstance(error, UserError)))
        self._code = self._code or (STOPPING if self.stopping else RAISED)
        self.stopping = self.stopping or f"{self.name} failed"

    def _die(self, error: Damaged) -> NoReturn:
        """End as a process that dies does. All actors start again then, from the checkpoint before the damaged one."""
        self.log(str(error))
        self.control.send(m.Notice(self.name, str(error)))
        self._leave()  # the notice has to leave before
        while True:
            os.kill(os.getpid(), signal.SIGKILL)

    def outbox(self, consumer: str, welcome: m.Welcome, *delay) -> transport.Outbox:
        """Open an outbox to an actor. It is redirected when the actor is replaced. `delay` is `Outbox`'s."""
        made = self._outbox_to[consumer] = transport.Outbox(welcome.addresses[consumer], *delay)
        self.outboxes.append(made)
        return made

    def pump(self) -> None:
        """Handle the controller's messages, send what there is credit for, and report once a second."""
        self.heart.turned()
        self._check_controller()
        while (message := self.control.receive()) is not None:
            if isinstance(message, m.Stop):
                self.stopping = message.reason
            elif isinstance(message, m.ClockTold):
                self._clock_told(message)
            elif isinstance(message, m.Welcome):
                for consumer, outbox in self._outbox_to.items():
                    address = message.addresses.get(consumer, outbox.address)
                    if outbox in self.outboxes and outbox.address != address:
                        outbox.redirect(address)
            else:
                self.handle(message)
        for outbox in self.outboxes:
            outbox.flush()
        for worker in self.workers:
            worker.tend(self.control.send)
            if worker.whole is not None:
                self.whole[worker.kind] = worker.whole
        self.report()

    def _check_controller(self) -> None:
        if self.control.lost_for() > self._patience_s or os.getppid() != self._parent:
            self.stopping = self.stopping or GONE

    def _clock_told(self, told: m.ClockTold) -> None:
        if told.host == self.host:  # the clocks agree, and only a dead controller drops a connection
            self._patience_s = 0.0
            return
        self._clock.add(told.sent, told.time, time.monotonic())
        clock.align(self._clock.offset)
        self.counters[f"clock/{self.name}_error_ms"] = 1e3 * self._clock.error

    def wait(self, timeout_s: float) -> None:
        """Sleep until a message may have arrived, at most `timeout_s` seconds."""
        start = time.monotonic()
        waiting.wait([self.control, self.inbox, *self.outboxes], timeout_s)
        # An actor with unsent messages waits for a consumer to make room.
        blocked = "blocked_output" if any(outbox.backlog for outbox in self.outboxes) else "blocked_input"
        self._waited["idle" if self.idle else blocked] += time.monotonic() - start

    def wait_step(self, timeout_s: float = 0.05) -> None:
        """Wait once and pump: one round of a longer wait inside `turn`.

        Raises:
            StopRequested: the actor has to stop.
        """
        self.wait(timeout_s)
        self.pump()
        if self.stopping:
            raise StopRequested

    def join(self, worker, membership: m.Membership) -> None:
        """Join a broadcast group, in the worker's thread. Ready is sent once all groups are joined."""
        if membership.catch_up:
            worker.form(membership, work.start_s(self.config), lambda: None)
            return
        worker.form(membership, work.start_s(self.config), lambda: self._to_join.discard(membership.kind))
        self.fault("join")

    def ready_if_joined(self) -> None:
        deadline = time.monotonic() + work.start_s(self.config)
        while self._to_join:
            for worker in self.workers:
                worker.check()
            self.wait_step(0.01)
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"broadcast groups {sorted(self._to_join)} not joined within deployment.start_timeout_s"
                )
        self.control.send(m.Ready(self.name))

    def before_checkpoint(self) -> None:
        """Cause the fault or the delay that is due before this process writes a checkpoint."""
        self.fault("checkpoint")
        self.delay("checkpoint")

    def report(self, force: bool = False) -> None:
        now = time.monotonic()
        if force or now - self._reported > REPORT_EVERY_S:
            self.control.send(m.ClockAsked(now))
            passed, self._reported = now - self._reported, now
            shares = {state: seconds / passed for state, seconds in self._waited.items()}
            self._waited = dict.fromkeys(self._waited, 0.0)
            for state, share in {"busy": 1 - sum(shares.values()), **shares}.items():
                self.counters[f"actors/{self.name}_{state}"] = round(share, 4)
            self.counters |= {f"process/{self.name}_{what}": value for what, value in resource_usage().items()}
            if self.inbox is not None:
                for what, count in (
                    ("rejected", self.inbox.rejected + self.control.rejected),
                    ("duplicates", self.inbox.duplicates),
                ):
                    if count:
                        self.counters[f"wire/{self.name}_{what}"] = count
            self.control.send(m.Spans(self.name, self.recorder.drain(), dict(self.counters)))

    def log(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    def _await(self, kind: type) -> m.Message:
        # Long enough for the launchers to replace other actors that fail to start.
        limit = LOADING_PATIENCE * work.start_s(self.config)
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            waiting.wait([self.control], 0.1)
            message = self.control.receive()
            if isinstance(message, kind):
                return message
            if isinstance(message, m.Stop):
                self.stopping = message.reason
            self._check_controller()
            if self.stopping:
                raise StopRequested
        raise TimeoutError(f"no {kind.__name__} from the controller within {limit:g} s")

    def _leave(self) -> None:
        self.heart.stop()
        for worker in self.workers:
            worker.close()
        for socket in [self.inbox, *self.outboxes]:
            if socket is not None:
                socket.close()
        self.control.close(0 if self.stopping == GONE else None)
        # Closing a socket only queues its last messages; ending the context sends them, within the sockets' linger.
        transport.context().term()


def device_uuid(device: str) -> str:
    """Return a name that no other GPU has. `cuda:0` is not unique: every host has one, and so has every process that
    sees only one GPU. A device that is not a GPU keeps its name.
    """
    if not device.startswith("cuda"):
        return device
    import torch

    return f"cuda:{torch.cuda.get_device_properties(device).uuid}"


def resource_usage() -> dict[str, float]:
    """Return this process's resident memory in megabytes, its numbers of file descriptors and threads, and the seconds
    that processors have worked for it.
    """
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return {
        "mb": round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "cpu_s": round(time.process_time(), 3),
    }


def redirect_output(spec: ActorSpec, descriptors: Sequence[int] = (1, 2)) -> None:
    """Send standard output and error of this process, or one of them, to logs/NAME.log of the run, or nowhere if there
    is no way to open that file.
    """
    path = os.path.join(spec.run_dir, "logs", f"{spec.name}.log")
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError as error:
        print(f"{spec.name} writes no log: {path}: {error.strerror}", flush=True)
        log = os.open(os.devnull, os.O_WRONLY)
    sys.stdout.flush()
    sys.stderr.flush()
    for descriptor in descriptors:
        os.dup2(log, descriptor)
    os.close(log)
    never_fail()
