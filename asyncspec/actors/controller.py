"""The controller: owns the prompt order, the policy clock, the ledger and the timeline of the run.

- Waits until every actor is up and has joined its broadcast groups, each with a deadline.
- Issues tickets for step s as soon as the clock admits them, in order, to the generator with the least to do.
- Passes each published version on to its receivers.
- Writes a ledger line for each ticket's fate, and a metrics row for each step.
- Watches the actors' signs of life; takes in whoever comes in place of one that died, and issues again what that one had.
- Ends the run when all steps are trained and the last version is evaluated, on an interrupt, when an actor fails, or when
  nothing has moved for stall_timeout_s; then it says what was waited for.
"""

from __future__ import annotations

import os
import time
import traceback
from collections import deque
from pathlib import Path
from typing import Callable

from asyncspec import ledger as ledgers
from asyncspec import messages as m
from asyncspec import transport
from asyncspec.actors.base import REPORT_EVERY_S, ActorSpec, first_name, held
from asyncspec.actors.broadcasts import Broadcasts
from asyncspec.actors.tickets import ARRIVED, GENERATED, Evaluations, TicketBook, TicketMaker
from asyncspec.config import from_yaml, resolve_path
from asyncspec.deadlines import BEAT_EVERY_S, EARLY_STOP_S, KILLED_S, LATE_WORD_S
from asyncspec.faults import Faults
from asyncspec.heartbeat import SUFFIX, Vigil
from asyncspec.lag import PolicyClock
from asyncspec.rl import tasks
from asyncspec.timing import clock
from asyncspec.timing.exporters import Console, RunMetrics, TraceFile
from asyncspec.timing.metrics import step_row
from asyncspec.timing.timeline import TimelineFile

RESTART = 75  # the exit code that asks the launcher to start all again from the last checkpoint
PICTURE_EVERY, PICTURE_STEPS = 40, 4  # steps between two pictures of the timeline in TensorBoard, and in each


class RunFailed(RuntimeError):
    """The run cannot go on; the message is one line for the user."""


def actor_names(config) -> dict[str, str]:
    """name -> role of every actor but the controller."""
    names = {"trainer": "trainer", "logprob": "logprob"}
    names |= {f"generator{i}": "generator" for i in range(config.deployment.generators)}
    if config.adapting:
        names["draft_adapter"] = "draft_adapter"
    return names


