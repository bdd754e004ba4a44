"""A process that calls the user's reward function, as seen by the process that uses it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from asyncspec.tasks.json_process import JsonProcess, NoAnswer

_PROGRAM = Path(__file__).with_name("reward_process.py")
_SLICE_S = 0.1  # between two looks at the deadline


class RewardWorker(JsonProcess):
    """Starts the process, which then loads the function."""

    def __init__(
        self, name: str, weights: Sequence[float] = (), pattern: str = "", columns: Sequence[str] | None = None
    ) -> None:
        """
        Args:
            name: the functions, as in data.reward.
            weights: the weight of each function; empty: 1.
            pattern: data.reward_pattern.
            columns: the columns of the data, which the functions' parameters are compared with; None: they are not.
        """
        self._name = name
        self.of_groups = False  # whether a function is called once for a group; known when it is loaded
        asked = {"reward": name, "weights": list(weights), "pattern": pattern, "columns": columns and list(columns)}
        super().__init__(_PROGRAM, asked)

    def wait_until_loaded(self, timeout_s: float) -> None:
        """Wait until the function is loaded.

        Args:
            timeout_s: seconds that this may take, deployment.start_timeout_s.

        Raises:
            ValueError: the function cannot be loaded. The message is one line.
        """
        deadline = time.monotonic() + timeout_s
        while not self.loaded(max(0.0, deadline - time.monotonic()), timeout_s):
            self.wait(_SLICE_S)

    def loaded(self, left_s: float, timeout_s: float) -> bool:
        """Return whether the function is loaded, without waiting.

        Args:
            left_s: seconds that are left until it must be.
            timeout_s: how long it could take, for the message.

        Raises:
            ValueError: it cannot be loaded, or `left_s` is 0.
        """
        try:
            said = self.receive()
            if said is None and left_s <= 0:
                raise NoAnswer(f"took more than {timeout_s:g} s")
        except NoAnswer as none:
            raise ValueError(
                f"data.reward={self._name!r}: {none} while it was imported; expected a module that can be imported "
                f"within deployment.start_timeout_s={timeout_s:g}"
            ) from None
        if said is None:
            return False
        if said["error"]:
            raise ValueError(said["error"])
        self.of_groups = said["of_groups"]
        return True

    def ask(self, prompt: str, responses: Sequence[str], answer: str, row: str = "") -> None:
        """Have the function called for each response, in order. Then call `answer` until it has returned each."""
        self.send([prompt, list(responses), answer, row])

    def answer(self) -> tuple[float | None, str] | None:
        """Return the next reward, without waiting; None: it is not there yet. The number is None if the reward does not
        apply, or failed: then the text says what went wrong.

        Raises:
            NoAnswer: there is none, and there will be none.
        """
        found = self.receive()
        return None if found is None else (found[0], found[1])
