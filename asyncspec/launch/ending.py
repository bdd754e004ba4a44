"""Ending a process by force, so that it tells what it was at.

It writes where each of its threads is to its log, also if one of them holds the interpreter. Going through threads that
run may crash a process, so only one that is to end anyway does it.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal

from asyncspec.deadlines import LAST_WORDS_S

_TELL = signal.SIGUSR2  # ends a process that has not made ready


def make_ready() -> None:
    """Have this process, when it is ended by `end`, write to stderr where its threads are."""
    faulthandler.register(_TELL, file=2, all_threads=True, chain=True)  # chained: to what the signal does by itself


def end(descriptor: int, told: bool = True) -> None:
    """End a process, also if it is frozen.

    Args:
        descriptor: of it, from `pidfd`.
        told: whether it has something to tell.
    """
    ended = select.poll()
    ended.register(descriptor, select.POLLIN)
    try:
        if told:
            signal.pidfd_send_signal(descriptor, _TELL)
        if not told or not ended.poll(LAST_WORDS_S * 1e3):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except OSError:  # it has ended
        pass


def pidfd(pid: int) -> int:
    """A descriptor that becomes readable when the process ends; at once if it has."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        read, write = os.pipe()
        os.close(write)
        return read
