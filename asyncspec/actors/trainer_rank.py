"""The trainer's ranks beyond the first; see team.py.

    trainer         add g0 | add g1 | flush        | update | snapshot, publish ...
    orders to 1            | a pass | a pass       | update | snapshot, gather
    both ranks             | a pass | a pass       | step   | gather bucket by bucket (in a thread)

Responses of groups that have a gradient are packed to passes, one on each data rank (rl/batch.py).
"""

from __future__ import annotations

from pathlib import Path

from asyncspec.actors.base import StopRequested
from asyncspec.actors.team import Follower
from asyncspec.actors.trainer_team import CLEAR, GATHER, SAVE, SNAPSHOT, UPDATE
from asyncspec.config import work
from asyncspec.config.topology import TRAINER_RANK
from asyncspec.deadlines import COLLECTIVE_S
from asyncspec.rl.batch import from_message
from asyncspec.rl.learner import Learner
from asyncspec.wire import messages as m
from asyncspec.wire.layout import Snapshot


class TrainerRank(Follower):
    """A rank of the trainer that follows the first."""

    role = TRAINER_RANK
    takes = (m.Pass, m.Order)
    learner_class = Learner

    def __init__(self, spec) -> None:
        super().__init__(spec)
        self.threads = self.config.trainer.threads
        self.learner = self.learner_class(self.config, Path(spec.run_dir), self.device, self.rank)
        self.learner.visit = self.before_checkpoint
        self.step_index = max(0, spec.resume)
        self.snapshots: dict[int, Snapshot] = {}  # the newest one that is published, 0, or exported, 1

    def load(self) -> None:
        self.learner.load()

    def connect(self, welcome: m.Welcome) -> set[str]:
        self.learner.join(welcome.store_host, welcome.store_port, COLLECTIVE_S)
        if self.step_index:
            self.learner.restore(self.step_index)
        return set()

    def follow(self, message: m.Message, arrays: m.Arrays) -> None:
        learner = self.learner
        if isinstance(message, m.Pass):
            with self.recorder.span("train", message.step):
                self.fault("work")
                learner.accumulator.run(from_message(message, arrays), message.last)
        elif message.what == UPDATE:
            try:
                learner.update()
            except FloatingPointError as error:
                self.log(str(error))
        elif message.what == SNAPSHOT:
            self.snapshots[message.number] = learner.snapshot(export=message.number == 1)
        elif message.what == GATHER:
            self.snapshots[message.number].begin()  # a version may be gathered again, for members of a new epoch
            self.snapshots.pop(1, None)
        elif message.what == SAVE:
            for act in learner.checkpoints.saved, lambda: learner.save(message.number):
                try:
                    act()
                except OSError as error:  # rank 0 tells the user
                    self.log(str(error))
        elif message.what == CLEAR:
            learner.accumulator.clear()

    def finish(self) -> None:
        """Take part in what rank 0 still has to write."""
        if self._code:  # its share of an update may be missing
            return
        try:
            # Rank 0 gives no order while any rank writes a checkpoint.
            self.follow_to_the_end(work.stop_s(self.config, self.config.deployment.stall_timeout_s))
            self.learner.checkpoints.saved(wait=True)
        except (StopRequested, OSError) as error:  # a rank was lost meanwhile; or rank 0 reports what is wrong
            self.log(str(error))
