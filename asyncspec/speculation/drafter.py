"""What every drafter is: something that proposes tokens for the live sequences, however it comes to them.

The engine tells a drafter what happens (sequences enter, the target has read positions, sequences move and leave) and,
when it decides to speculate, asks for proposals. A drafter reads what it needs lazily, when asked: while the engine
does not speculate a drafter costs nothing but the copy of the features it may need later.

Shape suffixes: S slots, P positions, B live rows, L positions of a pass, K draft length, V vocabulary, E features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch


class Packed(NamedTuple):
    """Some of B * L tokens, T of them: a pass computes them alone, in a workspace of (T, 1), and lays them out for
    attention.
    """

    at_T: np.ndarray  # int64, where each is among B * L
    of_N: np.ndarray  # int64 [B * L], which of them each is; one that is left out is another of its row


class Slots:
    """The tokens of all slots. In a step live sequences occupy rows 0..live-1."""

    def __init__(self, slots: int, positions: int, device) -> None:
        self.positions, self.device = positions, torch.device(device)
        self.token_SP = torch.zeros(slots, positions, dtype=torch.int64, device=device)
        self.length_S = torch.zeros(slots, dtype=torch.int64, device=device)
        self.prompt_S = torch.zeros(slots, dtype=torch.int64, device=device)
        self.index_P = torch.arange(positions, device=device)
        # the engine attends to rows in groups: the row after each one's last; those to come are one group
        self.ends: list[int] = []
        # On a CPU the same memory; on a GPU a copy, refreshed once a step.
        self.length = self.length_S.numpy() if self.device.type == "cpu" else np.zeros(slots, dtype=np.int64)

    def spans(self, first_row: int, count: int, more: int = 0) -> list[tuple[int, int]]:
        """Groups of these rows, each with the length of its longest, plus `more`; see `engine.kv_cache.KVCache.at`."""
        length, ends = (
            self.length[first_row : first_row + count],
            [count] if first_row else [end for end in self.ends if end < count] + [count],
        )
        return [(end, int(length[start:end].max()) + more) for start, end in zip([0, *ends], ends)]

    def attended(self, count: int) -> float:
        """How many positions a token of rows 0..count-1 attends to, on average over rows: as many as the longest of its
        row's group has.
        """
        spans = self.spans(0, count)
        return (
            sum((end - start) * longest for (end, longest), start in zip(spans, [0, *(end for end, _ in spans)]))
            / count
        )

    def refresh(self, count: int) -> None:
        """Bring the host's copy of the lengths up to date."""
        if self.device.type != "cpu":
            self.length[:count] = self.length_S[:count].cpu().numpy()


class Proposal(NamedTuple):
    """What a drafter proposes for each row.

    draft_BK: int64 tokens.
    q_BKV: the distributions they were drawn from; None: each is certain (a point mass).
    count_B: int64, how many of a row's K count, if not all; a function of the tokens before them only.
    """

    draft_BK: torch.Tensor
    q_BKV: torch.Tensor | None
    count_B: torch.Tensor | None = None

    def first(self, count: int) -> Proposal:
        """So many of each row."""
        return Proposal(self.draft_BK[:, :count], None if self.q_BKV is None else self.q_BKV[:, :count], self.count_B)


class Drafter(ABC):
    """Proposes tokens. What a drafter has no use for does nothing."""

    aux_layers: tuple[int, ...] = ()  # whose inputs `observe` wants; () for none
    looks_up = False  # may find fewer proposals than asked for, or none
    # Of a lookup: called with what it would have proposed in finished rollouts, see `LookupLength.learn`.
    learn: Callable[[np.ndarray, np.ndarray], None] | None = None

    @abstractmethod
    def propose(self, count: int, draft_length: int, uniform_BK: torch.Tensor) -> Proposal:
        """Propose for rows 0..count-1; `uniform_BK` are uniform numbers in [0, 1), one a proposal."""

    def reload(self) -> None:
        """Weights have changed, the draft's or the target's."""

    def enter(self, first_row: int, count: int) -> None:
        """Rows first_row.. hold new prompts, or sequences whose features were not kept: it has observed nothing of
        them.
        """

    def observe(
        self,
        first_row: int,
        features_BLD: Sequence[torch.Tensor],
        position_BL: torch.Tensor,
        packed: Packed | None = None,
    ) -> None:
        """The target has read these positions, or those of them that are packed, and the tokens it emitted are
        appended. Features: the inputs of each of `aux_layers`, [B, L, D], or [T, 1, D] of what is packed.
        """

    def prefill(self, first_row: int, count: int) -> None:
        """Read these prompts now, in one pass, for all their samples; otherwise that happens at the next proposal."""

    def behind(self, count: int) -> int:
        """Positions that the next proposal will have to read, of the row that is furthest behind."""
        return 1

    def catch_up(self) -> None:
        """Do what was put off while nothing was proposed; otherwise that happens at the next proposal."""

    def copy(self, sources: Sequence[int], rows: Sequence[int]) -> None:
        """Make each of these rows a copy of its source, tokens and all: a sample of a prompt, or a row that moves."""

    def leave(self, row: int) -> None:
        """The sequence of this row is finished; its tokens are still there."""

    def seeds(self, seeds: Sequence[int]) -> Sequence[int]:
        """Seeds for sequences that enter. A drafter that proposes what other sequences sampled changes them: verifying
        such a token takes random numbers that it was not sampled with.
        """
        return seeds

    def launch_by(self, graphs: Callable[..., Sequence[torch.Tensor]] | None) -> None:
        """Launch passes by these (`engine.graphs.Graphs`) from now on; None: kernel by kernel."""


class NoDrafter(Drafter):
    """For an engine that does not speculate."""

    def propose(self, count: int, draft_length: int, uniform_BK: torch.Tensor) -> Proposal:
        raise ValueError(f"draft_length={draft_length}: expected 0 without a drafter")
