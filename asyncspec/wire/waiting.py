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
