"""The conductor: leads a run from its start to its end.

- It reads the data. It waits until every actor is up, then until every actor has joined its broadcast groups. Each
  wait has a deadline.
- Then it loops: it issues and dispatches tickets (schedule.py), handles messages (switchboard.py), finds silent actors
  and replaces lost ones (recovery.py).
- It ends the run when all steps are trained and the last version is evaluated, on an interrupt, when errors in actors
  are hopeless (failures.py), or when there was no progress for stall_timeout_s. In the last case it says what the run
  was waiting for.
- At the end it stops all actors and closes the run's files.
"""

from __future__ import annotations

import math
import os
import threading
import time
import traceback
from collections.abc import Callable

from asyncspec.actors.crew import Life, Member, replaceable
from asyncspec.actors.failures import Failures
from asyncspec.actors.prometheus import Endpoint
from asyncspec.actors.recovery import Recovery
from asyncspec.actors.run import Run, RunFailed
from asyncspec.actors.schedule import Schedule
from asyncspec.actors.status import StatusFile
from asyncspec.actors.switchboard import Switchboard
from asyncspec.config import work
from asyncspec.deadlines import BEAT_EVERY_S, EARLY_STOP_S, KILLED_S, LATE_WORD_S, RESTART_S
from asyncspec.errors import UserError, first_line
from asyncspec.faults import Faults
from asyncspec.wire import messages as m

WATCH_EVERY_S = 0.05  # between two looks at all actors; longer if looks take more than WATCH_SHARE of the time
WATCH_SHARE = 0.05
SLOW_START_S = 4.0  # after this wait the console names the missing actors


