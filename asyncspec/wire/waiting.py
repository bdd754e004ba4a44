"""Waits until a message may have arrived at one of several sockets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import zmq


class HasSocket(Protocol):
    socket: zmq.Socket


def wait(ends: Iterable[HasSocket], timeout_s: float) -> None:
    """Wait until one of the ends may have something to receive, at most timeout_s."""
    poller = zmq.Poller()
    for end in ends:
        poller.register(end.socket, zmq.POLLIN)
    poller.poll(max(0, int(timeout_s * 1000)))


class Waiting:
    """Waits for many ends at once, and says which of them have something to receive. It costs little for each end."""

    def __init__(self) -> None:
        self._poller, self._ends = zmq.Poller(), dict[zmq.Socket, HasSocket]()

    def add(self, end: HasSocket, *more: zmq.Socket) -> None:
        """Wait for an end, and for further sockets of it."""
        for socket in (end.socket, *more):
            self._poller.register(socket, zmq.POLLIN)
            self._ends[socket] = end

    def drop(self, end: HasSocket) -> None:
        for socket in [socket for socket, its in self._ends.items() if its is end]:
            self._poller.unregister(socket)
            del self._ends[socket]

    def wait(self, timeout_s: float) -> list[HasSocket]:
        """Return the ends that have something to receive, each once, after at most timeout_s."""
        found = self._poller.poll(max(0, int(timeout_s * 1000)))
        return list(dict.fromkeys(self._ends[socket] for socket, _ in found))
