"""Rounds of a replica, and the time in which replicas finish a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from asyncspec.simulate.devices import Drafting, Forward
from asyncspec.simulate.replica import Replica, RoundCosts

SIZES = 24  # numbers of live sequences at which a round is priced; others are interpolated
SAMPLER_READS = 8  # times that the sampler reads or writes the float32 logits of a round


class Overheads(NamedTuple):
    """The seconds of a round that no operator table has: host, sampler and whatever is between kernels.

    round_s: of each round.
    verify_s: more, of a round that verifies proposals.
    draft_s: more, for each token of the draft length.
    row_s: more, for each sequence of a round whose proposals are looked up.
    """

    round_s: float = 0.0
    verify_s: float = 0.0
    draft_s: float = 0.0
    row_s: float = 0.0

    def seconds(self, live: float, k: int, looks_up: bool) -> float:
        of_rows = self.row_s * live if looks_up and k else 0.0
        return self.round_s + (self.verify_s if k else 0.0) + self.draft_s * k + of_rows


@dataclass
class Rounds:
    """The cost of a replica's rounds."""

    target: Forward
    drafting: Drafting
    overheads: Overheads = Overheads()

    def seconds(self, live: float, k: int, context: float) -> float:
        """Return the seconds of a round that verifies k proposals of each of `live` sequences."""
        gpu, model = self.target.gpu, self.target.model
        logits = 4 * live * (k + 1) * model["vocab_size"] * SAMPLER_READS / (gpu.memory_bytes_s * self.target.degree)
        looks_up = self.drafting.method in ("ngram", "suffix")
        return (
            self.target.seconds(live, context, k + 1)
            + self.drafting.seconds(live, context, k)
            + logits
            + self.overheads.seconds(live, k, looks_up)
        )

    def costs(self, slots: int, lengths: int | Callable[[int], int], near: float, far: float) -> RoundCosts:
        """Return the costs by the number of live sequences.

        Args:
            lengths: the draft length, or a function from the number of live sequences to it.
            near, far: positions between which a round's time is taken as a straight line.
        """
        length_of = lengths if callable(lengths) else lambda live: lengths
        length_N = np.array([length_of(max(1, live)) for live in range(slots + 1)])
        base_N, slope_N = np.zeros(slots + 1), np.zeros(slots + 1)
        at = np.unique(np.geomspace(1, slots, SIZES).round().astype(int))
        for k in np.unique(length_N[1:]):
            near_s, far_s = (np.array([self.seconds(n, int(k), context) for n in at]) for context in (near, far))
            slope = (far_s - near_s) / (far - near)
            those = length_N == k
            base_N[those] = np.interp(np.arange(slots + 1), at, near_s - slope * near)[those]
            slope_N[those] = np.interp(np.arange(slots + 1), at, slope)[those]
        return RoundCosts(base_N, slope_N, length_N, np.ones(slots + 1))


def finish_s(costs: RoundCosts, tokens: np.ndarray, accept: np.ndarray, prompt: float, replicas: int) -> float:
    """Return the seconds until the last response is done, if all are dealt to replicas in turn.

    Args:
        costs: with as many slots as a replica decodes at once.
        tokens, accept: float, the length and the acceptance rate of each response.
    """
    slots, slowest = len(costs.base_N) - 1, 0.0
    for first in range(replicas):
        replica, took = Replica(slots, costs), 0.0
        if len(own := tokens[first::replicas]):
            replica.submit(0, own, accept[first::replicas], prompt)
            took = replica.next_end()
        slowest = max(slowest, took)
    return slowest


def played(costs: RoundCosts, tokens: Sequence[float], accept: float, prompt: float) -> float:
    """Return the seconds until the last response of a replica is done, playing each round. For comparison."""
    left, done, slots = [float(n) for n in tokens], 0.0, len(costs.base_N) - 1
    live, waiting = [[n, prompt] for n in left[:slots]], left[slots:]
    while live:
        n = len(live)
        rate = sum(accept**j for j in range(int(costs.length_N[n]) + 1))
        done += costs.base_N[n] + costs.slope_N[n] * sum(context for _, context in live) / n
        live = [[todo - rate, context + rate] for todo, context in live]
        ended = sum(todo <= 1e-9 for todo, _ in live)
        live = [each for each in live if each[0] > 1e-9]
        live += [[n, prompt] for n in waiting[:ended]]
        waiting = waiting[ended:]
    return done
