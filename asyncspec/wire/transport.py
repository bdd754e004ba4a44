"""ZeroMQ sockets with a run's keys, and bounded queues between actors. The control channel is in control.py.

A queue is one `Inbox` (the consumer, which binds) and an `Outbox` in each producer. The consumer grants each producer a
number of credits. A message costs one credit, which comes back when the consumer takes the message out; so an inbox
never holds more than credits x producers messages. Socket high-water marks do not bound this and are switched off.
Messages carry sequence numbers. A repeated message is dropped and counted, and so are frames that do not decode and
messages of a kind that the consumer does not take.

An Outbox keeps messages for which it has no credit in a local backlog, which is bounded by the admission of tickets. It
also keeps messages that are not acknowledged yet: it sends them again after a cut connection, or to the consumer that
replaces a dead one.

CurveZMQ encrypts the sockets, with a key pair made for the run. A peer that connects must know even the public key,
which no message carries and which only the run's owner can read (`make_keys`, `use_keys`).

No call here blocks. waiting.py waits, with a timeout.
"""

from __future__ import annotations

import os
import resource
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import zmq
from zmq.utils.monitor import recv_monitor_message

from asyncspec.clock import now
from asyncspec.deadlines import DATA_LINGER_S, QUEUE_BEAT_S, QUEUE_SILENT_S
from asyncspec.errors import UserError
from asyncspec.wire.addresses import at_some_port, url
from asyncspec.wire.codec import MAX_MESSAGE_BYTES, WireError, decode, encode
from asyncspec.wire.messages import Arrays, Message

_OPEN, _CREDIT, _DATA, _ACK = b"O", b"C", b"D", b"A"
_NUMBER = struct.Struct("<Q")
_STAMP = struct.Struct("<Qd")  # of a message: its number, and the time of the run's clock when it was sent


KEYS = "keys"  # name of the key file in a run's directory
MOST_SOCKETS = 65535  # that a process may open, which is ZeroMQ's own limit; its default is 1023. A queue takes three

_keys: tuple[bytes, bytes] | None = None  # public, secret


def context() -> zmq.Context:
    """Return this process's ZeroMQ context, which allows MOST_SOCKETS sockets."""
    made: zmq.Context = zmq.Context.instance()
    if cast(int, made.max_sockets) < MOST_SOCKETS:  # takes effect only before the first socket is made
        made.max_sockets = MOST_SOCKETS
    return made


