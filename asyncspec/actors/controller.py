"""The controller: owns the prompt order, the policy clock, the ledger and the timeline of the run.

- Waits until every actor is up and has joined its broadcast groups, each with a deadline.
- Issues tickets for step s as soon as the clock admits them, in order, to the generator with the least to do.
- Passes each published version on to its receivers.
- Writes a ledger line for each ticket's fate, and a metrics row for each step.
- Watches the actors' signs of life; takes in whoever comes in place of one that died, and issues again what that one
  had.
- Ends the run when all steps are trained and the last version is evaluated, on an interrupt, when an actor fails, or
  when nothing has moved for stall_timeout_s; then it says what was waited for.
"""

from __future__ import annotations

import math
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from asyncspec import clock
from asyncspec.actors.base import LEFT_BEHIND, ActorSpec
from asyncspec.actors.broadcasts import Broadcasts
from asyncspec.actors.crew import Crew
from asyncspec.actors.records import Records
from asyncspec.actors.recovery import Recovery, RunState
from asyncspec.actors.tickets import ARRIVED, GENERATED, Evaluations, TicketBook, TicketMaker
from asyncspec.config import from_yaml, resolve_path
from asyncspec.deadlines import BEAT_EVERY_S, EARLY_STOP_S, KILLED_S, LATE_WORD_S
from asyncspec.faults import Faults
from asyncspec.lag import PolicyClock
from asyncspec.report.console import Console
from asyncspec.tasks.data import load_problems, lost_characters
from asyncspec.wire import messages as m
from asyncspec.wire import transport

SLOW_START_S = 4.0  # after which it is said who is waited for
RESTART = 75  # the exit code that asks the launcher to start all again from the last checkpoint


_RECEIVERS = {"generator", "logprob", "logprob_rank"}
_SENDERS = {"trainer", "draft_adapter"}
_FROM = {  # who may say what only an actor that is at work can say
    m.Publish: _SENDERS,
    m.Ready: _SENDERS | _RECEIVERS | {"trainer_rank"},
    m.Broken: _SENDERS | _RECEIVERS,
    m.Received: _RECEIVERS,
    m.Generated: {"generator"},
    m.EvalDone: {"generator"},
    m.Arrived: {"trainer"},
    m.StepDone: {"trainer"},
    m.Checkpointed: {"trainer"},
}


class RunFailed(RuntimeError):
    """The run cannot go on; the message is one line for the user."""


