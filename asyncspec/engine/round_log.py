"""Adds up what an engine's rounds cost, by the number of live sequences and the draft length."""

from __future__ import annotations

from asyncspec.wire.facts import ENTERING, Rounds


class RoundLog:
    def __init__(self) -> None:
        self._sums: dict[tuple[int, int, bool], list[float]] = {}  # by live, draft length, whether tokens were gained

    def add(self, live: int, draft_length: int, seconds: float, tokens: float, positions: float) -> None:
        """Add a round; the arguments are as in `Rounds`."""
        sums = self._sums.setdefault((live, draft_length, tokens > 0), [0, 0.0, 0.0, 0.0])
        for place, value in enumerate((1, seconds, tokens, positions)):
            sums[place] += value

    def entered(self, sequences: int, seconds: float) -> None:
        """Add sequences that got slots, and the seconds that this took, with the prompts that were read for them."""
        sums = self._sums.setdefault((1, ENTERING, False), [0, 0.0, 0.0, 0.0])
        sums[0] += sequences
        sums[1] += seconds

    def drain(self) -> list[Rounds]:
        """Return the sums and forget them."""
        found = [Rounds(live, k, int(n), *more) for (live, k, _), (n, *more) in sorted(self._sums.items())]
        self._sums.clear()
        return found
