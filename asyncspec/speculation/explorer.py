"""When to try another draft length than the best, and which."""

from __future__ import annotations

from collections.abc import Sequence

SHARE = 0.004  # of the time may be lost to tries; without tries the worst cell loses two hundredths
# Until so many choices have held, the share is greater: as many times as they are fewer. Without it
# a wrong calibration costs half a hundredth more.
EARLY_HOLDS = 16
# One try in so many, and the first, is of no speculation, which is never to be lost to: where lengths are far too slow
# all alike, it would not be found, and the worst cell loses three hundredths.
NONE_TURNS = 8


class Explorer:
    """A debt of seconds: a try adds what it is expected to lose, every step pays off a share of its time.

    A try may begin while nothing is owed. So a draft that has become good is found out, and a useless one costs next
    to nothing.
    """

    def __init__(self) -> None:
        self.owed_s = 0.0
        self._turn = 0

    def paid(self, seconds: float, holds: int) -> None:
        """Pay off a share of this time. holds: choices that have held with about as many sequences live."""
        share = SHARE * max(1.0, EARLY_HOLDS / (1 + holds))
        self.owed_s = max(0.0, self.owed_s - share * seconds)

    def other(self, lengths: Sequence[int], best: int) -> int:
        """The length to try, in turn: one longer than the best, one shorter, and a jump over one that does not pay."""
        at, turn = lengths.index(best), self._turn
        self._turn += 1
        if best and turn % NONE_TURNS == 0:
            return 0
        near = [lengths[i] for i in (at + 1, at - 1, at + 2) if 0 <= i < len(lengths)]
        return near[turn % len(near)]

    def charge(self, seconds: float, loss: float) -> None:
        """Owe for a try of so many seconds that is expected to lose this share of them."""
        self.owed_s += seconds * loss
