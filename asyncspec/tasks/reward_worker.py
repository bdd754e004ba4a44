"""A process that calls the user's reward function, as seen by the process that uses it."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from asyncspec.deadlines import EXIT_GRACE_S

_PROGRAM = str(Path(__file__).with_name("reward_process.py"))
_SLICE_S = 0.1  # between two looks at the deadline
_SEND_S = 10.0  # a process that waits for a request takes it at once


class NoAnswer(Exception):
    """The process did not answer in time, or has ended. The message says which; it goes on from "the function"."""


class RewardWorker:
    """Starts the process, which then loads the function. `close` ends it and all that it started.

    Use it in the thread that made it: the process also ends with that thread.
    """

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
        self._name, self._received = name, bytearray()
        self.of_groups = False  # whether a function is called once for a group; known when it is loaded
        self._connection, theirs = socket.socketpair()
        self._connection.settimeout(_SEND_S)
        # In its own session, no interrupt from the terminal reaches it, and its children can be killed with it.
        self._process = subprocess.Popen(
            [sys.executable, "-P", _PROGRAM, str(os.getpid()), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        # The function's children may hold the connection open, so the end of the process is watched for itself.
        self._ended = os.pidfd_open(self._process.pid)
        self.close = weakref.finalize(self, _end, os.getpid(), self._process, self._connection, self._ended)
        self._news = select.poll()
        for descriptor in (self._connection.fileno(), self._ended):
            self._news.register(descriptor, select.POLLIN)
        path = [str(entry) for entry in sys.path]
        asked = {"path": path, "reward": name, "weights": list(weights), "pattern": pattern}
        self._send({**asked, "columns": columns and list(columns)})

    def wait_until_loaded(self, timeout_s: float) -> None:
        """Wait until the function is loaded.

        Args:
            timeout_s: seconds that this may take, deployment.start_timeout_s.

        Raises:
            ValueError: the function cannot be loaded. The message is one line.
        """
        deadline = time.monotonic() + timeout_s
        while not self.loaded(max(0.0, deadline - time.monotonic()), timeout_s):
            self._news.poll(1e3 * _SLICE_S)

    def loaded(self, left_s: float, timeout_s: float) -> bool:
        """Return whether the function is loaded, without waiting.

        Args:
            left_s: seconds that are left until it must be.
            timeout_s: how long it could take, for the message.

        Raises:
            ValueError: it cannot be loaded, or `left_s` is 0.
        """
        try:
            said = self._receive()
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
        self._send([prompt, list(responses), answer, row])

    def answer(self) -> tuple[float | None, str] | None:
        """Return the next reward, without waiting; None: it is not there yet. The number is None if the reward does not
        apply, or failed: then the text says what went wrong.

        Raises:
            NoAnswer: there is none, and there will be none.
        """
        found = self._receive()
        return None if found is None else (found[0], found[1])

    def kill(self) -> None:
        """End the process at once, even if it hangs."""
        if self.close.alive:
            os.killpg(self._process.pid, signal.SIGKILL)
            self.close()

    def _send(self, content: object) -> None:
        try:
            self._connection.sendall(json.dumps(content).encode() + b"\n")
        except OSError:  # it has ended or hangs, which `_receive` finds out
            pass

    def _receive(self):
        """Return what the process has sent, None if there is nothing."""
        while (end := self._received.find(b"\n")) < 0:
            ready = {descriptor for descriptor, _ in self._news.poll(0)}
            if self._connection.fileno() in ready and (more := self._read()):
                self._received += more
            elif ready:
                raise NoAnswer(self._how())
            else:
                return None
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return json.loads(line)

    def _read(self) -> bytes:
        try:
            return self._connection.recv(1 << 16)
        except OSError:
            return b""

    def _how(self) -> str:
        """Say how the process has ended. Leaves its number taken, so that `_end` kills no other process."""
        if not _wait(self._ended):
            return "closed its connection"
        found = os.waitid(os.P_PIDFD, self._ended, os.WEXITED | os.WNOWAIT)
        assert found is not None  # it has ended
        by = f"exit code {found.si_status}" if found.si_code == os.CLD_EXITED else signal.Signals(found.si_status).name
        return f"ended its process with {by}"


def _wait(ended: int) -> bool:
    """Give a process a moment to end. Return whether it has."""
    waiting = select.poll()
    waiting.register(ended, select.POLLIN)
    return bool(waiting.poll(1e3 * EXIT_GRACE_S))


def _end(owner: int, process: subprocess.Popen, connection: socket.socket, ended: int) -> None:
    """End a process and its children. One that waits for a request may end by itself."""
    if os.getpid() != owner:  # a forked process that ends
        return
    connection.close()
    _wait(ended)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except OSError:  # all have ended
        pass
    process.wait()
    os.close(ended)
