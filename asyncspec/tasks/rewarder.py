"""Compute rewards with the user's functions, which may raise, hang, end their process or return nonsense.

Groups wait for their rewards while the generator goes on. A failed call affects only the rollout it was made for, until
too many fail.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from asyncspec.config import Config
from asyncspec.tasks.json_process import NoAnswer
from asyncspec.tasks.reward_worker import RewardWorker

LEAST_FAILURES = 7  # this many rewards may fail, whatever their share: fewer than a group of the default job
_CROWDED_S = 0.1  # a group that has waited this long for a process has another one started


class RewardError(RuntimeError):
    """Rewards cannot be computed; the message is one line for the user."""


@dataclass
class _Group:
    """A group and the rewards that are found."""

    key: Hashable
    prompt: str
    responses: Sequence[str]
    answer: str
    row: str
    found: dict[int, float | None] = field(default_factory=dict)  # by the response's index


@dataclass
class _Work:
    """Responses of a group that one process rewards, in order."""

    group: _Group
    left: deque[int]
    since: float  # when it began to wait for a process


def filled(rewards: Sequence[float | None]) -> list[float]:
    """Return rewards with the mean of the others in the place of each that failed or does not apply, so that its
    rollout teaches nothing; 0 if there are no others.
    """
    good = [reward for reward in rewards if reward is not None]
    mean = sum(good) / len(good) if good else 0.0
    return [mean if reward is None else reward for reward in rewards]


class _Place:
    """A process of the function, and what it does."""

    def __init__(self, worker: RewardWorker, start_s: float) -> None:
        self.worker = worker
        self.loaded = False
        self.work: _Work | None = None
        self.deadline = time.monotonic() + start_s  # of loading, or of the next reward


class Rewarder:
    """Calls the functions in processes of their own. A process that hangs or ends is replaced.

    One process is started at first, and others while groups wait for one.
    """

    def __init__(
        self,
        name: str,
        timeout_s: float,
        most_failures: float,
        start_s: float,
        workers: int = 1,
        weights: Sequence[float] = (),
        pattern: str = "",
    ) -> None:
        """
        Args:
            name: the functions, as in data.reward. They begin to load at once.
            timeout_s: time limit of one call.
            most_failures: share of rollouts whose reward may fail.
            start_s: time limit of loading the functions.
            workers: the most processes.
            weights: the weight of each function, if the name is several; empty: 1.
            pattern: data.reward_pattern.
        """
        self.name, self.timeout_s, self.most_failures, self.start_s = name, timeout_s, most_failures, start_s
        self.workers, self.weights, self.pattern = workers, weights, pattern
        self.called = self.failed = 0
        self.first_failure = ""  # what went wrong first, in one line
        self._waiting: deque[_Work] = deque()
        self._groups: list[_Group] = []
        self._places = [self._place()]

    @classmethod
    def of(cls, config: Config, most_failures: float | None = None) -> Rewarder:
        """Return the rewarder that a configuration asks for.

        Args:
            most_failures: in the place of data.reward_failures.
        """
        data = config.data
        return cls(
            data.reward,
            data.reward_timeout_s,
            data.reward_failures if most_failures is None else most_failures,
            config.deployment.start_timeout_s,
            data.reward_workers,
            data.weights,
            data.reward_pattern,
        )

    def _place(self) -> _Place:
        return _Place(RewardWorker(self.name, self.weights, self.pattern), self.start_s)

    def load(self) -> None:
        """Wait until the functions are loaded in the first process.

        Raises:
            RewardError: they cannot be loaded.
        """
        place = self._places[0]
        if place.loaded:
            return
        try:
            place.worker.wait_until_loaded(self.start_s)
        except ValueError as error:
            raise RewardError(str(error)) from None
        place.loaded = True

    def close(self) -> None:
        """End the processes."""
        for place in self._places:
            place.worker.close()

    @property
    def waiting(self) -> int:
        """The number of groups whose rewards are not known."""
        return len(self._groups)

    def submit(self, key: Hashable, prompt: str, responses: Sequence[str], answer: str, row: str = "") -> None:
        """Have a group rewarded. `poll` returns it with its key.

        Args:
            row: see `Problem`.
        """
        group = _Group(key, prompt, responses, answer, row)
        self._groups.append(group)
        idle = sum(place.loaded and place.work is None for place in self._places)
        parts = 1 if self._places[0].worker.of_groups else max(1, min(len(responses), idle))
        for part in range(parts):
            self._waiting.append(_Work(group, deque(range(part, len(responses), parts)), time.monotonic()))
        self._assign()

    def poll(self) -> list[tuple[Hashable, list[float]]]:
        """Return the groups whose rewards became known, in the order in which they were submitted, see `filled`. Does
        not wait.

        Raises:
            RewardError: as `found`.
        """
        return [(key, filled(rewards)) for key, rewards in self.found()]

    def found(self) -> list[tuple[Hashable, list[float | None]]]:
        """Return what `poll` does, with None for each reward that failed or does not apply.

        Raises:
            RewardError: more than the allowed share of rewards failed, or the functions cannot be loaded again.
        """
        for index, place in enumerate(self._places):
            if not self._collect(place):
                place.worker.kill()
                self._places[index] = self._place()
        self._assign()
        done = [group for group in self._groups if len(group.found) == len(group.responses)]
        self._groups = [group for group in self._groups if len(group.found) < len(group.responses)]
        return [(group.key, [group.found[i] for i in range(len(group.responses))]) for group in done]

    def _assign(self) -> None:
        """Give waiting work to processes that have none; start another process if work has waited for long."""
        for place in self._places:
            if self._waiting and place.loaded and place.work is None:
                work = place.work = self._waiting.popleft()
                group = work.group
                place.worker.ask(group.prompt, [group.responses[i] for i in work.left], group.answer, group.row)
                place.deadline = time.monotonic() + self.timeout_s
        if self._waiting and len(self._places) < self.workers and all(place.loaded for place in self._places):
            if time.monotonic() - self._waiting[0].since > _CROWDED_S:
                self._places.append(self._place())

    def _collect(self, place: _Place) -> bool:
        """Take what a process has found. Return False if it must be replaced."""
        left_s = place.deadline - time.monotonic()
        if not place.loaded:
            try:
                place.loaded = place.worker.loaded(left_s, self.start_s)
            except ValueError as error:
                raise RewardError(str(error)) from None
            return True
        while True:
            work = place.work
            try:
                found = place.worker.answer()
                if work is None:
                    return True
                if found is None and left_s <= 0:
                    raise NoAnswer(f"took more than {self.timeout_s:g} s")
            except NoAnswer as none:
                if work is None:  # it ended while it had nothing to do
                    return False
                # Of a function of whole groups, this was one call for all of them.
                for _ in range(len(work.left) if place.worker.of_groups else 1):
                    self._note(work, None, str(none))
                if work.left:
                    self._waiting.appendleft(work)
                return False
            if found is None:
                return True
            self._note(work, *found)
            place.deadline = time.monotonic() + self.timeout_s
            left_s = self.timeout_s
            if not work.left:
                place.work = None

    def _note(self, work: _Work, number: float | None, trouble: str) -> None:
        """Note the next reward of a piece of work, or what went wrong with it."""
        self.called += 1
        index = work.left.popleft()
        if number is not None and not math.isfinite(number):
            number, trouble = None, f"returned {number}"
        work.group.found[index] = number
        if number is None and trouble:
            self._failed(trouble, work.group.responses[index])

    def _failed(self, trouble: str, response: str) -> None:
        self.failed += 1
        self.first_failure = self.first_failure or f"{trouble}, response {response[:40]!r}"
        if self.failed > max(LEAST_FAILURES, self.most_failures * self.called):
            raise RewardError(
                f"data.reward={self.name}: failed for {self.failed} of {self.called} rollouts, more than "
                f"data.reward_failures={self.most_failures:g} allows; the last {trouble}, response {response[:40]!r}; "
                "expected a finite number"
            )
