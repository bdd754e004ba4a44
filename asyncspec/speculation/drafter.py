"""The drafter interface: a drafter proposes tokens for the live sequences.

The engine notifies the drafter of events: sequences enter, move and leave, and the target has processed positions. When
the engine decides to speculate, it asks for proposals. A drafter works lazily: while the engine does not speculate, a
drafter costs only the copying of features that it may need later.

Shape suffixes: S slots, P positions, B live rows, L positions of a pass, K draft length, V vocabulary, E features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch


class Packed(NamedTuple):
    """The T tokens of a [B, L] rectangle that a pass computes. The others are left out.

    The pass computes them in a workspace of (T, 1) and lays them out as [B, L] for attention.
    """

    at_T: np.ndarray  # int64, the index of each computed token among the B * L
    of_N: np.ndarray  # int64 [B * L], which of the T tokens stands here; a token left out points to another of its row


class Slots:
    """The tokens of all slots. In a step, live sequences occupy rows 0..live-1."""

    def __init__(self, slots: int, positions: int, device) -> None:
        self.positions, self.device = positions, torch.device(device)
        self.token_SP = torch.zeros(slots, positions, dtype=torch.int64, device=device)
        self.length_S = torch.zeros(slots, dtype=torch.int64, device=device)
        self.prompt_S = torch.zeros(slots, dtype=torch.int64, device=device)
        self.index_P = torch.arange(positions, device=device)
        # The engine attends to rows in groups. `ends` holds the row after each group's last; rows beyond the last end
        # form one more group.
        self.ends: list[int] = []
        # Lengths on the host. On a CPU they share the tensor's memory; on a GPU they are a copy, refreshed every step.
        self.length = self.length_S.numpy() if self.device.type == "cpu" else np.zeros(slots, dtype=np.int64)

    def spans(self, first_row: int, count: int, more: int = 0) -> list[tuple[int, int]]:
        """Return the groups of these rows as pairs: the row after the group's last, and its longest length plus `more`.

        See `engine.kv_cache.KVCache.at`.
        """
        length, ends = (
            self.length[first_row : first_row + count],
            [count] if first_row else [end for end in self.ends if end < count] + [count],
        )
        return [(end, int(length[start:end].max()) + more) for start, end in zip([0, *ends], ends)]

    def attended(self, count: int) -> float:
        """Return how many positions a token of rows 0..count-1 attends to, on average over rows.

        A row attends to as many positions as the longest row of its group has.
        """
        spans = self.spans(0, count)
        return (
            sum((end - start) * longest for (end, longest), start in zip(spans, [0, *(end for end, _ in spans)]))
            / count
        )

    def refresh(self, count: int) -> None:
        """Update the host's copy of the lengths."""
        if self.device.type != "cpu":
            self.length[:count] = self.length_S[:count].cpu().numpy()


class Proposal(NamedTuple):
    """A drafter's proposals for each row.

    draft_BK: int64, the proposed tokens.
    q_BKV: the distributions they were drawn from; None: each is certain (a point mass).
    count_B: int64, how many of a row's K proposals count; None: all. It may depend only on the tokens before the
        proposals.
    """

    draft_BK: torch.Tensor
    q_BKV: torch.Tensor | None
    count_B: torch.Tensor | None = None

    def first(self, count: int) -> Proposal:
        """Return the first `count` proposals of each row."""
        return Proposal(self.draft_BK[:, :count], None if self.q_BKV is None else self.q_BKV[:, :count], self.count_B)


class Drafter(ABC):
    """Proposes tokens. The default methods do nothing; a drafter overrides those that it needs."""

    aux_layers: tuple[int, ...] = ()  # the target's layers whose inputs `observe` needs; () for none
    looks_up = False  # whether it may find fewer proposals than requested, or none
    # A lookup calls this with what it would have proposed in finished rollouts; see `LookupLength.learn`.
    learn: Callable[[np.ndarray, np.ndarray], None] | None = None

    @abstractmethod
    def propose(self, count: int, draft_length: int, uniform_BK: torch.Tensor) -> Proposal:
        """Propose `draft_length` tokens for each of rows 0..count-1.

        Args:
            uniform_BK: uniform numbers in [0, 1), one for each proposal.
        """

    def reload(self) -> None:
        """Adopt changed weights, the draft's or the target's."""

    def enter(self, first_row: int, count: int) -> None:
        """Forget what was observed of `count` rows from `first_row`.

        They now hold new prompts, or sequences whose features were not kept.
        """

    def observe(
        self,
        first_row: int,
        features_BLD: Sequence[torch.Tensor],
        position_BL: torch.Tensor,
        packed: Packed | None = None,
    ) -> None:
        """Take the features of positions that the target has just processed; the tokens it emitted are appended.

        Args:
            features_BLD: the inputs of each of `aux_layers`, [B, L, D]; with `packed`, [T, 1, D].
            position_BL: int64, the positions processed in each row.
            packed: which of the B * L positions were processed; None: all.
        """

    def prefill(self, first_row: int, count: int) -> None:
        """Prefill these prompts now, in one pass, for all their samples. Otherwise the next proposal does it."""

    def behind(self, count: int) -> int:
        """Return how many positions the next proposal must process first, for the row that is furthest behind."""
        return 1

    def catch_up(self) -> None:
        """Do the work that was put off while nothing was proposed. Otherwise the next proposal does it."""

    def copy(self, sources: Sequence[int], rows: Sequence[int]) -> None:
        """Make each of these rows a copy of its source: a new sample of a prompt, or a row that moves."""

    def extended(self, row: int, start: int) -> None:
        """Note that tokens from position `start` on were appended to a sequence that goes on: it is in this row now,
        with one token more, the first of its new response.
        """

    def leave(self, row: int) -> None:
        """Note that the sequence of this row has finished. Its tokens are still in the row."""

    def seeds(self, seeds: Sequence[int]) -> Sequence[int]:
        """Return the seeds to use for sequences that enter.

        A drafter that proposes what other sequences sampled must change them: a proposed token must be verified with
        other random numbers than those that it was sampled with.
        """
        return seeds

    def launch_by(self, graphs: Callable[..., Sequence[torch.Tensor]] | None) -> None:
        """Launch passes through these graphs (`engine.graphs.Graphs`) from now on; None: kernel by kernel."""


class NoDrafter(Drafter):
    """The drafter of an engine that does not speculate."""

    def propose(self, count: int, draft_length: int, uniform_BK: torch.Tensor) -> Proposal:
        raise ValueError(f"draft_length={draft_length}: expected 0 without a drafter")