class Controller:
    role = "controller"

    def __init__(self, spec: ActorSpec) -> None:
        self.config = from_yaml(spec.config_yaml)
        self.run_dir, self.resume = Path(spec.run_dir), spec.resume
        transport.use_keys(self.run_dir if self.config.deployment.encrypt else None)
        deployment = self.config.deployment
        self.fault = Faults(deployment.faults, "controller", self.run_dir)
        self.server = transport.ControlServer(deployment.host)
        self.address = self.server.address
        self.crew, self.state = Crew(self.config, self.server.send), RunState()
        self.broadcasts: Broadcasts | None = None  # once all actors are up
        self.first_step = max(0, spec.resume)
        self.clock = PolicyClock(self.config.policy_lag, self.first_step)
        self.next_step = self.trained_steps = self.first_step  # whose tickets are issued next; trained so far
        self.evaluations = Evaluations()
        self.host = clock.host()
        self.left_behind = False  # the launcher, or its host's Ray, is gone
        self.started = False  # all actors are up: there may be something to save
        self._parent = os.getppid()
        self._beaten = 0.0

    def run(self) -> int:
        """Run to the end; 0 if all steps were trained, 1 on a failure, 130 when interrupted, RESTART, LEFT_BEHIND."""
        self._log(f"{time.strftime('%H:%M:%S')} controller starts, pid {os.getpid()}\n")
        self.fault("start")
        state, console = self.state, Console(self.config, self.run_dir, self.first_step)
        try:
            self.records = Records(self.run_dir, self.first_step, console)
        except OSError as error:
            console.line(f"failed: {error}")
            return 1
        self.book = TicketBook(self.records.ledger)
        self.recovery = Recovery(self.config, self.crew, self.book, state, self.records, self.server)
        try:
            self._load_data()
            if self.resume >= 0:
                self.records.resume(self.resume)
            self._start()
            while not state.stop_reason:
                self._issue()
                self.fault("work")
                self._dispatch()
                self._listen(0.02)
                self._watch()
                self._show()
                self._check_end()
        except RunFailed as error:
            state.failure = state.stop_reason = str(error)
        except Exception as error:
            self._note_error(error)
        try:
            self._stop_all()
        except Exception as error:  # what comes from the actors is still written: the disk may be full
            self._note_error(error)
        self.crew.tell_launchers(m.Stop(state.stop_reason))  # from here on this process is silent, and not frozen
        for close in (
            lambda: self.book.drop_all(state.stop_reason),
            lambda: self.records.note("ended", reason=state.stop_reason),
            *self.records.closing(),
        ):
            try:
                close()
            except Exception as error:
                self._note_error(error)
        console.end(state.failure, state.stop_reason, self.records.metrics, state.resuming)
        if self.left_behind:
            return LEFT_BEHIND
        return RESTART if state.resuming else 1 if state.failure else 0 if state.stop_reason == "finished" else 130

    # Beginning and end.
    def _load_data(self) -> None:
        from asyncspec.models import tokenizer

        try:
            tokens = tokenizer.load(resolve_path(self.config.model.path))
            problems, self.held_out = load_problems(self.config, tokens)
        except ValueError as error:
            raise RunFailed(str(error)) from None
        if warning := lost_characters([*problems, *self.held_out], tokens):
            self.records.line(f"warning: {warning}")
        self.maker = TicketMaker(self.config, tokens, problems, self.held_out)

    def _start(self) -> None:
        crew = self.crew
        for name in crew.present:
            crew.expect(name)
        self._listen_until(lambda: crew.present - crew.hellos.keys(), "to start")
        if self.state.stop_reason:
            return
        self.broadcasts = self.recovery.broadcasts = Broadcasts(self.config.deployment.host, self.server.send)
        self.broadcasts.devices = {name: crew.hellos[name].device for name in crew.present}
        self.recovery.outboxes |= {name: transport.Outbox(crew.hellos[name].address) for name in crew.generators}
        self.recovery.welcome()
        crew.since = dict.fromkeys(crew.present, time.monotonic())
        self.broadcasts.make(
            "policy",
            [*crew.playing("trainer"), *crew.playing("logprob"), *crew.playing("logprob_rank"), *crew.generators],
        )
        if self.config.draft_trainer:
            self.broadcasts.make("draft", [*crew.playing(self.config.draft_trainer), *crew.generators])
        self._listen_until(lambda: crew.present - crew.ready, "to load and join its broadcast group")
        if self.state.stop_reason:
            return
        self.records.note("ready")
        self.records.line(f"{len(crew.present) + 1} actors ready: controller, {', '.join(sorted(crew.present))}")
        if self._evaluation_due(self.first_step):
            self._evaluate(self.first_step)
        self.state.moved, self.started = time.monotonic(), True

    def _listen_until(self, missing: Callable[[], set[str]], what: str) -> None:
        """Wait for actors to come so far. Who gives no sign of life meanwhile is killed by its launcher, and then
        others go on from there.
        """
        limit, condemned, tell_at = (
            self.config.deployment.start_timeout_s,
            self.crew.condemned,
            time.monotonic() + SLOW_START_S,
        )
        while missing():
            self._listen(0.1)
            self._watch()
            if self.state.stop_reason:
                return
            now = time.monotonic()
            if now > tell_at:
                self.records.line(
                    f"waiting for {', '.join(sorted(missing()))} {what}; what a first start compiles takes some ten "
                    f"seconds, once"
                )
                tell_at = math.inf
            if late := [
                name
                for name in missing()
                if now - self.crew.since[name] > limit + LATE_WORD_S
                and now - condemned.get(name, 0.0) > KILLED_S + LATE_WORD_S
            ]:
                raise RunFailed(
                    f"waited {limit:.0f} s for {', '.join(sorted(late))} {what}; "
                    f"see {self.run_dir}/logs, or raise deployment.start_timeout_s"
                )

    def _check_end(self) -> None:
        if self.trained_steps == self.config.steps and not self.evaluations:
            self.state.stop_reason = "finished"
            return
        limit = self.config.deployment.stall_timeout_s
        if time.monotonic() - self.state.moved > limit:
            crew = self.crew
            coming, cut_off = crew.present - crew.settled, crew.present & crew.cut_off
            if cut_off:
                where = f"{', '.join(sorted(cut_off))}, for which nobody answers"
            elif not self.book.open and coming:
                where = f"{', '.join(sorted(coming))} to take a dead actor's place"
            else:
                where = (
                    f"{self.book.oldest() or 'no ticket'}; longest silent: {max(crew.present, key=crew.vigil.silence)}"
                )
            raise RunFailed(
                f"nothing moved for {limit:.0f} s: waiting for {where}; see {self.run_dir}/logs, or raise "
                f"deployment.stall_timeout_s"
            )

    def _stop_all(self) -> None:
        deployment = self.config.deployment
        # A finished run is worth waiting for its checkpoint; who interrupts one wants it to end.
        limit = (
            deployment.stall_timeout_s
            if self.state.stop_reason == "finished"
            else deployment.stop_timeout_s
            if self.started
            else EARLY_STOP_S
        )
        deadline = time.monotonic() + limit
        while (left := self._awaited()) and time.monotonic() < deadline:
            for name in left:  # again and again: one that is still starting connects later
                self.server.send(name, m.Stop(self.state.stop_reason))
            self._listen_for(0.2)
            if self.state.stop_reason == "finished":
                self._watch()
        missing = sorted(self._awaited())
        if missing and self.started and not self.state.failure:
            self.state.failure = (
                f"not stopped within {limit:.0f} s: {', '.join(missing)}; its checkpoint may be missing"
            )

    def _awaited(self) -> set[str]:
        """Those whose end this process waits for: of those that nobody answers for only the trainer, whose checkpoint
        may be under way.
        """
        crew = self.crew
        return {name for name in crew.settled if name not in crew.cut_off or crew.roles[name] == "trainer"}

    def _note_error(self, error: Exception) -> None:
        text, state = f"controller: {type(error).__name__}: {error}", self.state
        state.failure, state.stop_reason = state.failure or text, state.stop_reason or text
        self._log("".join(traceback.format_exception(error)))

    def _log(self, text: str) -> None:
        try:
            (self.run_dir / "logs").mkdir(exist_ok=True)
            with open(self.run_dir / "logs" / "controller.log", "a") as log:
                log.write(text)
        except OSError:
            pass

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
        load, outboxes = self.book.load(self.crew.generators), self.recovery.outboxes
        while self.book.pending and load:
            generator = min(load, key=load.get)
            if load[generator] >= 2 * self.config.engine.slots:
                break
            ticket = self.book.next_for(generator)
            outboxes[generator].put(ticket)
            load[generator] += len(ticket.seeds)
        for outbox in outboxes.values():
            outbox.flush()

    def _show(self) -> None:
        self.records.console.status(
            self.trained_steps, *self.book.training(), max(0, self.next_step - 1 - self.clock.version)
        )

    # Messages.
    def _listen_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self.crew.settled:
            self._listen(left)

    def _listen(self, timeout_s: float) -> None:
        # Outboxes are flushed by `_dispatch`, which is not called any more once the run is ending.
        transport.wait(
            [self.server, *(() if self.state.stop_reason else self.recovery.outboxes.values())],
            min(timeout_s, BEAT_EVERY_S),
        )
        if time.monotonic() - self._beaten > BEAT_EVERY_S:
            self._beaten = time.monotonic()
            self.crew.tell_launchers(m.Beat("controller"))
        while (item := self.server.receive()) is not None:
            self._handle(*item)

    def _handle(self, sender: str, message: m.Message) -> None:
        crew, state = self.crew, self.state
        if (allowed := _FROM.get(type(message))) is not None and (
            self.broadcasts is None or crew.roles.get(sender) not in allowed
        ):
            self.server.rejected += 1
        elif isinstance(message, m.Beat):
            crew.heard(sender, message)
        elif isinstance(message, m.ClockAsked):
            self.server.send(sender, m.ClockTold(message.sent, time.monotonic(), self.host))
        elif isinstance(message, m.Publish):
            self._published(sender, message)
        elif isinstance(message, m.Claim):
            self.server.send(sender, self.recovery.claim(message.names))
        elif isinstance(message, m.Hello):
            self.recovery.arrived(message)
        elif isinstance(message, m.Ready):
            self.recovery.joined(message.name)
        elif isinstance(message, m.Broken):
            if self.broadcasts.broken(message):
                self.records.counters[f"broadcast/{message.kind}_epochs"] = self.broadcasts.epochs[message.kind]
        elif isinstance(message, m.Received):
            self.broadcasts.received(message.kind)
            self.state.moved = time.monotonic()
        elif isinstance(message, m.Generated):
            self.book.moved(message.ticket_id, GENERATED, sender)
            self.state.moved = time.monotonic()
        elif isinstance(message, m.Arrived):
            self.book.moved(message.ticket_id, ARRIVED)
        elif isinstance(message, m.EvalDone):
            self._evaluated(sender, message)
        elif isinstance(message, m.StepDone):
            self._step_done(message)
        elif isinstance(message, m.Checkpointed):
            self.records.counters["checkpoint/version"] = message.version
            for name in crew.playing("draft_adapter"):
                self.server.send(name, message)
        elif isinstance(message, m.Spans):
            self.records.spans(message)
        elif isinstance(message, m.Notice):
            self.records.line(f"{message.name}: {message.text}")
        elif isinstance(message, m.Failed):
            if message.name not in crew.present:
                self.records.line(f"{message.name}, which was given up, failed: {message.error}")
            elif crew.roles.get(message.name) == "draft_adapter" and self.broadcasts is not None:
                self.recovery.lost_adapter(message.name, message.error)
            elif not state.failure:
                state.failure = state.stop_reason = (
                    f"{message.name} failed: {message.error}; see {self.run_dir}/logs/{message.name}.log"
                )
        elif isinstance(message, m.Stopped):
            crew.leave(message.name)
        elif isinstance(message, m.Interrupt) and message.lost:
            self.recovery.lost(message)
        elif isinstance(message, m.Interrupt):
            self.state.stop_reason = self.state.stop_reason or message.reason
        else:
            self.server.rejected += 1

    def _watch(self) -> None:
        """See to those that live no more as they should; end without a launcher."""
        if os.getppid() != self._parent:
            self.left_behind, self.state.failure, self.state.stop_reason = (
                True,
                "the launcher is gone",
                "the launcher is gone",
            )
        self.recovery.watch()

    # Progress.
    def _published(self, sender: str, message: m.Publish) -> None:
        if not self.broadcasts.relay(sender, message):
            return
        if message.kind == "draft":
            self.records.counters["draft/policy_version"] = message.policy_version
        elif message.version > self.clock.version:
            self.clock.publish(message.version)
            if self._evaluation_due(message.version):
                self._evaluate(message.version)

    def _evaluated(self, generator: str, message: m.EvalDone) -> None:
        ticket = self.book.end(
            "evaluated",
            message.ticket_id,
            generator=generator,
            version_min=message.version_min,
            version_max=message.version_max,
        )
        if ticket is None:
            return
        self.state.moved = time.monotonic()
        if (done := self.evaluations.add(ticket.step, message.rewards, message.version_max)) is not None:
            self.records.evaluated(*done)

    def _step_done(self, message: m.StepDone) -> None:
        self.state.moved = time.monotonic()
        self.trained_steps = message.step + 1
        for record in message.groups:
            if message.skipped:
                self.book.end(
                    "dropped", record.ticket_id, reason=f"step left out: {message.skipped}", left_out_in=message.step
                )
            else:
                self.book.end(
                    "trained",
                    record.ticket_id,
                    generator=record.generator,
                    version_min=record.version_min,
                    version_max=record.version_max,
                    trained_in=message.step,
                )
        if self.server.rejected:
            self.records.counters["wire/controller_rejected"] = self.server.rejected
        self.records.step(message, final=self.trained_steps == self.config.steps and bool(self.held_out))