class Controller:
    role = "controller"

    def __init__(self, spec: ActorSpec) -> None:
        self.config = from_yaml(spec.config_yaml)
        self.run_dir, self.resume = Path(spec.run_dir), spec.resume
        transport.use_keys(self.run_dir)
        deployment = self.config.deployment
        self.fault = Faults(deployment.faults, "controller", self.run_dir)
        self.server = transport.ControlServer(deployment.host)
        self.address = self.server.address
        self.names = actor_names(self.config)
        self.generators = [name for name, role in self.names.items() if role == "generator"]
        self.broadcasts: Broadcasts | None = None  # once all actors are up
        self.hellos: dict[str, m.Hello] = {}
        self.outboxes: dict[str, transport.Outbox] = {}  # to the generators
        self.first_step = max(0, spec.resume)
        self.clock = PolicyClock(self.config.policy_lag, self.first_step)
        self.next_step = self.trained_steps = self.first_step  # whose tickets are issued next; trained so far
        self.addresses: dict[str, str] = {}  # of the actors' inboxes, by first name
        self.joining: dict[str, float] = {}  # actors that are coming up in place of others, and when those were lost
        self.evaluations = Evaluations()
        self.accuracy = {"eval/accuracy": None, "eval/policy_version": -1, "eval/policy_version_max": -1}
        self.counters: dict[str, float] = {}
        self.vigil = Vigil(deployment.silent_timeout_s, deployment.turn_timeout_s)
        self.condemned: dict[str, float] = {}  # actors whose launcher was asked to kill them, and when
        self.ready: set[str] = set()
        self.launchers: set[str] = set()
        self.gone: set[str] = set()
        self.stop_reason = ""
        self.failure = ""
        self.resuming = False  # the launcher starts all of it again
        self.host = clock.host()
        self.latest: deque[m.StepDone] = deque(maxlen=PICTURE_STEPS)
        self.moved = time.monotonic()  # when anything last went forward
        self.started = False  # all actors are up: there may be something to save
        self._parent = os.getppid()
        self._beaten = self._measured = 0.0

    def run(self) -> int:
        """Run to the end; 0 if all steps were trained, 1 on a failure, 130 when interrupted, RESTART."""
        self._log(f"{time.strftime('%H:%M:%S')} controller starts, pid {os.getpid()}\n")
        self.console = Console(self.config, self.run_dir, self.first_step)
        try:
            self.ledger = ledgers.Ledger(self.run_dir)
            self.metrics, self.timeline = RunMetrics(self.run_dir, self.first_step), TimelineFile(self.run_dir, self.first_step)
            self.trace = TraceFile(self.run_dir, self.first_step)
        except OSError as error:
            self.console.line(f"failed: {error}")
            return 1
        self.book = TicketBook(self.ledger)
        try:
            self._load_data()
            self._take_up()
            self._start()
            while not self.stop_reason:
                self._issue()
                self.fault("work")
                self._dispatch()
                self._listen(0.02)
                self._watch()
                self._show()
                self._check_end()
        except RunFailed as error:
            self.failure = self.stop_reason = str(error)
        except Exception as error:
            self._note_error(error)
        try:
            self._stop_all()
        except Exception as error:  # what comes from the actors is still written: the disk may be full
            self._note_error(error)
        for name in self.launchers:  # from here on this process is silent, and not frozen
            self.server.send(name, m.Stop(self.stop_reason))
        self._close()
        self.console.end(self.failure, self.stop_reason, self.metrics, self.resuming)
        return RESTART if self.resuming else 1 if self.failure else 0 if self.stop_reason == "finished" else 130

    # Beginning and end.
    def _load_data(self) -> None:
        from asyncspec.models import tokenizer

        try:
            tokens = tokenizer.load(resolve_path(self.config.model.path))
            problems, self.held_out = tasks.load_problems(self.config, tokens)
        except ValueError as error:
            raise RunFailed(str(error)) from None
        if warning := tasks.lost_characters([*problems, *self.held_out], tokens):
            self.console.line(f"warning: {warning}")
        self.maker = TicketMaker(self.config, tokens, problems, self.held_out)

    def _take_up(self) -> None:
        """Go on from where a run was left: what its ledger leaves open is void, or ends here."""
        if self.resume < 0:
            return
        before = list(ledgers.read(self.run_dir))
        self.counters["recovery/restarts"] = 1 + sum(event["event"] == "resumed" for event in before)
        cut_short = ledgers.open_tickets([*before, {"event": "resumed", "version": self.resume}])
        for ticket, issued in cut_short.items():
            self.ledger.note("dropped", ticket=ticket, step=issued["step"], min_version=issued["min_version"],
                             evaluation=issued["evaluation"], reason="the run was cut short")
        self.ledger.note("resumed", version=self.resume, tickets_undone=ledgers.undone(before, self.resume))
        if self.metrics.last is not None:
            self.accuracy = {key: self.metrics.last[key] for key in self.accuracy}
        self.console.resumed(self.metrics)

    def _start(self) -> None:
        self._listen_until(lambda: self._present() - self.hellos.keys(), "to start")
        if self.stop_reason:
            return
        self.broadcasts = Broadcasts(self.config.deployment.host, self.server.send)
        for name in self._present():
            self.addresses[first_name(name)] = self.hellos[name].address
            self.broadcasts.devices[name] = self.hellos[name].device
        self.outboxes = {name: transport.Outbox(self.hellos[name].address) for name in self.generators}
        welcome = self._welcome()
        for name in self._present():
            self.server.send(name, welcome)
        self.broadcasts.make("policy", [*self._playing("trainer"), *self._playing("logprob"), *self.generators])
        if self.config.draft_trainer:
            self.broadcasts.make("draft", [*self._playing(self.config.draft_trainer), *self.generators])
        self._listen_until(lambda: self._present() - self.ready, "to load and join its broadcast group")
        if self.stop_reason:
            return
        self.ledger.note("ready")
        self.console.line(f"{len(self._present()) + 1} actors ready: controller, {', '.join(sorted(self._present()))}")
        if self._evaluation_due(self.first_step):
            self._evaluate(self.first_step)
        self.moved, self.started = time.monotonic(), True

    def _welcome(self) -> m.Welcome:
        return m.Welcome(self.addresses, self.config.deployment.host, self.broadcasts.port, self.broadcasts.versions)

    def _present(self) -> set[str]:
        """Actors that are up or are coming up."""
        return set(self.names) - self.gone

    def _listen_until(self, missing: Callable[[], set[str]], what: str) -> None:
        deadline = time.monotonic() + self.config.deployment.start_timeout_s
        while missing():
            self._listen(0.1)
            self._watch()
            if self.stop_reason:
                return
            if time.monotonic() > deadline:
                raise RunFailed(f"waited {self.config.deployment.start_timeout_s:.0f} s for {', '.join(sorted(missing()))} {what}; "
                                f"see {self.run_dir}/logs, or raise deployment.start_timeout_s")

    def _check_end(self) -> None:
        if self.trained_steps == self.config.steps and not self.evaluations:
            self.stop_reason = "finished"
            return
        limit = self.config.deployment.stall_timeout_s
        if time.monotonic() - self.moved > limit:
            where = self.book.oldest() or "no ticket"
            coming = [name for name in self.joining if name not in self.ready | self.gone]
            if not self.book.open and coming:
                where = f"{', '.join(coming)} to take a dead actor's place"
            silent = max(self._present(), key=self.vigil.silence)
            raise RunFailed(f"nothing moved for {limit:.0f} s: waiting for {where}; longest silent: {silent}; see "
                            f"{self.run_dir}/logs, or raise deployment.stall_timeout_s")

    def _stop_all(self) -> None:
        deployment = self.config.deployment
        # A finished run is worth waiting for its checkpoint; who interrupts one wants it to end.
        limit = deployment.stall_timeout_s if self.stop_reason == "finished" else deployment.stop_timeout_s if self.started else EARLY_STOP_S
        deadline = time.monotonic() + limit
        while (left := self._still_there()) and time.monotonic() < deadline:
            for name in left:  # again and again: one that is still starting connects later
                self.server.send(name, m.Stop(self.stop_reason))
            self._listen_for(0.2)
            if self.stop_reason == "finished":
                self._watch()
        missing = sorted(self._still_there())
        if missing and self.started and not self.failure:
            self.failure = f"not stopped within {limit:.0f} s: {', '.join(missing)}; its checkpoint may be missing"

    def _close(self) -> None:
        """Write what is still to be written, each file for itself: one may be on a disk that is full."""
        clock_error = max((v for k, v in self.counters.items() if k.startswith("clock/")), default=0.0) / 1e3
        for close in (lambda: self.book.drop_all(self.stop_reason), lambda: self.ledger.note("ended", reason=self.stop_reason), self.ledger.close,
                      self.metrics.close, lambda: self.trace.close(clock_error), self.timeline.close):
            try:
                close()
            except Exception as error:
                self._note_error(error)

    def _note_error(self, error: Exception) -> None:
        text = f"controller: {type(error).__name__}: {error}"
        self.failure = self.failure or text
        self.stop_reason = self.stop_reason or text
        self._log("".join(traceback.format_exception(error)))

    def _log(self, text: str) -> None:
        try:
            (self.run_dir / "logs").mkdir(exist_ok=True)
            with open(self.run_dir / "logs" / "controller.log", "a") as log:
                log.write(text)
        except OSError:
            pass

    def _still_there(self) -> set[str]:
        """Actors that have not stopped; replacements that are not up yet are their launcher's."""
        return self._present() - {name for name in self.joining if name not in self.ready}

    # Tickets.
    def _issue(self) -> None:
        while self.next_step < self.config.steps and self.clock.may_issue(self.next_step):
            self.book.issue(self.maker.of_step(self.next_step, self.clock.min_version(self.next_step)))
            self.next_step += 1

    def _evaluation_due(self, version: int) -> bool:
        every = self.config.eval.every
        return version in (0, self.config.steps) or bool(every and version % every == 0)

    def _evaluate(self, version: int) -> None:
        if self.held_out:
            self.evaluations.begin(version, len(self.held_out))
            self.book.issue(self.maker.of_evaluation(version))

    def _dispatch(self) -> None:
        """Keep each generator supplied with two engines' worth of samples, the least loaded first."""
        load = self.book.load(self.generators)
        while self.book.pending and load:
            generator = min(load, key=load.get)
            if load[generator] >= 2 * self.config.engine.slots:
                break
            ticket = self.book.next_for(generator)
            self.outboxes[generator].put(ticket)
            load[generator] += len(ticket.seeds)
        for outbox in self.outboxes.values():
            outbox.flush()

    def _show(self) -> None:
        self.console.status(self.trained_steps, *self.book.training(), max(0, self.next_step - 1 - self.clock.version))

    # Messages.
    def _listen_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self._still_there():
            self._listen(left)

    def _listen(self, timeout_s: float) -> None:
        # Outboxes are flushed by `_dispatch`, which is not called any more once the run is ending.
        transport.wait([self.server, *(() if self.stop_reason else self.outboxes.values())], min(timeout_s, BEAT_EVERY_S))
        if time.monotonic() - self._beaten > BEAT_EVERY_S:
            self._beaten = time.monotonic()
            for name in self.launchers:
                self.server.send(name, m.Beat("controller"))
        while (item := self.server.receive()) is not None:
            self._handle(*item)

    def _handle(self, sender: str, message: m.Message) -> None:
        if isinstance(message, m.Beat):
            if sender == message.name:  # a launcher's: its own loop beats
                self.launchers.add(sender)
            elif message.name in self.gone and message.name in self.condemned:
                if time.monotonic() - self.condemned[message.name] > KILLED_S:
                    self._condemn(message.name, "was cut off")
            elif message.name not in self.gone and message.name in self.names and sender == message.name + SUFFIX:
                self.vigil.heard(message.name, message.turn_s if message.name in self.ready else 0.0)
        elif isinstance(message, m.ClockAsked):
            self.server.send(sender, m.ClockTold(message.sent, time.monotonic(), self.host))
        elif isinstance(message, m.Publish):
            self._published(message)
        elif isinstance(message, m.Hello):
            self._arrived(message)
        elif isinstance(message, m.Ready):
            self._joined(message.name)
        elif isinstance(message, m.Broken):
            if self.broadcasts.broken(message):
                self.counters[f"broadcast/{message.kind}_epochs"] = self.broadcasts.epochs[message.kind]
        elif isinstance(message, m.Received):
            self.broadcasts.received(message.kind)
            self.moved = time.monotonic()
        elif isinstance(message, m.Generated):
            self.book.moved(message.ticket_id, GENERATED, sender)
            self.moved = time.monotonic()
        elif isinstance(message, m.Arrived):
            self.book.moved(message.ticket_id, ARRIVED)
        elif isinstance(message, m.EvalDone):
            self._evaluated(sender, message)
        elif isinstance(message, m.StepDone):
            self._step_done(message)
        elif isinstance(message, m.Checkpointed):
            self.counters["checkpoint/version"] = message.version
            for name in self._playing("draft_adapter"):
                self.server.send(name, message)
        elif isinstance(message, m.Spans):
            self.trace.write(message.actor, message.spans)
            self.counters |= message.counters
        elif isinstance(message, m.Notice):
            self.console.line(f"{message.name}: {message.text}")
        elif isinstance(message, m.Failed):
            if self.names.get(message.name) == "draft_adapter" and self.broadcasts is not None:
                self._lost_adapter(message.name, message.error)
            elif message.name not in self._present():
                self.console.line(f"{message.name}, which was given up, failed: {message.error}")
            elif not self.failure:
                self.failure = self.stop_reason = (
                    f"{message.name} failed: {message.error}; see {self.run_dir}/logs/{message.name}.log")
        elif isinstance(message, m.Stopped):
            self.gone.add(message.name)
            self.vigil.forget(message.name)
        elif isinstance(message, m.Interrupt) and message.lost:
            self._lost(message)
        elif isinstance(message, m.Interrupt):
            self.stop_reason = self.stop_reason or message.reason

    def _playing(self, role: str) -> list[str]:
        return [name for name, played in self.names.items() if played == role and name not in self.gone]

    # Faults.
    def _watch(self) -> None:
        """Have those killed that live no more as they should; end without a launcher."""
        if os.getppid() != self._parent:
            self.failure = self.stop_reason = "the launcher is gone"
        overdue = self.vigil.overdue()
        self.moved += self.vigil.slept
        for name, what in overdue:
            self.ledger.note("frozen", actor=name, what=what)
            self.console.line(f"{name} is {what}")
            self._condemn(name, what)
        for name, at in self.joining.items():
            limit = self.config.deployment.start_timeout_s
            if name in self._present() - self.ready - self.condemned.keys() and time.monotonic() - at > limit:
                self.console.line(f"{name} has not joined within {limit:.0f} s")
                self._condemn(name, "did not join")
        for name, at in list(self.condemned.items()):
            dispensable = name in self.generators and len(self.generators) > 1
            if time.monotonic() - at > KILLED_S and dispensable:  # nobody has answered for it
                self._lost(m.Interrupt(f"{name} is cut off", name))

    def _condemn(self, name: str, what: str) -> None:
        """Ask whichever launcher has it to end its process."""
        self.condemned[name] = time.monotonic()
        for launcher in self.launchers:
            self.server.send(launcher, m.Kill(name, what))

    def _lost(self, message: m.Interrupt) -> None:
        """An actor's process has died."""
        name = message.lost
        if name not in self.names:
            return
        role = self.names[name]
        if name in self.gone:
            if name in self.condemned and message.replacement and not self.stop_reason:  # cut off, and back again
                self._expect(message.replacement, role)
                self.console.line(f"{name} can be reached again; {message.replacement} takes its place")
            return
        if role == "draft_adapter" and not message.replacement and self.broadcasts is not None:
            self._lost_adapter(name, message.reason)
            return
        self.gone.add(name)
        self.vigil.forget(name)
        self.ledger.note("lost", actor=name, reason=message.reason)
        ending = self.stop_reason
        if ending and role != "trainer":  # whose checkpoint alone is waited for
            return
        others = name in self.condemned and role == "generator" and len(self.generators) > 1
        if message.replacement or others:
            self._replace(name, role, message)
        elif message.may_restart and ending in ("", "finished"):
            self.resuming, self.stop_reason = True, message.reason
        else:
            self.failure, self.stop_reason = self.failure or message.reason, ending or message.reason

    def _lost_adapter(self, name: str, reason: str) -> None:
        """The run goes on with the draft it has: nobody waits for the draft adapter."""
        self.gone.add(name)
        self.vigil.forget(name)
        if "draft" in self.broadcasts.members and not self.stop_reason:
            self.ledger.note("lost", actor=name, reason=reason)
            self.counters["draft/adapter_lost"] = 1
            self.console.line(f"the draft adapter is gone ({reason}): the draft stays as it is")
            self.broadcasts.end("draft")
            for other in self._playing("logprob"):
                self.server.send(other, m.Membership("draft", 0, [], ""))

    def _replace(self, name: str, role: str, message: m.Interrupt) -> None:
        """Issue again what it had, and let the others go on until its replacement is there."""
        self.moved = time.monotonic()
        again = 0
        if role == "generator":
            self.generators = [other for other in self.generators if other != name]
            if self.broadcasts is None and message.replacement:
                self.generators.append(message.replacement)
            if name in self.outboxes:
                self.outboxes.pop(name).close()
            # Also what has left it and is not with the trainer: it may have been on its way. Should a group come twice the first counts.
            again = self.book.reissue(lambda generator, place, since: generator == name and place != ARRIVED, message.reason)
        elif role == "logprob":
            again = self.book.reissue(lambda generator, place, since: place == GENERATED, message.reason)
        for counter, count in ((f"recovery/{role}s_lost", 1), ("recovery/tickets_reissued", again)):
            self.counters[counter] = self.counters.get(counter, 0) + count
        if self.broadcasts is not None:
            self.broadcasts.remove(name)
        if message.replacement:
            self._expect(message.replacement, role)
        after = f"{message.replacement} takes its place" if message.replacement else "the others go on"
        self.console.line(f"{message.reason}: {f'{again} tickets are issued again; ' if again else ''}{after}")

    def _expect(self, name: str, role: str) -> None:
        """An actor is coming up in place of another."""
        self.names[name] = role
        if self.broadcasts is not None:
            self.joining[name] = time.monotonic()
        if name in self.hellos:  # its own word was quicker than its launcher's
            self._arrived(self.hellos[name])

    def _arrived(self, hello: m.Hello) -> None:
        """An actor is up. One that takes another's place: tell all where it is, and take it into its broadcast groups."""
        self.hellos.setdefault(hello.name, hello)
        if self.broadcasts is None or hello.name not in self.joining or hello.name in self.gone or hello.name in self.broadcasts.devices:
            return
        self.addresses[first_name(hello.name)] = hello.address
        welcome = self._welcome()
        for name in self._present() & self.hellos.keys():
            self.server.send(name, welcome)
        kinds = {"generator": {"policy": False, "draft": False}, "logprob": {"policy": False}, "draft_adapter": {"draft": True}}
        if self.names[hello.name] == "logprob" and self.config.adapting and "draft" not in self.broadcasts.members:
            self.server.send(hello.name, m.Membership("draft", 0, [], ""))  # there is no draft adapter any more
        self.broadcasts.add(hello.name, hello.device, kinds[self.names[hello.name]])

    def _joined(self, name: str) -> None:
        self.ready.add(name)
        if name not in self.joining or name in self.gone:
            return
        self.moved, role = time.monotonic(), self.names[name]
        seconds = self.moved - self.joining[name]
        if role == "logprob":
            # Word of a group that left its generator for the dead one may have come after the loss.
            lost = self.joining[name] + LATE_WORD_S
            self.book.reissue(lambda generator, place, since: place == GENERATED and since < lost, "its logprob actor died")
        if role == "generator" and name not in self.generators:
            self.outboxes[name] = transport.Outbox(self.addresses[first_name(name)])
            self.generators.append(name)
        self.counters[f"recovery/{role}_s"] = seconds
        self.ledger.note("joined", actor=name, seconds=round(seconds, 3))
        self.console.line(f"{name} has joined, {seconds:.1f} s after the loss")

    # Progress.
    def _published(self, message: m.Publish) -> None:
        if not self.broadcasts.relay(message):
            return
        if message.kind == "draft":
            self.counters["draft/policy_version"] = message.policy_version
        elif message.version > self.clock.version:
            self.clock.publish(message.version)
            if self._evaluation_due(message.version):
                self._evaluate(message.version)

    def _evaluated(self, generator: str, message: m.EvalDone) -> None:
        ticket = self.book.end("evaluated", message.ticket_id, generator=generator, version_min=message.version_min,
                               version_max=message.version_max)
        if ticket is None:
            return
        self.moved = time.monotonic()
        if (done := self.evaluations.add(ticket.step, message.rewards, message.version_max)) is not None:
            self.accuracy, rollouts = done
            self.console.evaluated(self.accuracy, rollouts)
            self.metrics.evaluated(self.accuracy)

    def _step_done(self, message: m.StepDone) -> None:
        self.moved = time.monotonic()
        self.trained_steps = message.step + 1
        for record in message.groups:
            self.book.end("trained", record.ticket_id, generator=record.generator, version_min=record.version_min,
                          version_max=record.version_max, trained_in=message.step)
            self.trace.write_group(message.step, record)
        self.ledger.sync()
        self.timeline.write(message)
        self.latest.append(message)
        if (message.step + 1) % PICTURE_EVERY == 0:
            self.metrics.picture(list(self.latest))
        if time.monotonic() - self._measured > REPORT_EVERY_S:
            self._measured = time.monotonic()
            self.counters |= {f"process/controller_{what}": value for what, value in held().items()}
        row = step_row(message, self.counters, self.accuracy)
        self.metrics.write(row, final=message.step + 1 == self.config.steps and bool(self.held_out))
        self.console.step(row)
