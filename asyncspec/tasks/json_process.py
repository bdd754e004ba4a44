"""A process of ours that runs what users have written, as seen by the process that uses it.

Both sides send JSON, an object or a list on each line, over a socket of their own. So what the user's code prints goes
elsewhere, and it may hang or end its process without harm to the other side.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncspec.deadlines import EXIT_GRACE_S


class NoAnswer(Exception):
    """The process did not answer in time, or has ended. The message says which; it goes on from "the function" or
    "the environment".
    """


class JsonProcess:
    """Starts the process. `close` ends it and all that it started.

    Use it in the thread that made it: the process also ends with that thread.
    """

    def __init__(self, program: Path, asked: Mapping[str, Any]) -> None:
        """
        Args:
            program: run as `python -P program PARENT DESCRIPTOR`.
            asked: the first line that it gets, besides `path`, this process's sys.path.
        """
        self._received, self._unsent = bytearray(), bytearray()
        self.connection, theirs = socket.socketpair()
        # In its own session, no interrupt from the terminal reaches it, and its children can be killed with it.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(program), str(os.getpid()), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        # The children of the user's code may hold the connection open, so the end of the process is watched for itself.
        self._ended = os.pidfd_open(self._process.pid)
        self.close = weakref.finalize(self, _end, os.getpid(), self._process, self.connection, self._ended)
        self._news = select.poll()
        for descriptor in (self.connection.fileno(), self._ended):
            self._news.register(descriptor, select.POLLIN)
        self.send({"path": [str(entry) for entry in sys.path], **asked})

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, seconds: float) -> None:
        """Wait until the process has sent something or has ended, but not longer than this."""
        self._news.poll(1e3 * seconds)

    def kill(self) -> None:
        """End the process at once, even if it hangs."""
        if self.close.alive:
            os.killpg(self._process.pid, signal.SIGKILL)
            self.close()

    def send(self, content: object) -> None:
        """Send what fits now. Each `receive` sends more of the rest, so nobody waits for one that does not read."""
        self._unsent += json.dumps(content).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self.connection.send(self._unsent, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            pass
        except OSError:  # it has ended, which `receive` finds out
            self._unsent.clear()

    def receive(self) -> Any:
        """Return what the process has sent, None if there is nothing.

        Raises:
            NoAnswer: there is nothing, and there will be nothing.
        """
        self._flush()
        while (end := self._received.find(b"\n")) < 0:
            ready = {descriptor for descriptor, _ in self._news.poll(0)}
            if self.connection.fileno() in ready and (more := self._read()):
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
            return self.connection.recv(1 << 16)
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
