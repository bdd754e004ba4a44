"""Compute rewards with the user's function, which may raise, hang, end its process or return nonsense.

A failed call affects only the rollout it was made for, until too many fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from asyncspec.tasks.reward_worker import NoAnswer, RewardWorker

LEAST_FAILURES = 8  # this many rewards may fail, whatever their share


class RewardError(RuntimeError):
    """Rewards cannot be computed; the message is one line for the user."""


class Rewarder:
    """Calls the function in a process of its own, which is replaced after a call that hangs or ends it."""

    def __init__(
        self,
        name: str,
        timeout_s: float,
        most_failures: float,
        start_s: float,
        between: Callable[[], None] = lambda: None,
        weights: Sequence[float] = (),
    ) -> None:
        """
        Args:
            name: the function's name in the configuration, module:function. It begins to load at once.
            timeout_s: time limit of one call.
            most_failures: share of rollouts whose reward may fail.
            start_s: time limit of loading the function.
            between: called before each reward of a group and often while one is computed, which may take timeout_s.
            weights: the weight of each function, if the name is several; empty: 1.
        """
        self.name, self.timeout_s, self.most_failures, self.start_s = name, timeout_s, most_failures, start_s
        self.between, self.weights = between, weights
        self.called = self.failed = 0
        self.first_failure = ""  # what went wrong first, in one line
        self._worker, self._loaded = RewardWorker(name, weights), False

    def load(self, between: Callable[[], None] = lambda: None) -> None:
        """Wait until the function is loaded.

        Args:
            between: called often meanwhile.

        Raises:
            RewardError: it cannot be loaded.
        """
        if not self._loaded:
            try:
                self._worker.wait_until_loaded(self.start_s, between)
            except ValueError as error:
                raise RewardError(str(error)) from None
            self._loaded = True

    def close(self) -> None:
        """End the process."""
        self._worker.close()

    def group(self, prompt: str, responses: Sequence[str], answer: str, row: str = "") -> list[float]:
        """Return the rewards of a group.

        A rollout whose reward fails or does not apply gets the mean of the others, so that it teaches nothing; 0 if
        there are no others.

        Args:
            row: see `Problem`.

        Raises:
            RewardError: more than the allowed share of rewards failed, or the function cannot be loaded again.
        """
        found: list[float | None] = []
        while len(found) < len(responses):
            self.load(self.between)
            self._worker.ask(prompt, responses[len(found) :], answer, row)
            self._collect(found, responses)
        good = [value for value in found if value is not None]
        mean = sum(good) / len(good) if good else 0.0
        return [mean if value is None else value for value in found]

    def _collect(self, found: list[float | None], responses: Sequence[str]) -> None:
        """Append the rewards of the responses that have none, up to one that ends the process or hangs."""
        while len(found) < len(responses):
            self.called += 1
            self.between()
            try:
                number, trouble = self._worker.answer(self.timeout_s, self.between)
            except NoAnswer as none:
                number, trouble = None, str(none)
                while self._worker.of_groups and len(found) < len(responses) - 1:  # it was one call for all of them
                    self._failed(trouble, responses[len(found)])
                    self.called += 1
                    found.append(None)
                self._worker.kill()
                self._worker, self._loaded = RewardWorker(self.name, self.weights), False
            if number is not None and not math.isfinite(number):
                number, trouble = None, f"returned {number}"
            if number is None and trouble:
                self._failed(trouble, responses[len(found)])
            found.append(number)
            if not self._loaded:
                return

    def _failed(self, trouble: str, response: str) -> None:
        self.failed += 1
        self.first_failure = self.first_failure or f"{trouble}, response {response[:40]!r}"
        if self.failed > max(LEAST_FAILURES, self.most_failures * self.called):
            raise RewardError(
                f"data.reward={self.name}: failed for {self.failed} of {self.called} rollouts, more than "
                f"data.reward_failures={self.most_failures:g} allows; the last {trouble}, response {response[:40]!r}; "
                "expected a finite number"
            )
