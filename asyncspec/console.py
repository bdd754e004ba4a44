"""What a person reads: standard output, standard error, and the terminal console that every command writes to.

Output for people never ends a run. Once `never_fail` has been called, a line that cannot be written, because its reader
is gone, its terminal is closed, its disk is full or its encoding lacks a character, is dropped, and the process goes
on. The same holds for a reader that has stopped to read: a write waits at most `PATIENCE_S` for it.
"""

from __future__ import annotations

import io
import os
import select
import stat
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

QUIET_S = 1.0  # shorter work shows no bar
LINE_EVERY_S = 5.0  # between two lines about progress, where there is no terminal for a bar
PATIENCE_S = 1.0  # how long a write waits for a reader that does not read, until the reader reads again


class _Dropping(io.RawIOBase):
    """The raw end of a stream that drops what it cannot write."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._patience_s = descriptor, PATIENCE_S
        self._out = _unblocked(descriptor)

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        with suppress(OSError):
            while rest:
                try:
                    rest = rest[os.write(self._out, rest) :]
                    self._patience_s = PATIENCE_S
                except BlockingIOError:
                    ready = select.poll()
                    ready.register(self._out, select.POLLOUT)
                    if not ready.poll(self._patience_s * 1e3):
                        self._patience_s = 0.0
                        break
        return size

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def close(self) -> None:
        if not self.closed and self._out != self._descriptor:
            os.close(self._out)
        super().close()


def never_fail() -> None:
    """Make this process's standard output and error streams that drop what they cannot write. A standard stream that
    is closed becomes the null device, so that no file that is opened later gets its number.

    Call it again after a standard descriptor was redirected.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            while (opened := os.open(os.devnull, os.O_RDWR)) < number:
                pass
            os.set_inheritable(opened, True)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if (old := getattr(sys, name)) is not None:
            buffer = getattr(old, "buffer", None)
            raw = getattr(buffer, "raw", buffer)
            if not isinstance(raw, io.FileIO | _Dropping) or raw.closed or raw.fileno() != number:
                continue  # whoever runs this code has put a stream of its own there
            with suppress(OSError, ValueError):
                old.flush()
        end = io.BufferedWriter(_Dropping(number))
        encoding = getattr(old, "encoding", None) or "utf-8"
        setattr(sys, name, io.TextIOWrapper(end, encoding, "backslashreplace", line_buffering=True))


def _unblocked(descriptor: int) -> int:
    """Return a descriptor of the same terminal or pipe, on which writing does not block. Its mode is not shared with
    other processes. Return `descriptor` itself if it is neither, or if there is no way to open it again.
    """
    with suppress(OSError):
        if os.isatty(descriptor) or stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return descriptor


def terminal(**options) -> Console:
    """Return a console that prints text unchanged: brackets and colons in names and errors are not markup or emoji."""
    from rich.console import Console  # a tenth of a second, which actors need not wait for

    return Console(highlight=False, markup=False, emoji=False, **options)
