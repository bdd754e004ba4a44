"""Sockets over ZeroMQ with a run's keys, and bounded queues between actors. The control channel is in control.py.

A queue is an `Inbox` (the consumer, bound) and an `Outbox` in each producer. The consumer grants each producer a number
of credits; a message costs one, and its credit comes back when the consumer has taken the message out, so an inbox
never holds more than credits x producers. Socket high-water marks bound nothing and are not relied upon. Messages carry
sequence numbers: a repeated one is dropped and counted, as are frames that do not decode and messages of a kind that
the consumer does not take.

An Outbox keeps what it has no credit for in a local backlog; what bounds the backlog is admission by tickets. It also
keeps what is not acknowledged yet: for whoever may take a dead consumer's place, and to send it again where the
connection was cut.

Sockets are encrypted and closed to strangers by CurveZMQ, with a key pair made for the run: who connects must know the
public key too, which no message carries and only the run's owner can read (`make_keys`, `use_keys`).

No call here blocks but `wait`, which takes a deadline.
"""

from __future__ import annotations

import os
import resource
import socket as sockets
import struct
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol, cast

import zmq
from zmq.utils.monitor import recv_monitor_message

from asyncspec.clock import now
from asyncspec.deadlines import DATA_LINGER_S, QUEUE_BEAT_S, QUEUE_SILENT_S
from asyncspec.errors import UserError
from asyncspec.wire.codec import MAX_MESSAGE_BYTES, WireError, decode, encode
from asyncspec.wire.messages import Arrays, Message

_OPEN, _CREDIT, _DATA, _ACK = b"O", b"C", b"D", b"A"
_NUMBER = struct.Struct("<Q")


KEYS = "keys"  # file in a run's directory
MOST_SOCKETS = 16384  # of the controller; ZeroMQ's own bound is 1023, and a queue takes three

_keys: tuple[bytes, bytes] | None = None  # public, secret


def context() -> zmq.Context:
    made: zmq.Context = zmq.Context.instance()
    if cast(int, made.max_sockets) < MOST_SOCKETS:  # counts from before its first socket
        made.max_sockets = MOST_SOCKETS
    return made


