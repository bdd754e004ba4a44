"""The leading rank's side of the trainer's team: has all ranks accumulate, update, save and take snapshots together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from asyncspec.actors.base import Actor, StopRequested
from asyncspec.actors.team import Team
from asyncspec.rl.batch import Part, to_message
from asyncspec.rl.learner import Learner, merged
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
                outbox.put(*to_message(step, passes[rank // self.ranks.sharing], last))
            found.append(self.together(partial(self.learner.accumulator.run, passes[0], last)))
        return [each for each in found if each is not None]

    def train(
        self, step: int, groups: list[tuple[m.Group, m.Arrays]], passed: Callable[[list], None]
    ) -> tuple[dict[str, float], list[FloatingPointError]]:
        """Take the optimizer steps of a batch. The gradient of the first one is accumulated, except for `flush`.

        Args:
            groups: those of the batch, in order.
            passed: called with what `add` and `flush` return.

        Returns:
            The statistics, and the errors of the optimizer steps that were left out.

        Raises:
            FloatingPointError: no optimizer step had a finite gradient.
        """
        rl, accumulator = self.learner.config.rl, self.learner.accumulator
        passed(self.flush(step))
        if rl.updates_per_step == 1:
            return self.update(), []
        batches: dict[int, list] = {}
        for (group, arrays), advantage_G in zip(groups, accumulator.advantages(groups)):
            number = group.ticket.place % rl.groups_per_step // rl.groups_per_update
            batches.setdefault(number, []).append((group, arrays, advantage_G))
        found, errors = [], []
        for iteration in range(rl.num_iterations):
            for number, batch in batches.items():
                if iteration or number or accumulator.whole_step:
                    for each in batch:
                        passed(self.add(step, *each))
                        self.breathe()
                    passed(self.flush(step))
                try:
                    found.append(self.update())
                    self.committed = True
                except FloatingPointError as error:
                    errors.append(error)
        if errors and not found:
            raise errors[-1]
        return merged(found) | {"optimizer/steps": accumulator.updates}, errors

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

    def snapshot(self, export: bool = False):
        """Take a snapshot of the policy, on all ranks. For `export` see `Learner.snapshot`."""
        self.order(SNAPSHOT, int(export))
        return self.learner.snapshot(lambda: self.order(GATHER, int(export)), export)

    def save(self, version: int) -> None:
        """Begin a checkpoint, on all ranks."""
        self.order(SAVE, version)
        self.together(lambda: self.learner.save(version))
