"""When to try another draft length than the best, and which.

Shape suffixes: K draft length.
"""

from __future__ import annotations

import numpy as np

SHARE = 0.004  # of the time may be lost to tries
EARLY_HOLDS = 16  # until so many choices have held, the share is greater: as many times as they are fewer
DOUBT = 0.07  # share by which a length may be better than expected, for each deviation of its time
LEAST_LOSS = 0.05  # of its time is what a try loses at least: the text falls out of step with the length that is held
NONE_TURNS = 8  # one try in so many, and the first, is of no speculation, which is never to be lost to


class Explorer:
    """A debt of seconds: a try adds what it is expected to lose, every step pays off a share of its time.

    A try may begin while nothing is owed. So a draft that has become good is found out, and a useless one costs next
    to nothing.
    """

    def __init__(self) -> None:
        self.owed_s = 0.0
        self._turn = self._last = 0

    def paid(self, seconds: float, holds: int) -> None:
        """Pay off a share of this time. holds: choices that have held with about as many sequences live."""
        share = SHARE * max(1.0, EARLY_HOLDS / (1 + holds))
        self.owed_s = max(0.0, self.owed_s - share * seconds)

    def other(self, rate_K: np.ndarray, deviation_K: np.ndarray, best: int) -> int:
        """The length to try: of those not tried last, the one that may be best for all that is known."""
        none = best and self._turn % NONE_TURNS == 0
        self._turn += 1
        if none:
            return 0
        hoped_K = rate_K * (1 + DOUBT * deviation_K)
        hoped_K[[best, self._last]] = 0.0
        self._last = int(hoped_K.argmax())
        return self._last

    def charge(self, seconds: float, loss: float) -> None:
        """Owe for a try of so many seconds that is expected to lose this share of them."""
        self.owed_s += seconds * max(LEAST_LOSS, loss)
