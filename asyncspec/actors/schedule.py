"""The schedule: when tickets are issued, which generator gets each, and how far training and evaluation have come.

A ticket of step s is issued once the policy clock admits it, which means that version s - lag is published. The tickets
of an evaluation are issued when its version is published; pending.py says which are sent first. With
rl.dynamic_sampling=replace, a ticket whose group has no signal is followed by another one for the same place of the
same step. So the order of a step's groups does not depend on how long each took.
"""

from __future__ import annotations

import msgspec

from asyncspec.actors import evaluations
from asyncspec.actors.run import Run, RunFailed
from asyncspec.actors.tickets import TicketMaker
from asyncspec.config import resolve_path
from asyncspec.lag import PolicyClock
from asyncspec.ledger.best import Best
from asyncspec.models import tokenizer
from asyncspec.tasks.data import load_problems
from asyncspec.wire import messages as m

NO_SIGNAL = "all its rewards are equal"  # why rl.dynamic_sampling drops a ticket


class Schedule:
    """Issues and dispatches the tickets of a run, and counts what comes back."""

    def __init__(self, run: Run, first_step: int) -> None:
        self.run, self.config = run, run.config
        self.maker: TicketMaker | None = None  # set by `load`
        self.first_step = first_step
        self.clock = PolicyClock(self.config.policy_lag, first_step)
        self.next_step = first_step  # the step whose tickets are issued next
        self.trained_steps = first_step
        self._unused: dict[int, list[m.GroupRecord]] = {}  # by step, the groups without signal
        self.evaluations = evaluations.Evaluations(self.config)
        keep, records = self.config.eval, run.records
        self.best = Best(records.run_dir, keep.best_set, records.line) if keep.keep_best else None

    @property
    def finished(self) -> bool:
        steps = self.config.steps
        saving = self.best is not None and self.best.awaits(steps)
        published = self.clock.version == steps  # its evaluation begins then
        return self.trained_steps == steps and published and not self.evaluations and not saving

    def load(self) -> None:
        """Read the data, in whatever thread: it takes long if there is much. The launcher has checked it.

        Raises:
            RunFailed: the data cannot be read.
        """
        try:
            tokens = tokenizer.load(resolve_path(self.config.model.path))
            problems = load_problems(self.config)
            self.maker = TicketMaker(self.config, tokens, problems.training, problems.held_out)
        except ValueError as error:
            raise RunFailed(str(error)) from None

    def begin(self) -> None:
        """Evaluate the version that the run starts from, if that is due or an evaluation before it is missing."""
        found = self.run.records.evaluations.found
        if self.best is not None:
            self.best.resume(found)
        if evaluations.missing(self.config, self.first_step, found):
            self._evaluate(self.first_step)

    def issue(self) -> None:
        """Issue the tickets that the clock admits."""
        while self.next_step < self.config.steps and self.clock.may_issue(self.next_step):
            self.run.book.issue(self.maker.of_step(self.next_step, self.clock.min_version(self.next_step)))
            self.next_step += 1

    def dispatch(self) -> None:
        """Keep each generator supplied with samples for two engines. The least loaded generator comes first. While
        training tickets are still to come, evaluations get only what one engine has free, so that these wait less.
        The evaluation of the version that the run starts from goes first: it is measured before anything is trained.
        """
        book, server, slots = self.run.book, self.run.server, self.config.engine.slots
        coming = self.next_step < self.config.steps
        first = self.config.eval.pinned or self.clock.version == self.first_step
        load = book.load(self.run.crew.generators) if book.pending else {}
        while book.pending and load:
            generator = min(load, key=load.get)
            if load[generator] >= 2 * slots:
                break
            if (ticket := book.next_for(generator, not coming or load[generator] < slots, first)) is None:
                break
            server.send(generator, self.maker.encoded(ticket))
            load[generator] += len(ticket.seeds)

    def show(self) -> None:
        self.run.records.console.status(
            self.trained_steps, *self.run.book.training(), max(0, self.next_step - 1 - self.clock.version)
        )

    def published(self, message: m.Publish) -> None:
        """Note that a version of the policy was published; evaluate it if that is due."""
        if message.version > self.clock.version:
            self.clock.publish(message.version)
            if evaluations.due(self.config, message.version):
                self._evaluate(message.version)

    def evaluated(self, generator: str, message: m.EvalDone) -> None:
        """Note that a ticket of an evaluation is done."""
        ticket = self.run.book.end(
            "evaluated",
            message.ticket_id,
            generator=generator,
            version_min=message.version_min,
            version_max=message.version_max,
        )
        if ticket is None:
            return
        self.run.progress()
        if message.shown is not None:
            self.run.records.rollouts([message.shown], self.maker.tokenizer)
        if (done := self.evaluations.add(ticket, message)) is not None:
            self.run.records.evaluated(*done)
            if self.best is not None:
                self.best.evaluated(done[0])

    def checkpointed(self, message: m.Checkpointed) -> None:
        """Note that a checkpoint is complete, or was given up. When the run ends, the best version stays as it is: the
        trainer writes its policy then.
        """
        if self.best is not None and not self.run.stop_reason:
            self.best.settled(message.version)

    def unused(self, generator: str, message: m.Unused) -> None:
        """Replace a group without signal by another one, or leave its place out of the step."""
        ticket = self.run.book.unused(message.record.ticket_id, generator)
        if ticket is None:
            return
        self.run.progress()
        self._unused.setdefault(ticket.step, []).append(message.record)
        details = {"reason": NO_SIGNAL, "generator": generator, "reward": message.record.reward_mean}
        if (other := self.maker.after(ticket)) is not None:
            self.run.book.replace(ticket, other, **details)
            return
        self.run.book.end("dropped", ticket.ticket_id, empty_in=ticket.step, **details)
        for member in self.run.crew.playing("trainer"):
            self.run.server.send(member.name, m.LeftOut(ticket.place, ticket.ticket_id))

    def step_done(self, message: m.StepDone) -> None:
        """Note that a step was trained or skipped."""
        self.run.progress()
        self.trained_steps = message.step + 1
        if not message.skipped:
            self.run.failures.trained(self.trained_steps)
        message = msgspec.structs.replace(message, unused=self._unused.pop(message.step, []))
        for record in message.groups:
            self._end_ticket(message, record)
        final = self.trained_steps == self.config.steps and bool(self.maker.held_out)
        self.run.records.step(message, final)
        self.run.records.rollouts(message.shown, self.maker.tokenizer)

    def _end_ticket(self, message: m.StepDone, record: m.GroupRecord) -> None:
        if message.skipped:
            reason = f"step skipped: {message.skipped}"
            self.run.book.end("dropped", record.ticket_id, reason=reason, left_out_in=message.step)
        else:
            self.run.book.end(
                "trained",
                record.ticket_id,
                generator=record.generator,
                version_min=record.version_min,
                version_max=record.version_max,
                trained_in=message.step,
                tokens=sum(record.response_tokens),
                environment_tokens=record.environment_tokens,
                checksum=record.checksum,
            )

    def _evaluate(self, version: int) -> None:
        if tickets := self.maker.of_evaluation(version):
            self.evaluations.begin(version, tickets)
            self.run.book.issue(tickets)
