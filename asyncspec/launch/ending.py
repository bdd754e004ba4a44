"""Ends this process at once, or another one by force, and has that one write to its log what it was doing.

The process writes where each of its threads is, even if one of them holds the interpreter lock. Walking the stacks of
running threads can crash a process, so only a process that must end anyway does it.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import sys
from typing import NoReturn

from asyncspec.deadlines import LAST_WORDS_S

_TELL = signal.SIGUSR2  # ends a process that has not called `make_ready`


def make_ready() -> None:
    """Have this process write to stderr where its threads are when `end` ends it."""
    # chain=True: the signal's default action follows, which ends the process
    faulthandler.register(_TELL, file=2, all_threads=True, chain=True)


def end_at_once(code: int) -> NoReturn:
    """Exit without the interpreter's own shutdown, once all processes are stopped. At shutdown Monarch would wait for
    its processes, and on a busy machine it sometimes aborts.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end(descriptor: int, told: bool = True) -> None:
    """End a process, even if it is frozen.

    Args:
        descriptor: the process's descriptor, from `pidfd`.
        told: whether the process writes where its threads are before it ends.
    """
    ended = select.poll()
    ended.register(descriptor, select.POLLIN)
    try:
        if told:
            signal.pidfd_send_signal(descriptor, _TELL)
        if not told or not ended.poll(LAST_WORDS_S * 1e3):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except OSError:  # the process has already ended
        pass


def pidfd(pid: int) -> int:
    """Return a descriptor that is readable once the process has ended."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        read, write = os.pipe()
        os.close(write)
        return read
