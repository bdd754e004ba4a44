"""The control channel: small messages in both directions between the controller and every actor and launcher.

`ControlServer` is the controller's end; `ControlClient` is the end of an actor or a launcher. No call here blocks.
"""

from __future__ import annotations

import time

import zmq

from asyncspec.deadlines import CONTROL_LINGER_S
from asyncspec.wire.codec import WireError, decode, encode
from asyncspec.wire.messages import Message
from asyncspec.wire.transport import Watched, bind, connect, make_socket, raise_limits, receive_frames

MAX_CONTROL_BYTES = 64 << 20  # largest frame that is accepted


class ControlServer:
    """The controller's end: it receives from every actor and sends to actors by name."""

    def __init__(self, host: str) -> None:
        raise_limits()
        self.socket = make_socket(zmq.ROUTER, serving=True, largest=MAX_CONTROL_BYTES)
        self.socket.linger = int(1e3 * CONTROL_LINGER_S)
        self.socket.router_mandatory = True
        self.address = bind(self.socket, host)
        self.rejected = 0

    def receive(self) -> tuple[str, Message] | None:
        """Return (sender's name, message), or None if no message waits. Invalid frames are counted and dropped."""
        while (frames := receive_frames(self.socket)) is not None:
            try:
                return frames[0].decode(), decode(frames[1:])[0]
            except (WireError, UnicodeDecodeError):
                self.rejected += 1
        return None

    def send(self, name: str, body: Message) -> bool:
        """Send a message to an actor; return False if no actor of that name is connected."""
        try:
            self.socket.send_multipart([name.encode(), *encode(body)], zmq.NOBLOCK)
            return True
        except zmq.ZMQError:
            return False

    def close(self) -> None:
        self.socket.close()


class ControlClient(Watched):
    """The end of an actor or a launcher."""

    def __init__(self, address: str, name: str) -> None:
        self.socket = make_socket(zmq.DEALER, serving=False, largest=MAX_CONTROL_BYTES)
        self.socket.linger = int(1e3 * CONTROL_LINGER_S)
        self.socket.identity = name.encode()
        self._watch()
        self._lost_at = 0.0
        connect(self.socket, address)
        self.rejected = 0

    def send(self, body: Message) -> None:
        self.socket.send_multipart(encode(body))

    def lost_for(self) -> float:
        """Return the seconds since the connection was lost; 0 while it is up, or if it never was."""
        for lost in self._changes():
            self._lost_at = time.monotonic() if lost else 0.0
        return time.monotonic() - self._lost_at if self._lost_at else 0.0

    def receive(self) -> Message | None:
        """Return the next message, or None if none waits. Invalid frames are counted and dropped."""
        while (frames := receive_frames(self.socket)) is not None:
            try:
                return decode(frames)[0]
            except WireError:
                self.rejected += 1
        return None
