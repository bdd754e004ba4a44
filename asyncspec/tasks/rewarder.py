"""Compute rewards with the user's function, which may raise, hang or return nonsense.

A failed call affects only the rollout it was made for, until too many fail.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable

from asyncspec.tasks.reward import Reward

LEAST_FAILURES = 8  # this many rewards may fail, whatever their share


class RewardError(RuntimeError):
    """Too many rewards failed; the message is one line for the user."""


class _Caller:
    """A thread that calls the reward function. A thread that hangs is abandoned, and a new one takes its place."""

    def __init__(self, reward: Reward) -> None:
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        self._results: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._run, args=(reward,), name="reward", daemon=True).start()

    def __call__(self, arguments: tuple, timeout_s: float):
        self._calls.put(arguments)
        return self._results.get(timeout=timeout_s)

    def _run(self, reward: Reward) -> None:
        while True:
            arguments = self._calls.get()
            try:
                value = reward(*arguments)
                try:
                    self._results.put((float(value), None))
                except Exception:
                    self._results.put((None, f"returned {value!r:.40}"))
            except BaseException as error:  # the user's function may raise anything
                self._results.put((None, f"raised {type(error).__name__}: {error}"))


class Rewarder:
    def __init__(
        self,
        reward: Reward,
        name: str,
        timeout_s: float,
        most_failures: float,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            reward: the user's function.
            name: the function's name in the configuration, for messages.
            timeout_s: time limit of one call.
            most_failures: share of rollouts whose reward may fail.
            between: called before each reward, since one reward may take up to timeout_s.
        """
        self.reward, self.name, self.timeout_s, self.most_failures, self.between = (
            reward,
            name,
            timeout_s,
            most_failures,
            between,
        )
        self.called = self.failed = 0
        self._caller = _Caller(reward)

    def group(self, prompt: str, responses: list[str], answer: str) -> list[float]:
        """Return the rewards of a group.

        A rollout whose reward fails gets the mean of the others, so that it teaches nothing; 0 if all failed.

        Raises:
            RewardError: more than the allowed share of rewards failed.
        """
        found = [self._one(prompt, response, answer) for response in responses]
        good = [value for value in found if value is not None]
        mean = sum(good) / len(good) if good else 0.0
        return [mean if value is None else value for value in found]

    def _one(self, prompt: str, response: str, answer: str) -> float | None:
        self.called += 1
        self.between()
        try:
            number, trouble = self._caller((prompt, response, answer), self.timeout_s)
            if number is not None:
                if math.isfinite(number):
                    return number
                trouble = f"returned {number}"
        except queue.Empty:
            self._caller = _Caller(self.reward)
            trouble = f"took more than {self.timeout_s:g} s"
        self.failed += 1
        if self.failed > max(LEAST_FAILURES, self.most_failures * self.called):
            raise RewardError(
                f"data.reward={self.name}: failed for {self.failed} of {self.called} rollouts, more than "
                f"data.reward_failures={self.most_failures:g} allows; the last {trouble.splitlines()[0]}, response "
                f"{response[:40]!r}; expected a finite number"
            )
        return None
