"""The learner: one rank's part of the trained policy. It loads, learns, takes snapshots and writes checkpoints.

The actors decide when: rank 0 is the trainer (actors/trainer.py); the other ranks follow its orders
(actors/trainer_rank.py). Every method marked as collective must be called in all ranks, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from asyncspec.config import Config, resolve_path, work
from asyncspec.files import new_folder
from asyncspec.ledger import checkpoint
from asyncspec.models.contents import check_policy
from asyncspec.models.parallel import Ranks
from asyncspec.wire import messages as m
from asyncspec.wire.layout import Layout, Snapshot, WholeSnapshot

if TYPE_CHECKING:
    from asyncspec.models.shape import PolicyShape
    from asyncspec.rl.accumulate import GradientAccumulator

MOST_SKIPPED = 3  # this many steps in a row whose gradient is not finite are an error


def save_step(directory: Path, step: int, groups: list[tuple[m.Group, m.Arrays]]) -> Path:
    """Write the groups of a step to a file: arrays "TICKET/NAME", and the groups as JSON under "groups"."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"step-{step}.npz"
    arrays = {f"{group.ticket.ticket_id}/{name}": array for group, arrays in groups for name, array in arrays.items()}
    np.savez(file, groups=np.array(msgspec.json.encode([group for group, _ in groups]).decode()), **arrays)
    return file


