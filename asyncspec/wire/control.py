"""The control channel: messages in both directions between the controller and every actor and launcher. Tickets travel
on it, too.

`ControlServer` is the controller's end; `ControlClient` is the end of an actor or a launcher. No call here blocks.

A cut connection loses nothing. Each end numbers what it sends and keeps it until the other end says that it has seen
that number, which every message does. Once a connection is up again, the client says what it has seen, and both ends
send the rest again, in order. Heartbeats have no number: the next one makes up for a lost one.
"""

from __future__ import annotations

import os
import struct
import time

import zmq

from asyncspec.deadlines import CONTROL_LINGER_S
from asyncspec.wire.codec import WireError, decode, encode
from asyncspec.wire.messages import Beat, Message
from asyncspec.wire.transport import Watched, bind, connect, make_socket, raise_limits, receive_frames

MAX_CONTROL_BYTES = 64 << 20  # largest frame that the controller accepts; a ticket may be larger
# The first frame: the client's session, the message's number, and the newest number that the sender has seen. Without
# a second frame it opens a connection, or opens it again, and the number is the oldest that the client still has.
HEADER = struct.Struct("<8sQQ")


class _Stream:
    """What one end has sent to the other and has seen of it."""

    def __init__(self, session: bytes) -> None:
        """
        Args:
            session: eight bytes that a client chooses. They tell it from others of its name, before or after it.
        """
        self.session, self.seen = session, 0
        self._sent, self._unseen = 0, dict[int, list]()  # number -> frames of what the other end may not have seen

    def frames(self, body: Message) -> list:
        """Return the frames of a new message."""
        frames = encode(body)
        if isinstance(body, Beat):
            return [self._header(0), *frames]
        self._sent += 1
        self._unseen[self._sent] = frames
        return [self._header(self._sent), *frames]

    def opening(self) -> bytes:
        return self._header(next(iter(self._unseen), self._sent + 1))

    def again(self) -> list[list]:
        """Return the frames of each message that the other end may not have seen, oldest first."""
        return [[self._header(number), *frames] for number, frames in self._unseen.items()]

    def takes(self, number: int, seen: int) -> bool:
        """Note what a header says. Return whether its message is the next one; others have come, or come again."""
        while self._unseen and (oldest := next(iter(self._unseen))) <= seen:
            del self._unseen[oldest]
        new = number == self.seen + 1
        self.seen += new
        return new or not number

    def _header(self, number: int) -> bytes:
        return HEADER.pack(self.session, number, self.seen)


def _unpacked(frame: bytes) -> tuple[bytes, int, int]:
    """Return session, number and newest number seen.

    Raises:
        WireError: the frame is no header.
    """
    if len(frame) != HEADER.size:
        raise WireError(f"a header of {len(frame)} bytes: expected {HEADER.size}")
    return HEADER.unpack(frame)


class ControlServer:
    """The controller's end: it receives from every actor and sends to actors by name."""

    def __init__(self, host: str) -> None:
        raise_limits()
        self.socket = make_socket(zmq.ROUTER, serving=True, largest=MAX_CONTROL_BYTES)
        self.socket.linger = int(1e3 * CONTROL_LINGER_S)
        # A client whose connection was cut may connect again before the old connection is known to be dead.
        self.socket.router_mandatory = self.socket.router_handover = True
        self.address = bind(self.socket, host)
        self.rejected = 0
        self._streams: dict[bytes, _Stream] = {}

    def receive(self) -> tuple[str, Message] | None:
        """Return (sender's name, message), or None if no message waits. Invalid frames are counted and dropped."""
        while (frames := receive_frames(self.socket)) is not None:
            try:
                sender, (session, number, seen) = frames[0], _unpacked(frames[1] if len(frames) > 1 else b"")
                stream = self._streams.get(sender)
                if len(frames) == 2:
                    self._opened(sender, session, number, seen)
                elif stream is None or stream.session != session:
                    raise WireError(f"session {session.hex()}: expected one that was opened")
                elif stream.takes(number, seen):
                    return sender.decode(), decode(frames[2:])[0]
            except (WireError, UnicodeDecodeError):
                self.rejected += 1
        return None

    def _opened(self, sender: bytes, session: bytes, oldest: int, seen: int) -> None:
        """Begin a client's stream, or go on with it."""
        stream = self._streams.get(sender)
        if stream is None or stream.session != session:
            stream = self._streams[sender] = _Stream(session)
            stream.seen = max(0, oldest - 1)
        stream.takes(0, seen)
        for frames in stream.again():
            self._send(sender, frames)

    def send(self, name: str, body: Message) -> bool:
        """Send a message to an actor; return False if no actor of that name has ever connected. An actor whose
        connection is cut gets the message later, unless it is a heartbeat.
        """
        stream = self._streams.get(sender := name.encode())
        if stream is not None:
            self._send(sender, stream.frames(body))
        return stream is not None

    def _send(self, to: bytes, frames: list) -> None:
        try:
            self.socket.send_multipart([to, *frames], zmq.NOBLOCK)
        except zmq.ZMQError:  # not connected at present
            pass

    def close(self) -> None:
        self.socket.close()


class ControlClient(Watched):
    """The end of an actor or a launcher."""

    def __init__(self, address: str, name: str) -> None:
        self.socket = make_socket(zmq.DEALER, serving=False)
        self.socket.linger = int(1e3 * CONTROL_LINGER_S)
        self.socket.identity = name.encode()
        self._watch()
        self._lost_at = 0.0
        self._stream = _Stream(os.urandom(8))
        connect(self.socket, address)
        self.socket.send(self._stream.opening())
        self.rejected = 0

    def send(self, body: Message) -> None:
        self.socket.send_multipart(self.frames(body))

    def frames(self, body: Message) -> list:
        """Return the frames of a new message, which is numbered unless it is a heartbeat."""
        return self._stream.frames(body)

    def lost_for(self) -> float:
        """Return the seconds since the connection was lost, as far as `receive` has noticed; 0 while it is up, or if it
        never was.
        """
        return time.monotonic() - self._lost_at if self._lost_at else 0.0

    def receive(self) -> Message | None:
        """Return the next message, or None if none waits. Invalid frames are counted and dropped. Call it often, since
        it also goes on with a connection that was lost.
        """
        while (frames := receive_frames(self.socket)) is not None:
            try:
                session, number, seen = _unpacked(frames[0])
                if session == self._stream.session and self._stream.takes(number, seen):
                    return decode(frames[1:])[0]
            except WireError:
                self.rejected += 1
        self._tend_connection()
        return None

    def _tend_connection(self) -> None:
        for lost in self._changes():
            if lost:
                self._lost_at = time.monotonic()
            elif self._lost_at:
                self._lost_at = 0.0
                self.socket.send(self._stream.opening())
                for frames in self._stream.again():
                    self.socket.send_multipart(frames)