class Conductor:
    """Leads one run, in the controller's process."""

    def __init__(self, run: Run, fault: Faults, resume: int, log: Callable[[str], None]) -> None:
        """
        Args:
            resume: the version to resume from; -1: a new run.
            log: callable(text) that writes to the controller's log.
        """
        self.run, self.config, self.records = run, run.config, run.records
        self.fault, self.resume, self.log = fault, resume, log
        self.recovery, self.schedule = Recovery(run), Schedule(run, max(0, resume))
        self.switchboard = Switchboard(run, self.recovery, self.schedule)
        self.status = StatusFile(run, self.schedule)
        self.left_behind = False  # the launcher, or its host's Ray, is gone
        self.started = False  # all actors are ready, so there may be something to save
        self._parent = os.getppid()
        self._beaten = self._watch_at = 0.0
        self._beat_every_s = work.beat_every_s(self.config)

    def lead(self) -> None:
        """Lead the run from start to end. `Run.stop_reason` and `Run.failure` then say how it ended."""
        run, schedule, endpoint = self.run, self.schedule, self._endpoint()
        try:
            if self.resume >= 0:
                run.failures = Failures.of(self.records.resume(self.resume))
            self._start()
            while not run.stop_reason:
                schedule.issue()
                self.fault("work")
                schedule.dispatch()
                self._listen(0.02)
                self._watch()
                schedule.show()
                self.status.write(self._waited_for)
                self._check_end()
        except RunFailed as error:
            run.failure = run.stop_reason = str(error)
        except Exception as error:
            self.log("".join(traceback.format_exception(error)))
            self.recovery.cannot_go_on(
                "controller", f"{type(error).__name__}: {first_line(error)}", isinstance(error, UserError)
            )
        self._end()
        self.status.write(lambda: "", last=True)
        if endpoint is not None:
            endpoint.close()

    def _endpoint(self) -> Endpoint | None:
        """Serve metrics to Prometheus, if that is asked for. A run goes on without."""
        if not (address := self.config.logging.prometheus):
            return None
        try:
            return Endpoint(address, lambda: self.records.metrics.last or {}, lambda: self.status.latest)
        except OSError as error:
            self.records.line(f"logging.prometheus={address!r}: {error.strerror or error}; the run goes on without")
            return None

    def _end(self) -> None:
        run, records = self.run, self.records
        try:
            self._stop_all()
        except Exception as error:  # the last messages are written meanwhile, and the disk may be full
            self._note_error(error)
        run.crew.tell_launchers(m.Stop(run.stop_reason))  # it sends no beats from now on, but it is not frozen
        for close in (
            lambda: run.book.drop_all(run.stop_reason),
            lambda: records.note("ended", reason=run.stop_reason, failure=run.failure),
            *records.closing(),
        ):
            try:
                close()
            except Exception as error:
                self._note_error(error)

    def _note_error(self, error: Exception) -> None:
        self.run.fail(f"controller: {type(error).__name__}: {error}")
        self.log("".join(traceback.format_exception(error)))

    # The start.
    def _start(self) -> None:
        run, crew = self.run, self.run.crew
        for member in crew.present:
            crew.expect(member)
        self._load()
        self._listen_until(lambda: [member for member in crew.present if member.hello is None], "to start")
        if run.stop_reason:
            return
        run.begin_broadcasts()
        for member in crew.present:
            member.since = time.monotonic()
        self._listen_until(
            lambda: [member for member in crew.present if not member.joined], "to load and to join the broadcasts"
        )
        if run.stop_reason:
            return
        self.records.note("ready")
        names = sorted(member.name for member in crew.present)
        self.records.line(f"{len(names) + 1} actors ready: controller, {', '.join(names)}")
        self.schedule.begin()
        run.progress()
        self.started = True

    def _load(self) -> None:
        """Read the data in a thread. Meanwhile the launchers get beats, and actors start.

        Raises:
            RunFailed: the data cannot be read, or not within stall_timeout_s.
        """
        errors: list[Exception] = []
        limit, began = self.config.deployment.stall_timeout_s, time.monotonic()

        def load() -> None:
            try:
                self.schedule.load()
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=load, name="data", daemon=True)
        thread.start()
        while thread.is_alive() and not self.run.stop_reason:
            self._listen(0.02)
            self._watch()
            if time.monotonic() - began > limit:
                raise RunFailed(f"the data was not read within {limit:.0f} s; raise deployment.stall_timeout_s")
        if errors:
            raise errors[0]

    def _listen_until(self, missing: Callable[[], list[Member]], what: str) -> None:
        """Wait until no actor is missing. An actor that falls silent meanwhile is killed and replaced.

        Args:
            missing: callable that returns the actors to wait for.
            what: what they have yet to do, for messages.

        Raises:
            RunFailed: an actor is late.
        """
        limit, tell_at = work.start_s(self.config), time.monotonic() + SLOW_START_S
        while missing():
            self._listen(0.1)
            self._watch()
            self.status.write(lambda: f"{_names(missing())} {what}")
            if self.run.stop_reason:
                return
            now = time.monotonic()
            if now > tell_at:
                self.records.line(f"waiting for {_names(missing())} {what}")
                tell_at = math.inf
            late = [
                member
                for member in missing()
                if now - member.since > limit + LATE_WORD_S and now - member.condemned_at > KILLED_S + LATE_WORD_S
            ]
            if late:
                raise RunFailed(
                    f"waited {limit:.0f} s for {_names(late)} {what}; "
                    f"see {self.records.run_dir}/logs, or raise deployment.start_timeout_s"
                )

    # Every turn.
    def _listen(self, timeout_s: float) -> None:
        run = self.run
        run.wait(min(timeout_s, BEAT_EVERY_S))
        if time.monotonic() - self._beaten > self._beat_every_s:
            self._beaten = time.monotonic()
            run.crew.tell_launchers(m.Beat("controller"))
        self.switchboard.receive()

    def _watch(self) -> None:
        """Handle silent actors, and end the run if the launcher is gone."""
        if os.getppid() != self._parent:
            self.left_behind = True
            self.run.failure = self.run.stop_reason = "the launcher is gone"
        if time.monotonic() > self._watch_at:
            began = time.monotonic()
            self.recovery.watch()
            now = time.monotonic()
            self._watch_at = now + max(WATCH_EVERY_S, (now - began) / WATCH_SHARE)

    def _check_end(self) -> None:
        if self.schedule.finished:
            self.run.stop_reason = "finished"
            return
        saving = self.schedule.trained_steps == self.config.steps  # nothing else goes forward meanwhile
        limit = work.checkpoint_s(self.config) if saving else work.stall_s(self.config)
        if time.monotonic() - self.run.moved > limit:
            raise RunFailed(
                f"no progress for {limit:.0f} s: waiting for {self._waited_for()}; see {self.records.run_dir}/logs, "
                "or raise deployment.stall_timeout_s"
            )

    def _waited_for(self) -> str:
        crew, book = self.run.crew, self.run.book
        coming = [member for member in crew.present if not member.settled]
        if cut_off := [member for member in crew.present if member.life is Life.CUT_OFF]:
            return f"{_names(cut_off)}, for which nobody answers"
        if not book.open and coming:
            return f"{_names(coming)} to replace lost actors"
        silent = max((member.name for member in crew.present), key=crew.vigil.silence)
        return f"{book.oldest() or 'no ticket'}; longest silent: {silent}, {crew.vigil.silence(silent):.1f} s"

    # The end.
    def _stop_all(self) -> None:
        run = self.run
        finished = run.stop_reason == "finished"
        seconds = self.config.deployment.stall_timeout_s if finished else RESTART_S if run.resuming else 0.0
        limit = work.stop_s(self.config, seconds) if self.started else EARLY_STOP_S
        deadline = time.monotonic() + limit
        while (left := self._awaited()) and time.monotonic() < deadline:
            for member in left:  # repeatedly: an actor that is still starting connects later
                run.server.send(member.name, m.Stop(run.stop_reason))
            self._listen_for(0.2)
            self.status.write(lambda: f"{_names(self._awaited())} to stop")
            if finished:
                self._watch()
        missing = self._awaited()
        if missing and self.started and not run.failure:
            self._given_up(missing, f"still running after {limit:.0f} s: {_names(missing)}", finished)

    def _given_up(self, missing: list[Member], text: str, finished: bool) -> None:
        """Say what is missing of a run whose time to stop is over. An interrupted run that has its checkpoint has
        failed at nothing.
        """
        run, version = self.run, self.schedule.trained_steps
        if max(self.resume, self.records.counters.get("checkpoint/version", 0)) < version:
            run.failure = f"{text}; the last checkpoint may be missing"
            return
        text += f"; the checkpoint of version {version} is complete" if version else ""
        if any(member.role == "trainer" for member in missing):
            text += "; the policy was not exported"
        if finished:
            run.failure = text
        else:
            self.records.line(text)

    def _awaited(self) -> list[Member]:
        """The actors that the run waits for at its end. Of the actors that are cut off, it waits only for the trainer,
        which may be writing a checkpoint. Before a restart it does not wait for ranks of a model if one of them failed.
        """
        crew, failed = self.run.crew, set()
        if self.run.resuming:
            alone = replaceable(self.config)
            failed = {each.leader for each in crew.members.values() if each.error and each.role not in alone}
        return [
            member
            for member in crew.settled
            if (member.life is not Life.CUT_OFF or member.role == "trainer") and member.leader not in failed
        ]

    def _listen_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self.run.crew.settled:
            self._listen(left)


def _names(members: list[Member]) -> str:
    return ", ".join(sorted(member.name for member in members))
