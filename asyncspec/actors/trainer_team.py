"""The leading rank's side of the trainer's team: has all ranks accumulate, update, save and take snapshots together."""

from __future__ import annotations

from functools import partial

import numpy as np

from asyncspec.actors.base import Actor, StopRequested
from asyncspec.actors.team import Team
from asyncspec.rl.batch import Part, to_message
from asyncspec.rl.learner import Learner
from asyncspec.wire import messages as m

# Rank 0's orders to the others, see trainer_rank.py.
UPDATE, SNAPSHOT, GATHER, SAVE, CLEAR = "update", "snapshot", "gather", "save", "clear"


class TrainerTeam(Team):
    """The leading rank's side of the trainer's team."""

    def __init__(self, actor: Actor, learner: Learner) -> None:
        super().__init__(actor, learner.ranks)
        self.learner = learner
        self.committed = False  # an optimizer step of the present batch was taken, so the batch is trained to its end

    def add(self, step: int, group: m.Group, arrays: m.Arrays, advantage_G: np.ndarray | None = None) -> list:
        """Add a group to the gradient; passes run once they are full. Return what `GradientAccumulator.run` returned
        for this rank's passes, without None.
        """
        return self._run(step, self.learner.accumulator.add(group, arrays, advantage_G), False)

    def flush(self, step: int) -> list:
        """Run the passes that are not full. Return the same as `add`."""
        return self._run(step, self.learner.accumulator.flush(), True)

    def _run(self, step: int, rounds: list[list[list[Part]]], ends: bool) -> list:
        """Run rounds on all ranks; with `ends`, they are the last ones of the step."""
        found = []
        for number, passes in enumerate(rounds, 1):
            if number > 1:  # many rounds are a long turn
                self.breathe()
            last = ends and number == len(rounds)
            for rank, outbox in enumerate(self.outboxes, start=1):
                outbox.put(*to_message(step, passes[rank // self.ranks.tensor_parallel], last))
            found.append(self.together(partial(self.learner.accumulator.run, passes[0], last)))
        return [each for each in found if each is not None]

    def breathe(self) -> None:
        """Handle messages between two pieces of work.

        Raises:
            StopRequested: the actor has to stop, and may do so now.
        """
        self.actor.wait(0.0)
        self.actor.pump()
        if self.actor.stopping and not self.committed:
            raise StopRequested

    def update(self) -> dict[str, float]:
        """Call `Learner.update` on all ranks, and return its statistics."""
        self.order(UPDATE)
        return self.together(self.learner.update)

    def clear(self) -> None:
        """Forget the groups of an unfinished step, on all ranks."""
        self.order(CLEAR)
        self.learner.accumulator.clear()

    def snapshot(self):
        """Take a snapshot of the policy, on all ranks."""
        self.order(SNAPSHOT)
        return self.learner.snapshot(lambda: self.order(GATHER))

    def save(self, version: int) -> None:
        """Begin a checkpoint, on all ranks."""
        self.order(SAVE, version)
        self.together(lambda: self.learner.save(version))