def raise_limits() -> None:
    """Allow this process MOST_SOCKETS file descriptors, since the controller needs a few for each actor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_SOCKETS if hard == resource.RLIM_INFINITY else min(MOST_SOCKETS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def make_keys(run_dir: Path) -> None:
    """Make a run's key pair and write it to a file that only its owner can read."""
    descriptor = os.open(run_dir / KEYS, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(b"\n".join(zmq.curve_keypair()))


def use_keys(run_dir: str | Path | None) -> None:
    """Encrypt the sockets that this process makes from now on with a run's keys.

    Args:
        run_dir: the run's directory; None: do not encrypt.

    Raises:
        UserError: the run's directory has no valid key file.
    """
    global _keys
    _keys = None
    if run_dir is not None:
        file = Path(run_dir) / KEYS
        try:
            public, secret = file.read_bytes().split(b"\n")
        except (OSError, ValueError) as error:
            raise UserError(
                f"{file}: {getattr(error, 'strerror', None) or 'not a key pair'}; expected the run's keys, which the "
                "first launcher writes at each start, in a directory that all hosts share; or deployment.encrypt=false"
            ) from None
        _keys = public, secret


def make_socket(kind: int, serving: bool, largest: int = MAX_MESSAGE_BYTES) -> zmq.Socket:
    """Return a socket without high-water marks, encrypted if `use_keys` has set keys.

    Args:
        kind: the ZeroMQ socket type.
        serving: whether this socket binds, and so is the server of the encryption.
        largest: bytes of a frame; a peer that sends a larger one is disconnected.
    """
    socket = context().socket(kind)
    socket.rcvhwm = socket.sndhwm = 0
    socket.maxmsgsize = largest
    if _keys is not None:
        socket.curve_publickey, socket.curve_secretkey = _keys
        if serving:
            socket.curve_server = True
        else:
            socket.curve_serverkey = _keys[0]
    return socket


def connect(socket: zmq.Socket, address: str) -> None:
    """Connect to an address that `addresses.url` has made."""
    socket.ipv6 = "[" in address
    socket.connect(address)


def bind(socket: zmq.Socket, host: str) -> str:
    """Bind to a free port of `host`; return the address for others to connect to.

    Raises:
        UserError: all ports that may be used are taken.
    """
    socket.ipv6 = ":" in host
    at_some_port(lambda port: socket.bind(url(host, port or "*")))
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _bytes(frames: list) -> int:
    return sum(memoryview(frame).nbytes for frame in frames)


def receive_frames(socket: zmq.Socket) -> list | None:
    """Return the frames of the next message, or None if none waits."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


class Inbox:
    """The consuming end of a queue."""

    def __init__(self, host: str, credits: int, takes: tuple[type[Message], ...] = (Message,)) -> None:
        """
        Args:
            host: address to bind to; the port is chosen freely, see `address`.
            credits: messages that each producer may have in flight.
            takes: the message types that are accepted; others are rejected.
        """
        self.takes = takes
        self.socket = make_socket(zmq.ROUTER, serving=True)
        self.socket.linger = 0
        # a producer whose connection was cut may connect again before the old connection is known to be dead
        self.socket.router_handover = True
        self.address = bind(self.socket, host)
        self.credits = credits
        self.rejected = self.duplicates = 0
        self._seen: dict[bytes, int] = {}  # sender -> number of its last message
        self._held: Counter[bytes] = Counter()  # sender -> number of its messages that wait here
        self._waiting: deque[tuple[bytes, int, Message, Arrays, float, float]] = deque()

    def __len__(self) -> int:
        self._pump()
        return len(self._waiting)

    def take(self, kind: type[Message] = Message) -> tuple[Message, Arrays, float, float] | None:
        """Return the oldest message, its arrays, when it was sent and when it was seen here, and give its credit back;
        None if none waits.

        Args:
            kind: the type of message to take; others stay.
        """
        self._pump()
        index = next((i for i, entry in enumerate(self._waiting) if isinstance(entry[2], kind)), None)
        if index is None:
            return None
        sender, number, body, arrays, sent, seen = self._waiting[index]
        del self._waiting[index]
        self._held[sender] -= 1
        self._acknowledge(sender, number)
        return body, arrays, sent, seen

    def close(self) -> None:
        self.socket.close()

    def _pump(self) -> None:
        while (frames := receive_frames(self.socket)) is not None:
            if len(frames) == 2 and frames[1] == _OPEN:
                self._seen.setdefault(frames[0], 0)
                self.socket.send_multipart([frames[0], _CREDIT, _NUMBER.pack(self.credits)])
                continue
            self._accept(frames)

    def _accept(self, frames: list) -> None:
        if len(frames) < 4 or frames[1] != _DATA or len(frames[2]) != _STAMP.size or frames[0] not in self._seen:
            self.rejected += 1
            return
        sender, (number, sent) = frames[0], _STAMP.unpack(frames[2])
        if number <= self._seen[sender]:
            self.duplicates += 1
            # the message was taken out before, but the acknowledgment was lost
            if not any(waiting[:2] == (sender, number) for waiting in self._waiting):
                self._acknowledge(sender, number)
            return
        # the sender skipped a number, or sent without credit
        if number != self._seen[sender] + 1 or self._held[sender] >= self.credits:
            self.rejected += 1
            return
        self._seen[sender] = number
        try:
            body, arrays = decode(frames[3:])
            if not isinstance(body, self.takes):
                raise WireError(f"{type(body).__name__}: not accepted by this inbox")
        except WireError:
            self.rejected += 1
            self._acknowledge(sender, number)  # the sender still gets its credit back
            return
        self._held[sender] += 1
        seen = now()
        # in this order, which turns a stamp that is no number into `seen`; clocks of two hosts differ a little
        self._waiting.append((sender, number, body, arrays, min(seen, sent), seen))

    def _acknowledge(self, sender: bytes, number: int) -> None:
        self.socket.send_multipart([sender, _ACK, _NUMBER.pack(number)])


class Watched:
    """An end that notices when its connection is lost and when it is up again.

    A subclass sets `socket`, and calls `_watch` before it connects.
    """

    socket: zmq.Socket
    _monitor: zmq.Socket

    def _watch(self) -> None:
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def _changes(self) -> Iterator[bool]:
        """Yield each change of the connection since the last call: True if it was lost, False if it came up."""
        while self._monitor.poll(0):
            yield recv_monitor_message(self._monitor)["event"] == zmq.EVENT_DISCONNECTED

    def close(self, linger: int | None = None) -> None:
        """Close the socket.

        Args:
            linger: milliseconds in which the last messages may still be sent; None: the socket's own setting.
        """
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close(linger)


class Outbox(Watched):
    """A producing end of a queue."""

    def __init__(
        self, address: str, delay_s: float = 0.0, held: Callable[[Any, float, float], None] | None = None
    ) -> None:
        """
        Args:
            address: the inbox's.
            delay_s: seconds for which each message is held back, to test to which cause that time is charged.
            held: callable(message, start, end), called with each message that was held back, when it is let go.
        """
        self.delay_s, self._on_release = delay_s, held
        self._held: deque[tuple[Message, list, float]] = deque()  # message, its frames, since when it is held back
        self.unacknowledged: dict[int, list] = {}  # number -> frames, in order; sent again to a replaced consumer
        self._backlog: deque[list] = deque()
        self._sent = 0  # number of the newest message
        self._window = 0  # messages that may be in flight
        self._cut = False  # the connection was lost and is not up again
        self.address = address
        self._connect()

    def _connect(self) -> None:
        self.socket = make_socket(zmq.DEALER, serving=False)
        self.socket.linger = int(1e3 * DATA_LINGER_S)
        self.socket.heartbeat_ivl, self.socket.heartbeat_timeout = int(1e3 * QUEUE_BEAT_S), int(1e3 * QUEUE_SILENT_S)
        # the consumer recognizes this producer by its identity when it connects again
        self.socket.identity = b"o" + os.urandom(15)
        self._watch()
        connect(self.socket, self.address)
        self.socket.send(_OPEN)

    def redirect(self, address: str) -> None:
        """Continue with a consumer that replaces another: it gets all messages that the other had not taken out."""
        self.close(0)
        self._backlog.extendleft(reversed(self.unacknowledged.values()))
        self.unacknowledged, self._sent, self._window, self._cut = {}, 0, 0, False
        self.address = address
        self._connect()

    @property
    def credits(self) -> int:
        return max(0, self._window - len(self.unacknowledged))

    @property
    def backlog(self) -> int:
        return len(self._held) + len(self._backlog)

    def put(self, body: Message, arrays: Arrays | None = None) -> None:
        """Send a message, now or when a credit comes back (see `flush`)."""
        frames = encode(body, arrays)
        if self.delay_s:
            self._held.append((body, frames, now()))
        else:
            self._backlog.append(frames)
        self.flush()

    def offer(self, body: Message, arrays: Arrays | None, most_bytes: int, most: int) -> int:
        """Send a message, now or when a credit comes back, and drop the oldest of the backlog if it grows too large.

        Args:
            most_bytes: bytes that the backlog may hold.
            most: messages that the backlog may hold.

        Returns:
            The number of messages that were dropped.
        """
        self.put(body, arrays)
        waiting, dropped = sum(_bytes(frames) for frames in self._backlog), 0
        while waiting > most_bytes or len(self._backlog) > most:
            waiting -= _bytes(self._backlog.popleft())
            dropped += 1
        return dropped

    def flush(self) -> None:
        """Take returned credits and send as many messages as they allow. Call it in the actor's loop."""
        self._tend_connection()
        while (frames := receive_frames(self.socket)) is not None:
            if len(frames) != 2 or len(frames[1]) != _NUMBER.size:
                continue
            number = _NUMBER.unpack(frames[1])[0]
            if frames[0] == _CREDIT:
                self._window = number
            elif frames[0] == _ACK:
                self.unacknowledged.pop(number, None)
        while self._held and now() >= self._held[0][2] + self.delay_s:
            body, held, since = self._held.popleft()
            self._backlog.append(held)
            if self._on_release is not None:
                self._on_release(body, since, now())
        while self._backlog and self.credits and not self._cut:
            self._sent += 1
            self.unacknowledged[self._sent] = self._backlog.popleft()
            self._send(self._sent)

    def _send(self, number: int) -> None:
        self.socket.send_multipart([_DATA, _STAMP.pack(number, now()), *self.unacknowledged[number]])

    def _tend_connection(self) -> None:
        """When a cut connection is up again, send all unacknowledged messages again.

        The consumer recognizes a message that had already arrived by its number.
        """
        for lost in self._changes():
            if lost:
                self._cut = True
            elif self._cut:
                self._cut = False
                self.socket.send(_OPEN)
                for number in self.unacknowledged:
                    self._send(number)
