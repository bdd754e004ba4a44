"""What is to be generated: the lengths of responses and how much of a draft each accepts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

BETAS = 257  # quantiles at which a spread of acceptance rates is evaluated


@dataclass(frozen=True)
class Lengths:
    """Lengths of responses: log-normal, cut off at `limit`.

    mean: of the lengths after the cut.
    sigma: of the logarithm; 0: all are alike.
    """

    mean: float
    sigma: float
    limit: float

    @cached_property
    def median(self) -> float:
        """The median before the cut, such that the mean after it is `mean`."""
        low, high = math.log(max(1.0, self.mean) / 100), math.log(100 * self.limit)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._mean(middle) < self.mean else (low, middle)
        return math.exp(low)

    def _mean(self, log_median: float) -> float:
        """Return the mean of min(length, limit)."""
        if self.sigma == 0:
            return min(math.exp(log_median), self.limit)
        z = (math.log(self.limit) - log_median) / self.sigma
        below = math.exp(log_median + self.sigma**2 / 2) * _normal(z - self.sigma)
        return below + self.limit * (1 - _normal(z))

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Return the lengths of so many responses, float."""
        drawn = self.median * np.exp(self.sigma * rng.standard_normal(count))
        return np.clip(drawn, 1.0, self.limit)


def _normal(z: float) -> float:
    """Return the standard normal distribution function."""
    return 0.5 * (1 + math.erf(z / math.sqrt(2)))


def emitted(accept, k: int):
    """Return the tokens of a verification of k proposals: 1 + p + ... + p**k. `accept` may be an array."""
    return sum(accept**j for j in range(k + 1))


@dataclass(frozen=True)
class Acceptance:
    """Acceptance rates of a proposal, given that those before it were accepted. A sequence has one rate, and rates of
    sequences have a beta distribution.

    mean: of the rates.
    spread: their standard deviation; 0: all are alike.
    """

    mean: float
    spread: float = 0.0

    @classmethod
    def of_length(cls, length: float, k: int, spread: float = 0.0) -> Acceptance:
        """Return rates such that verifications of k proposals emit `length` tokens on average.

        The average is over verifications, as engines report it: all tokens over all verifications.
        """
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if cls(middle, spread).length(k) < length else (low, middle)
        return cls((low + high) / 2, spread)

    def length(self, k: int) -> float:
        """Return the acceptance length of k proposals."""
        return float(1 / np.mean(1 / emitted(self._rates((np.arange(BETAS) + 0.5) / BETAS), k)))

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Return the rates of so many sequences, float."""
        return self._rates(rng.random(count))

    def _rates(self, quantile: np.ndarray) -> np.ndarray:
        room = self.mean * (1 - self.mean)
        if self.spread == 0 or room <= 0:
            return np.full(len(quantile), self.mean)
        from scipy.special import betaincinv

        size = max(0.2, room / self.spread**2 - 1)  # a wider spread than a beta distribution can have is cut
        return betaincinv(self.mean * size, (1 - self.mean) * size, quantile)