def merged(stats: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the statistics of a batch from those of its optimizer steps: their means, and the last learning rate."""
    names = dict.fromkeys(name for each in stats for name in each)
    found = {name: [each[name] for each in stats if name in each] for name in names}
    return {name: values[-1] if name == "optimizer/lr" else float(np.mean(values)) for name, values in found.items()}


class Learner:
    def __init__(self, config: Config, run_dir: Path, device: str, rank: int = 0) -> None:
        self.config, self.run_dir, self.device = config, run_dir, device
        t = config.trainer
        sizes = t.ranks, t.tensor_parallel, config.model.dtype, t.replicas, t.reduce_dtype
        self.ranks = Ranks("trainer", rank, *sizes, t.expert_parallel, t.context_parallel)
        self.skipped = self.skipped_in_a_row = 0  # steps whose gradient was not finite
        self.more_state: Callable[[], dict] = dict  # returns further entries for a checkpoint
        self.visit: Callable[[], None] = lambda: None  # called in a thread before a checkpoint's files are written
        self.model = None  # None until loaded
        self.shape: PolicyShape | None = None
        self.accumulator: GradientAccumulator | None = None  # None until the ranks have joined
        self.layout: Layout | None = None  # in which versions are published
        self.export_layout: Layout | None = None
        self.checkpoints: checkpoint.Checkpoints | None = None

    def load(self) -> None:
        """Load the policy. If it is sharded, only its shape: a rank knows its shards when it has joined the others."""
        from asyncspec.models import policy

        c = self.config
        path = resolve_path(c.model.path)
        self.shape = check_policy(path, c.model.backend)
        self.model = policy.skeleton(self.shape, c.positions, c.lora)
        if not self.ranks.sharded:
            policy.fill(self.model, path, self.device, c.seed)

    def join(self, store_host: str, store_port: int, collective_s: float) -> None:
        """Connect to the other ranks, and load this rank's shards of the policy. Collective."""
        from asyncspec.models import policy
        from asyncspec.rl.accumulate import GradientAccumulator

        c = self.config
        self.ranks.join(store_host, store_port, self.device, work.start_s(c), collective_s)
        self.ranks.shard(self.model, trained=True, recompute=c.trainer.recompute, compiled=c.trainer.compile)
        if self.ranks.sharded:
            policy.fill(self.model, resolve_path(c.model.path), self.device, c.seed)
            self.ranks.meet("loaded", work.start_s(c))
        if self.shape.config_json:
            from asyncspec.models.foreign import check_head

            check_head(self.model, self.device)
        keep = c.draft.top_tokens if c.draft_trainer == "trainer" else None
        self.accumulator = GradientAccumulator(self.model, c, self.ranks, keep)
        self._hold()

    def _hold(self) -> None:
        from asyncspec.models import lora

        c = self.config
        parameters = lora.trained(self.model)
        self.layout = Layout.of(parameters, c.model.dtype)
        # Adapters are added to the frozen weights before these are rounded.
        self.export_layout = Layout.of(parameters, "float32" if c.lora is not None else c.checkpoint.export_dtype)
        self.checkpoints = checkpoint.Checkpoints(
            self.run_dir,
            "trainer",
            self.config.checkpoint.keep,
            self.ranks,
            self.ranks.patient_group(work.turn_s(self.config)),
            work.patience_s(self.config),
            lambda: self.visit(),
        )

    def update(self) -> dict[str, float]:
        """Take the optimizer's step; return its statistics. Collective.

        Raises:
            FloatingPointError: the gradient is not finite, which all ranks notice; it is dropped.
        """
        try:
            return self.accumulator.step()
        except FloatingPointError:
            self.skipped += 1
            self.accumulator.clear()
            raise

    def take_step(
        self,
        step: int,
        groups: list[tuple[m.Group, m.Arrays]],
        update: Callable[[], dict[str, float]],
        notice: Callable[[str], None],
    ) -> tuple[dict[str, float], str]:
        """Update the policy. A step whose gradient is not finite is skipped, saved for inspection and reported.

        Args:
            groups: the groups of the step.
            update: has all ranks call `update`.
            notice: callable(text) that informs the user.

        Returns:
            The step's statistics, and why it was skipped; "" if it was not.

        Raises:
            FloatingPointError: MOST_SKIPPED steps in a row had no finite gradient.
        """
        try:
            stats = update()
            self.skipped_in_a_row = 0
            return stats, ""
        except FloatingPointError as error:
            self.skipped_in_a_row += 1
            folder = self.run_dir / "skipped"
            try:
                kept = f"its groups are in {save_step(folder, step, groups)}"
            except OSError as full:
                kept = f"its groups could not be written: {full}"
            notice(f"step {step} left the policy as it was: {error}; {kept}")
            if self.skipped_in_a_row >= MOST_SKIPPED:
                raise FloatingPointError(
                    f"{self.skipped_in_a_row} steps in a row without a finite gradient; their groups are in {folder}; "
                    f"a smaller trainer.optimizer.lr (now {self.config.trainer.optimizer.lr:g}) is the usual cure"
                ) from None
            return {"grad/skipped": self.skipped}, str(error)

    def snapshot(self, tell: Callable[[], None] = lambda: None, export: bool = False) -> Snapshot:
        """Return a snapshot of the policy.

        Args:
            tell: in rank 0, has the other ranks begin to gather their snapshots.
            export: whether it is for a file, not for other actors: the two may have different dtypes.
        """
        from asyncspec.models import lora

        parameters, layout = lora.trained(self.model), self.export_layout if export else self.layout
        if self.ranks.sharded:
            return self.ranks.snapshot(layout, parameters, tell)
        return WholeSnapshot(layout, parameters, self.device)

    def save(self, version: int) -> None:
        """Begin to write a checkpoint. Collective.

        Raises:
            OSError: a rank could not begin; all ranks raise it.
        """
        self.checkpoints.save(version, self._state())

    def restore(self, version: int) -> dict:
        """Resume from a checkpoint, perhaps of another number of ranks; return its entries, `more_state` included.

        Raises:
            Damaged: a file of the checkpoint has changed.
        """
        state = self._state()
        path = checkpoint.where(self.run_dir, "trainer", version)
        checkpoint.load(path, state)
        self.accumulator.restore(state["trainer"])
        self.skipped, self.skipped_in_a_row = state["skipped"]
        return state

    def _state(self) -> dict:
        """The entries of a checkpoint. Data order and sample seeds are not needed: they follow from the run's seed."""
        return {
            "trainer": self.accumulator.state(),
            "skipped": [self.skipped, self.skipped_in_a_row],
            **self.more_state(),
        }

    def save_policy(self, take: Callable[[], Snapshot], mtp=None, version: int | None = None) -> Path:
        """Write the policy as a Hugging Face directory; return the directory. For rank 0 only.

        Args:
            take: takes a snapshot for an export in all ranks. What a sharded policy has learned is written from it, as
                its buckets come in. Otherwise the model's own parameters are written.
            version: the version to export, into a directory of its own; None: the result of the run.
        """
        from asyncspec.models import lora
        from asyncspec.rl.exporting import write

        c, parts = self.config, iter([lora.trained(self.model)])
        if self.ranks.sharded:
            gathered = zip(self.export_layout.buckets, take().begin())
            parts = (self.export_layout.views(bucket, names) for (names, _, _), bucket in gathered)
        if version is None:
            directory = self.run_dir / "checkpoint" / "policy"
            write(c, directory, parts, c.checkpoint.export_dtype, mtp)
        else:
            with new_folder(directory := checkpoint.export_of(self.run_dir, version)) as partial:
                write(c, partial, parts, c.checkpoint.export_dtype, mtp)
        return directory