def raise_limits() -> None:
    """Allow this process as many descriptors as sockets: each actor takes a few of the controller's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_SOCKETS if hard == resource.RLIM_INFINITY else min(MOST_SOCKETS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def make_keys(run_dir: Path) -> None:
    """Make a run's key pair, in a file that only its owner can read."""
    descriptor = os.open(run_dir / KEYS, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(b"\n".join(zmq.curve_keypair()))


def use_keys(run_dir: str | Path | None) -> None:
    """Encrypt the sockets this process makes from now on with a run's keys; None: do not.

    Raises:
        UserError: the run has none.
    """
    global _keys
    _keys = None
    if run_dir is not None:
        file = Path(run_dir) / KEYS
        try:
            public, secret = file.read_bytes().split(b"\n")
        except (OSError, ValueError) as error:
            raise UserError(
                f"{file}: {getattr(error, 'strerror', None) or 'not a key pair'}; expected the run's keys, which its "
                f"first launcher makes "
                "anew at each start, in a directory that all its hosts share; or deployment.encrypt=false"
            ) from None
        _keys = public, secret


def make_socket(kind: int, serving: bool, largest: int = MAX_MESSAGE_BYTES) -> zmq.Socket:
    """A socket without bounds of its own, which bind no one.

    Args:
        largest: who sends a frame of more bytes is cut off.
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


def own_address(host: str, port: int) -> str:
    """This host's address on the way to another."""
    with sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        return probe.getsockname()[0]


def bind(socket: zmq.Socket, host: str) -> str:
    """Bind to a free port of `host`; returns the address others connect to."""
    port = socket.bind_to_random_port(f"tcp://{host}")
    return f"tcp://{host}:{port}"


class HasSocket(Protocol):
    socket: zmq.Socket


def wait(ends: Iterable[HasSocket], timeout_s: float) -> None:
    """Return when one of them may have something, or after timeout_s."""
    poller = zmq.Poller()
    for end in ends:
        poller.register(end.socket, zmq.POLLIN)
    poller.poll(max(0, int(timeout_s * 1000)))


def _bytes(frames: list) -> int:
    return sum(memoryview(frame).nbytes for frame in frames)


def receive_frames(socket: zmq.Socket) -> list | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


class Inbox:
    """The consuming end of a queue."""

    def __init__(self, host: str, credits: int, takes: tuple[type[Message], ...] = (Message,)) -> None:
        """
        Args:
            host: address to bind to; the port is free-chosen, see `address`.
            credits: messages each producer may have under way.
            takes: the kinds of messages that are not rejected.
        """
        self.takes = takes
        self.socket = make_socket(zmq.ROUTER, serving=True)
        self.socket.linger = 0
        # a producer whose connection was cut comes back before its old one is known to be dead
        self.socket.router_handover = True
        self.address = bind(self.socket, host)
        self.credits = credits
        self.rejected = self.duplicates = 0
        self._seen: dict[bytes, int] = {}  # by sender, the number of its last message
        self._held: Counter[bytes] = Counter()  # by sender, messages that wait here
        self._waiting: deque[tuple[bytes, bytes, Message, Arrays, float]] = deque()

    def __len__(self) -> int:
        self._pump()
        return len(self._waiting)

    def take(self) -> tuple[Message, Arrays, float] | None:
        """The oldest message, its arrays and when it arrived; None if there is none. Gives its credit back."""
        self._pump()
        if not self._waiting:
            return None
        sender, number, body, arrays, arrived = self._waiting.popleft()
        self._held[sender] -= 1
        self.socket.send_multipart([sender, _ACK, number])
        return body, arrays, arrived

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
        if len(frames) < 4 or frames[1] != _DATA or len(frames[2]) != _NUMBER.size or frames[0] not in self._seen:
            self.rejected += 1
            return
        sender, number = frames[0], _NUMBER.unpack(frames[2])[0]
        if number <= self._seen[sender]:
            self.duplicates += 1
            # word that it was taken out was lost
            if not any(waiting[:2] == (sender, frames[2]) for waiting in self._waiting):
                self.socket.send_multipart([sender, _ACK, frames[2]])
            return
        # it skipped one, or sends without credit
        if number != self._seen[sender] + 1 or self._held[sender] >= self.credits:
            self.rejected += 1
            return
        self._seen[sender] = number
        try:
            body, arrays = decode(frames[3:])
            if not isinstance(body, self.takes):
                raise WireError(f"{type(body).__name__}: not for this inbox")
        except WireError:
            self.rejected += 1
            self.socket.send_multipart([sender, _ACK, frames[2]])  # its credit goes back all the same
            return
        self._held[sender] += 1
        self._waiting.append((sender, frames[2], body, arrays, now()))


class Watched:
    """An end that knows when its connection is lost and stands again: `socket`, and its `_monitor`."""

    socket: zmq.Socket
    _monitor: zmq.Socket

    def _watch(self) -> None:
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def _changes(self) -> Iterator[bool]:
        """What has happened to the connection since the last call: whether it was lost, each time."""
        while self._monitor.poll(0):
            yield recv_monitor_message(self._monitor)["event"] == zmq.EVENT_DISCONNECTED

    def close(self, linger: int | None = None) -> None:
        """
        Args:
            linger: milliseconds to hand over what was sent last; None: as usual.
        """
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close(linger)


class Outbox(Watched):
    """A producing end of a queue."""

    def __init__(self, address: str, delay_s: float = 0.0) -> None:
        """
        Args:
            delay_s: how long each message is held back, to test what that is charged to.
        """
        self.delay_s = delay_s
        self._due: deque = deque()
        self.unacknowledged: dict[int, list] = {}  # by number, in order; what a successor of a dead consumer gets again
        self._backlog: deque[list] = deque()
        self._sent = 0  # the number of the newest message
        self._window = 0  # messages that may be under way
        self._cut = False  # the connection is lost and does not stand again yet
        self.address = address
        self._connect()

    def _connect(self) -> None:
        self.socket = make_socket(zmq.DEALER, serving=False)
        self.socket.linger = int(1e3 * DATA_LINGER_S)
        self.socket.heartbeat_ivl, self.socket.heartbeat_timeout = int(1e3 * QUEUE_BEAT_S), int(1e3 * QUEUE_SILENT_S)
        # by which the consumer knows it again where the connection was cut
        self.socket.identity = b"o" + os.urandom(15)
        self._watch()
        self.socket.connect(self.address)
        self.socket.send(_OPEN)

    def redirect(self, address: str) -> None:
        """Go on with a consumer that has taken another's place: it gets what that one had not taken out."""
        self.close(0)
        self._due.extendleft([0.0] * (len(self.unacknowledged) if self.delay_s else 0))
        self._backlog.extendleft(reversed(self.unacknowledged.values()))
        self.unacknowledged, self._sent, self._window, self._cut = {}, 0, 0, False
        self.address = address
        self._connect()

    @property
    def credits(self) -> int:
        return max(0, self._window - len(self.unacknowledged))

    @property
    def backlog(self) -> int:
        return len(self._backlog)

    def put(self, body: Message, arrays: Arrays | None = None) -> None:
        """Send, now or when credit comes back (see `flush`)."""
        self._backlog.append(encode(body, arrays))
        if self.delay_s:
            self._due.append(time.monotonic() + self.delay_s)
        self.flush()

    def offer(self, body: Message, arrays: Arrays | None, most_bytes: int, most: int) -> int:
        """Send, now or when credit comes back; of what waits for credit the oldest is dropped to keep within most_bytes
        and `most` messages.

        Returns:
            How many messages were dropped.
        """
        self.put(body, arrays)
        waiting, dropped = sum(_bytes(frames) for frames in self._backlog), 0
        while waiting > most_bytes or len(self._backlog) > most:
            waiting -= _bytes(self._backlog.popleft())
            dropped += 1
        return dropped

    def flush(self) -> None:
        """Take returned credits and send what they allow. Call it in the actor's loop."""
        self._tend_connection()
        while (frames := receive_frames(self.socket)) is not None:
            if len(frames) != 2 or len(frames[1]) != _NUMBER.size:
                continue
            number = _NUMBER.unpack(frames[1])[0]
            if frames[0] == _CREDIT:
                self._window = number
            elif frames[0] == _ACK:
                self.unacknowledged.pop(number, None)
        while self._backlog and self.credits and not self._cut:
            if self._due:
                if time.monotonic() < self._due[0]:
                    break
                self._due.popleft()
            self._sent += 1
            self.unacknowledged[self._sent] = self._backlog.popleft()
            self._send(self._sent)

    def _send(self, number: int) -> None:
        self.socket.send_multipart([_DATA, _NUMBER.pack(number), *self.unacknowledged[number]])

    def _tend_connection(self) -> None:
        """What was under way when the connection was cut is sent again once it stands again; what arrived is known by
        its number.
        """
        for lost in self._changes():
            if lost:
                self._cut = True
            elif self._cut:
                self._cut = False
                self.socket.send(_OPEN)
                for number in self.unacknowledged:
                    self._send(number)
