"""Decides when to try a draft length other than the best, and which one."""

from __future__ import annotations

from collections.abc import Sequence

SHARE = 0.004  # share of the time that tries may lose; without tries the worst cell loses 2 %
# Until there have been this many holds, the share is larger, inversely to their number. Without that a wrong
# calibration costs 0.5 % more.
EARLY_HOLDS = 16
# The first try, and every eighth, is of k = 0, so that speculation is never slower than none for long. Where all
# lengths are equally far too slow, comparisons with neighbors would not show it. Without this the worst cell loses 3 %.
NONE_TURNS = 8


class Explorer:
    """Keeps a debt in seconds. A try adds the time it is expected to lose. Every step pays back a share of its time.

    A try may begin while nothing is owed. So a draft that has become good is discovered, and a useless one costs next
    to nothing.
    """

    def __init__(self) -> None:
        self.owed_s = 0.0
        self._turn = 0

    def paid(self, seconds: float, holds: int) -> None:
        """Pay back a share of these seconds. holds: past holds with about this many live sequences."""
        share = SHARE * max(1.0, EARLY_HOLDS / (1 + holds))
        self.owed_s = max(0.0, self.owed_s - share * seconds)

    def other(self, lengths: Sequence[int], best: int) -> int:
        """Return the length to try. These take turns: the next longer than the best, the next shorter, and the second
        longer, which jumps over one that does not pay.
        """
        at, turn = lengths.index(best), self._turn
        self._turn += 1
        if best and turn % NONE_TURNS == 0:
            return 0
        near = [lengths[i] for i in (at + 1, at - 1, at + 2) if 0 <= i < len(lengths)]
        return near[turn % len(near)]

    def charge(self, seconds: float, loss: float) -> None:
        """Add the expected loss of a try to the debt: this share (`loss`) of its seconds."""
        self.owed_s += seconds * loss
