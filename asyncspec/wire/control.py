"""The control channel: small messages both ways between the controller and every actor and launcher.

`ControlServer` is the controller's end, `ControlClient` everybody else's. No call here blocks.
"""

from __future__ import annotations

import time

import zmq

from asyncspec.deadlines import CONTROL_LINGER_S
from asyncspec.wire.codec import WireError, decode, encode
from asyncspec.wire.messages import Message
from asyncspec.wire.transport import Watched, bind, make_socket, raise_limits, receive_frames

MAX_CONTROL_BYTES = 64 << 20  # of a frame


class ControlServer:
    """The controller's end: any actor's messages in, messages to named actors out."""

    def __init__(self, host: str) -> None:
        raise_limits()
        self.socket = make_socket(zmq.ROUTER, serving=True, largest=MAX_CONTROL_BYTES)
        self.socket.linger = int(1e3 * CONTROL_LINGER_S)
        self.socket.router_mandatory = True
        self.address = bind(self.socket, host)
        self.rejected = 0

    def receive(self) -> tuple[str, Message] | None:
        """(name of the sender, message), or None if there is none."""
        while (frames := receive_frames(self.socket)) is not None:
            try:
                return frames[0].decode(), decode(frames[1:])[0]
            except (WireError, UnicodeDecodeError):
                self.rejected += 1
        return None

    def send(self, name: str, body: Message) -> bool:
        """False if no actor of that name is connected."""
        try:
            self.socket.send_multipart([name.encode(), *encode(body)], zmq.NOBLOCK)
            return True
        except zmq.ZMQError:
            return False

    def close(self) -> None:
        self.socket.close()


class ControlClient(Watched):
    """An actor's end, or a launcher's."""

    def __init__(self, address: str, name: str) -> None:
        self.socket = make_socket(zmq.DEALER, serving=False, largest=MAX_CONTROL_BYTES)
        self.socket.linger = int(1e3 * CONTROL_LINGER_S)
        self.socket.identity = name.encode()
        self._watch()
        self._lost_at = 0.0
        self.socket.connect(address)
        self.rejected = 0

    def send(self, body: Message) -> None:
        self.socket.send_multipart(encode(body))

    def lost_for(self) -> float:
        """Seconds since the connection was lost; 0 while it stands, or was never there."""
        for lost in self._changes():
            self._lost_at = time.monotonic() if lost else 0.0
        return time.monotonic() - self._lost_at if self._lost_at else 0.0

    def receive(self) -> Message | None:
        """A message, or None if there is none; what is none of ours is passed over."""
        while (frames := receive_frames(self.socket)) is not None:
            try:
                return decode(frames)[0]
            except WireError:
                self.rejected += 1
        return None
