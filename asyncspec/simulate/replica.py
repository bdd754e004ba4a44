"""One engine that decodes many responses at once, round by round, without playing each round.

Between two ends of responses the batch does not change, so all rounds in between are taken in one stage: every live
response grows at its own rate, and a round costs what the table says for the batch's size and mean context. This is
exact where costs are linear in the context and lengths are real numbers (tests/test_simulate.py compares it with a
simulation of each round).

Time here is work: the seconds that the engine would need alone. Whoever shares its cores stretches them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numba
import numpy as np

_LIVE, _HEAD, _TAIL, _VERSION = range(4)  # of _Replica state: live responses; the ends of the queue; weight version
_NONE = -1


class RoundCosts(NamedTuple):
    """The seconds of a round, by the number of live responses: base + slope * mean context.

    base_N, slope_N: float [slots + 1]; entry 0 is not used.
    length_N: int [slots + 1], the draft length of a round.
    scale_N: float [slots + 1], the tokens of a round over those that follow from a response's acceptance rate. Where
        rates are 0 it is the tokens of a round.
    """

    base_N: np.ndarray
    slope_N: np.ndarray
    length_N: np.ndarray
    scale_N: np.ndarray


@numba.njit(cache=True)
def _rate(accept: float, length: int) -> float:
    """Return the tokens that a response gains in a round on average: 1 + p + ... + p**length."""
    tokens, chance = 1.0, 1.0
    for _ in range(length):
        chance *= accept
        tokens += chance
    return tokens


@numba.njit(cache=True)
def _run(work, to_group, state, left, accept, context, group, queue, owed, oldest, base_N, slope_N, length_N, scale_N):
    """Let time pass: until `work` seconds are over, or until a group is done. Return (seconds passed, group or -1).

    Args:
        to_group: whether to stop at the end of a group.
        state: int [4], changed in place, as are the following.
        left, accept, context: float [slots], of live responses: tokens to come, acceptance rate, positions so far.
        group: int [slots], the group of each.
        queue: float [4, capacity]: tokens, acceptance rate, prompt and group of responses that wait.
        owed, oldest: int [groups], by group: responses to come, and the oldest version of its tokens.
    """
    slots, passed = len(left), 0.0
    while True:
        while state[_LIVE] < slots and state[_HEAD] < state[_TAIL]:
            at, new = state[_HEAD], state[_LIVE]
            left[new], accept[new], context[new] = queue[0, at], queue[1, at], queue[2, at]
            group[new] = int(queue[3, at])
            oldest[group[new]] = min(oldest[group[new]], state[_VERSION])
            state[_HEAD] += 1
            state[_LIVE] += 1
        live = state[_LIVE]
        if live == 0:
            return passed, _NONE
        length, scale = length_N[live], scale_N[live]
        rounds, first, held, grows = np.inf, 0, 0.0, 0.0
        for i in range(live):
            rate = scale * _rate(accept[i], length)
            needs = left[i] / rate
            if needs < rounds:
                rounds, first = needs, i
            held += context[i]
            grows += rate
        of_round = base_N[live] + slope_N[live] * (held + 0.5 * rounds * grows) / live
        ends = passed + rounds * of_round <= work
        if not ends:
            rounds = (work - passed) / of_round
        for i in range(live):
            gained = rounds * scale * _rate(accept[i], length)
            left[i] -= gained
            context[i] += gained
        done = group[first]
        if not ends or (owed[done] == 1 and not to_group):  # by rounding, a group may seem to end just before its event
            return work, _NONE
        passed += rounds * of_round
        last = live - 1
        left[first], accept[first], context[first] = left[last], accept[last], context[last]
        group[first] = group[last]
        state[_LIVE] = last
        owed[done] -= 1
        if owed[done] == 0 and to_group:
            return passed, done


class Replica:
    """An engine. `next_end` looks ahead, `advance` lets time pass."""

    def __init__(self, slots: int, costs: RoundCosts, groups: int = 64) -> None:
        """
        Args:
            groups: how many groups it may hold at once; more are made room for.
        """
        self.costs = costs
        self._now = self._made(slots, groups)
        self._then = self._made(slots, groups)  # at the end of the next group
        self._queue = np.zeros((4, 256))
        self._names: list[int] = [_NONE] * groups  # of the groups that it holds, by index
        self._free = list(range(groups))[::-1]

    @staticmethod
    def _made(slots: int, groups: int) -> tuple[np.ndarray, ...]:
        return (
            np.zeros(4, np.int64),
            *(np.zeros(slots) for _ in range(3)),
            np.zeros(slots, np.int64),
            np.zeros(groups, np.int64),
            np.zeros(groups, np.int64),
        )

    @property
    def busy(self) -> bool:
        return bool(self._now[0][_LIVE] or self._now[0][_HEAD] < self._now[0][_TAIL])

    @property
    def version(self) -> int:
        return int(self._now[0][_VERSION])

    @version.setter
    def version(self, version: int) -> None:
        self._now[0][_VERSION] = version

    def submit(self, name: int, tokens: Sequence[float], accept: Sequence[float], prompt: float) -> None:
        """Take the responses of a group into the queue."""
        state, count = self._now[0], len(tokens)
        if not self._free:
            self._more_groups()
        index = self._free.pop()
        self._names[index] = name
        self._now[5][index], self._now[6][index] = count, np.iinfo(np.int64).max
        head, tail = state[_HEAD], state[_TAIL]
        if tail + count > self._queue.shape[1]:
            waiting = self._queue[:, head:tail]
            room = max(256, 2 * (waiting.shape[1] + count))
            self._queue, kept = np.zeros((4, room)), waiting
            self._queue[:, : kept.shape[1]] = kept
            state[_HEAD], tail = 0, kept.shape[1]
        self._queue[0, tail : tail + count] = tokens
        self._queue[1, tail : tail + count] = accept
        self._queue[2, tail : tail + count] = prompt
        self._queue[3, tail : tail + count] = index
        state[_TAIL] = tail + count

    def _more_groups(self) -> None:
        held = len(self._names)
        self._names += [_NONE] * held
        self._free = list(range(held, 2 * held))[::-1]
        for states in ("_now", "_then"):
            *kept, owed, oldest = getattr(self, states)
            setattr(
                self, states, (*kept, np.append(owed, np.zeros_like(owed)), np.append(oldest, np.zeros_like(oldest)))
            )

    def next_end(self) -> float:
        """Return the seconds of work until a group is done; infinity if there is none."""
        for now, then in zip(self._now, self._then):
            then[:] = now
        passed, index = self._passed(self._then, np.inf, True)
        self._next = index
        return passed if index != _NONE else np.inf

    def end(self) -> tuple[int, int]:
        """Let time pass to what `next_end` said. Return the group that is done, and its oldest version."""
        self._now, self._then = self._then, self._now
        return self._ended(self._next)

    def _ended(self, index: int) -> tuple[int, int]:
        name, self._names[index] = self._names[index], _NONE
        self._free.append(index)
        return name, int(self._now[6][index])

    def advance(self, work: float) -> None:
        """Let seconds of work pass, fewer than until the next group is done."""
        self._passed(self._now, work, False)

    def _passed(self, states: tuple[np.ndarray, ...], work: float, to_group: bool) -> tuple[float, int]:
        state, left, accept, context, group, owed, oldest = states
        return _run(work, to_group, state, left, accept, context, group, self._queue, owed, oldest, *self.costs)
