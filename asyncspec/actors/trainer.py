"""The trainer: accumulates the gradient as groups arrive in ticket order, steps, publishes the next version.

- Step s trains the groups of the places s * G .. s * G + G - 1 in that order, in whatever order they arrive (G: groups
  a step). With rl.dynamic_sampling some places may be left out.
- It refuses a group outside the policy lag with `LagError`, before the group touches the gradient.
- It sums losses over tokens and divides the gradient once. With an advantage estimator that looks at the whole step, it
  trains when the last group is there (rl/accumulate.py).
- With several optimizer steps a batch, the first one is taken when the last group is there. All of them together make
  one version.
- It leads the trainer's other ranks, if there are any: trainer_team.py, trainer_rank.py.
- With speculation.method=mtp it also trains the policy's MTP module: actors/mtp.py.
- Every `checkpoint.every` steps it writes a checkpoint to resume from, in the background; with `eval.keep_best` also of
  the versions that are evaluated.
- Every `checkpoint.export_every` steps it exports the version that it is about to train. Generators work meanwhile.
- Its wall time is a sequence without gaps: waits (their causes are found later), data, train, prepare, export, others.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from asyncspec.actors import evaluations
from asyncspec.actors.base import Actor, StopRequested
from asyncspec.actors.trainer_team import TrainerTeam
from asyncspec.config import work
from asyncspec.deadlines import COLLECTIVE_S
from asyncspec.errors import first_line
from asyncspec.lag import check_lag
from asyncspec.ledger.checkpoint import export_of
from asyncspec.rl.learner import Learner
from asyncspec.rl.observed import observed, wrong_generators
from asyncspec.timing.rollouts import shown
from asyncspec.timing.spans import now
from asyncspec.wire import messages as m
from asyncspec.wire.facts import sampled
from asyncspec.wire.shown import Shown
from asyncspec.wire.weights import Publisher

if TYPE_CHECKING:
    from asyncspec.actors.mtp import MTPTrainer


@dataclass
class _Step:
    """What the trainer has done so far for the present step."""

    start: float = 0.0
    waits: list[m.Wait] = field(default_factory=list)
    busy: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("data", "train", "prepare", "export"), 0.0))
    groups: list[tuple[m.Group, m.Arrays]] = field(default_factory=list)  # that it trains, in order


class Trainer(Actor):
    """The trainer's first rank, which leads the others."""

    role = "trainer"
    takes = (m.Group,)
    learner_class = Learner

    def __init__(self, spec) -> None:
        super().__init__(spec)
        self.threads = self.config.trainer.threads
        self.step_index = max(0, spec.resume)
        # The version of the newest checkpoint begun. The first version may be the best one, too.
        self.saved_version = -1 if self.config.eval.keep_best and not self.step_index else self.step_index
        self.exported_version = 0  # newest version in RUN/exports that this process has written
        self._saving_since, self._to_save = 0.0, False  # `_to_save`: the ranks have joined
        self.arrived: dict[int, tuple[m.Group, m.Arrays]] = {}  # by place, until its turn
        self.left_out: dict[int, int] = {}  # by place, until its turn: the last ticket, whose group is not trained
        self.step_start = 0.0  # when the previous step ended; 0: there was none
        self.step = _Step()
        self._named: set[str] = set()  # generators whose logprobs were wrong
        self.next_place = self.step_index * self.config.rl.groups_per_step
        self.learner = self.learner_class(self.config, Path(spec.run_dir), self.device)
        self.learner.visit = self.before_checkpoint
        self.team = TrainerTeam(self, self.learner)
        self.mtp: MTPTrainer | None = None  # set by `load` with speculation.method=mtp
        self.publishers: dict[str, Publisher] = {}  # by kind of weights; set by `connect`

    def inbox_credits(self) -> int:
        return (self.config.policy_lag + 1) * self.config.rl.groups_per_step

    def load(self) -> None:
        self.learner.load()
        if self.config.draft_trainer == "trainer":
            from asyncspec.actors.mtp import MTPTrainer

            self.mtp = MTPTrainer(self.config, self.learner, self.device)

    def connect(self, welcome: m.Welcome) -> set[str]:
        where = welcome.store_host, welcome.store_port
        self.team.connect(welcome)
        self.learner.join(*where, COLLECTIVE_S)
        self.publishers["policy"] = Publisher(*where, "policy", self.name, self.device, self.learner.layout)
        self.publisher.hold_back = lambda version: self.delay("broadcast", version=version)
        if self.mtp is not None:
            self.publishers["draft"] = Publisher(*where, "draft", self.name, self.device, self.mtp.layout)
        if self.step_index:
            self._restore()
        self.workers = list(self.publishers.values())
        self._to_save = True
        return set(self.publishers)

    def _restore(self) -> None:
        """Resume from the checkpoint of version `step_index`."""
        version = self.step_index
        state = self.learner.restore(version)
        self.publisher.begin_with(m.Publish("policy", version), self.team.snapshot())
        if self.mtp is not None:
            self.mtp.restore(state)
            self.publishers["draft"].begin_with(m.Publish("draft", version, version), self.mtp.snapshot())

    @property
    def publisher(self) -> Publisher:
        """The publisher of the policy."""
        return self.publishers["policy"]

    def handle(self, message: m.Message) -> None:
        if isinstance(message, m.Membership):
            self.join(self.publishers[message.kind], message)
        elif isinstance(message, m.LeftOut):
            self.left_out[message.place] = message.ticket_id

    def turn(self) -> None:
        """Make the next version, waits included; after the last one, idle briefly."""
        self._tend_checkpoint()
        if self._save_due() and not self.learner.checkpoints.busy:
            with self.recorder.span("checkpoint", version=self.step_index):
                self._save()
        if self.step_index == self.config.steps:
            self.publisher.check()
            self.idle = True
            self.wait(0.05)
            return
        step = self.step_index
        work = self.step = _Step(start=self.step_start or now())
        if self.mtp is not None:
            self.mtp.begin_step()
        if self._to_export():
            with self._part("export", step):
                self._await_broadcast()  # ranks gather one snapshot at a time
                self._export()
                self.wait_step(0.0)  # it may be long, and so may be what follows
        records = self._accumulate(step)
        # Wait for the last broadcast before the update, so that nothing can fail between the update and its report.
        with self._part("prepare", step):
            self._await_broadcast()
        with self._part("train", step):
            stats, skipped = self.learner.take_step(step, work.groups, lambda: self._update(step), self._notice)
        stats |= observed(step, work.groups, self.config.rl)
        self._name_wrong(work.groups)
        with self._part("prepare", step):
            self._publish(step + 1)
        end = now()
        self.control.send(
            m.StepDone(
                step=step,
                start=work.start,
                end=end,
                waits=work.waits,
                busy=work.busy,
                stats=stats,
                groups=records,
                skipped=skipped,
                shown=self._shown(),
            )
        )
        self.step_index, self.step_start = step + 1, end
        self.team.committed = False

    def _name_wrong(self, groups: list[tuple[m.Group, m.Arrays]]) -> None:
        """Name each generator, once, whose logprobs are not those of the version that it names."""
        sampling = self.config.sampling
        if sampling.top_p < 1 or sampling.top_k:  # then its logprobs are of another distribution
            return
        for generator, wrong in wrong_generators(groups).items():
            if generator not in self._named:
                self._named.add(generator)
                self._notice(wrong)

    def _save_due(self) -> bool:
        every, new = self.config.checkpoint.every, self.step_index - self.saved_version
        evaluated = self.config.eval.keep_best and evaluations.due(self.config, self.step_index)
        return new > 0 and (evaluated or bool(every) and new >= every)

    def _shown(self) -> list[Shown]:
        """Return the groups of the step whose tickets ask for it, as people read them."""
        groups = self.step.groups
        if not any(group.ticket.shown for group, _ in groups):
            return []
        return [
            shown(group.ticket, arrays, group.rewards, group.truncated, advantages.tolist())
            for (group, arrays), advantages in zip(groups, self.learner.accumulator.advantages(groups))
            if group.ticket.shown
        ]

    def _accumulate(self, step: int) -> list[m.GroupRecord]:
        """Take a step's groups, in order, and add the gradients of those of the first optimizer step. Return a record
        of each group.
        """
        records, count = [], self.config.rl.groups_per_step
        for place in range(step * count, (step + 1) * count):
            found = self._next_group(place)
            self.next_place = place + 1
            self.pump()
            if self.stopping:
                raise StopRequested
            if found is not None:
                with self._part("train", step, found[0].ticket.ticket_id):
                    records.append(self._take(step, *found))
        return records

    def _update(self, step: int) -> dict[str, float]:
        stats, errors = self.team.train(step, self.step.groups, self._draft)
        if errors:
            count = self.config.rl.updates_per_step
            self._notice(f"step {step} left out {len(errors)} of {count} optimizer steps: {errors[-1]}")
        return stats

    def _await_broadcast(self) -> None:
        while self.publisher.busy:
            self.publisher.check()
            self.wait_step(0.005)
        self.publisher.check()

    def _publish(self, version: int) -> None:
        """Publish the new version of the policy and, when it is due, of the draft."""
        self.publisher.publish(m.Publish("policy", version), self.team.snapshot(), self.control.send)
        self.fault("send")
        if self.mtp is not None and not self.publishers["draft"].busy and self.mtp.due():
            self.publishers["draft"].publish(
                m.Publish("draft", version, version - 1, self.mtp.trainer.expected()),
                self.mtp.snapshot(),
                self.control.send,
            )

    def _notice(self, text: str) -> None:
        self.control.send(m.Notice(self.name, text))

    def _save(self) -> None:
        self._tend_checkpoint()  # the one before may have ended in this turn
        self.saved_version, self._saving_since = self.step_index, time.monotonic()
        try:
            self.team.save(self.step_index)
        except OSError as error:
            self._not_saved(error)

    def _tend_checkpoint(self, wait: bool = False) -> None:
        limit = work.checkpoint_s(self.config)
        if self.learner.checkpoints.busy and self._saving_since and time.monotonic() - self._saving_since > limit:
            self._saving_since = 0.0  # notify once
            late = self.learner.checkpoints.late if self.learner.ranks.size > 1 else []
            by = f" by rank {', '.join(map(str, late))}" if late else ""
            self._notice(
                f"the checkpoint of version {self.saved_version} is still being written{by} after {limit:.0f} s; the "
                f"next one must wait for it; check that the disk of {self.spec.run_dir} works"
            )
        try:
            if (version := self.learner.checkpoints.saved(wait)) is not None:
                self.control.send(m.Checkpointed(version))
        except OSError as error:
            self._not_saved(error)

    def _end_checkpoint(self) -> None:
        """Wait until no rank writes a checkpoint, even one that was given up: the next one needs all ranks."""
        self._tend_checkpoint(wait=True)
        while self.learner.checkpoints.busy:
            time.sleep(0.05)

    def _not_saved(self, error: OSError) -> None:
        self.counters["checkpoint/failed"] = self.counters.get("checkpoint/failed", 0) + 1
        self._notice(f"{error}; the run continues, and earlier checkpoints are intact")
        self.control.send(m.Checkpointed(self.saved_version, failed=True))

    def _to_export(self) -> bool:
        """Whether the present version is one of those to export, and has not been."""
        version, every = self.step_index, self.config.checkpoint.export_every
        if not every or not version or version % every or version == self.exported_version:
            return False
        # A run that resumes from this version has the same weights.
        return version != self.spec.resume or not export_of(Path(self.spec.run_dir), version).exists()

    def _export(self) -> None:
        """Write the present version to RUN/exports. If it cannot be written, the run continues."""
        version = self.exported_version = self.step_index
        try:
            self.save_policy(version)
        except OSError as error:
            self._notice(
                f"the export of version {version} was not written: {error}; the run continues; `asyncspec export` "
                "makes one from a checkpoint"
            )

    def finish(self) -> None:
        """Write a checkpoint to resume from, then the policy: if the second fails, or the time to stop is over before
        it ends, nothing is lost.
        """
        if self.team.lost or not self._to_save:  # this rank alone has only its share; or nothing was learned yet
            return
        try:
            self.team.clear()  # an unfinished step is dropped
            self._end_checkpoint()
            if self.saved_version < self.step_index and not self._code:
                self._save()
                self._end_checkpoint()
            try:
                self.save_policy()
            except OSError as error:
                self._notice(f"the policy was not written: {error}; its weights are in the newest checkpoint")
            if self._to_export():
                self._export()
            self.team.end()
            self.save_best()
        except StopRequested:  # a rank was lost meanwhile
            pass

    def save_best(self) -> None:
        """Write the policy of the run's best version as a Hugging Face directory, if the run keeps one."""
        if not self.config.eval.keep_best:
            return
        from asyncspec.rl.from_checkpoint import save_best

        try:
            if said := save_best(self.config, Path(self.spec.run_dir)):
                self._notice(said)
        except Exception as error:  # of many types; the run has its result, so it has not failed
            why = first_line(error)
            self._notice(f"the policy of the best version was not written: {why}; its checkpoint is intact")

    def save_policy(self, version: int | None = None) -> None:
        """Write the policy as a Hugging Face directory: the result of the run, or the export of a version."""
        self.delay("export")
        directory = self.team.together(
            lambda: self.learner.save_policy(
                lambda: self.team.snapshot(export=True), self.mtp and self.mtp.module, version
            )
        )
        self.log(f"policy of version {self.step_index} written to {directory}")

    def _take(self, step: int, group: m.Group, arrays: m.Arrays) -> m.GroupRecord:
        """Take a group for training. Its gradient is added now if it belongs to the first optimizer step."""
        versions, rl = arrays["versions"][sampled(arrays)], self.config.rl
        check_lag(step, self.config.policy_lag, group.ticket.ticket_id, (int(versions.min()), int(versions.max())))
        self.step.groups.append((group, arrays))
        self.delay("train", ticket=group.ticket.ticket_id)
        self.fault("work")
        in_first = group.ticket.place % rl.groups_per_step < rl.groups_per_update
        if rl.updates_per_step == 1 or (in_first and not self.learner.accumulator.whole_step):
            self._draft(self.team.add(step, group, arrays))
        return m.GroupRecord.of(group, arrays)

    def _draft(self, passes: list) -> None:
        """Train the MTP module, if there is one, on passes of the policy."""
        for row, scores in passes if self.mtp is not None else ():
            self.counters |= self.mtp.train(row, scores)

    def _next_group(self, place: int) -> tuple[m.Group, m.Arrays] | None:
        """Wait for the group of a place. Return None if the place is left out."""
        start, waited = now(), False
        self._sort_inbox()
        while place not in self.arrived and place not in self.left_out:
            waited = True
            self.publisher.check()
            self.wait_step()
            self._sort_inbox()
        end, found = now(), self.arrived.pop(place, None)
        ticket_id = self.left_out.pop(place, -1) if found is None else found[0].ticket.ticket_id
        if waited:
            self.step.waits.append(m.Wait(ticket_id, start, end))
            self.recorder.add("wait", start, end, self.step_index, ticket_id)
        else:
            self.step.busy["data"] += end - start
        return found

    def _sort_inbox(self) -> None:
        while (item := self.inbox.take()) is not None:
            group, arrays, *_ = item
            place = group.ticket.place
            self.control.send(m.Arrived(group.ticket.ticket_id))
            # A ticket that was issued again because its generator died may arrive twice: the first one counts.
            if place in self.arrived or place < self.next_place:
                self.counters["tickets/duplicates"] = self.counters.get("tickets/duplicates", 0) + 1
            else:
                self.arrived[place] = (group, arrays)

    @contextmanager
    def _part(self, name: str, step: int, ticket: int = -1):
        start, mark, cpu = now(), self.recorder.mark(), time.process_time()
        yield
        end, cpu = now(), time.process_time() - cpu
        self.step.busy[name] += end - start
        self.recorder.add(name, start, end, step=step, ticket=ticket, version=step, since=mark, cpu=cpu)
