"""bench fuzz: damaged input is refused. A million damaged frames through real sockets, with the run's keys and
without, and a thousand damaged configurations. None may crash anything, and none may be taken for something it does
not say.

- frames: a peer with the keys sends mutated messages, random bytes, and repeated and skipped frames to a queue and a
  control channel, between good messages. Every good message arrives, in order. Of the others, only those arrive that
  are a valid message, word for word.
- oversized: peers with the keys send frames beyond the limit. Each such peer is cut off, and nobody else notices.
- stranger: peers without the keys send raw bytes, or act as whole clients. Nothing arrives.
- configs: fields get values of other types or out of range, or their names are misspelled. Each is refused in one
  line, or the configuration then holds what the text says.
"""

from __future__ import annotations

import itertools
import math
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from asyncspec.bench.fuzz_configs import COUNTS, fuzz_configs
from asyncspec.bench.harness import Benchmark, Samples
from asyncspec.errors import UserError
from asyncspec.wire import codec, transport, waiting
from asyncspec.wire import messages as m
from asyncspec.wire.control import HEADER, MAX_CONTROL_BYTES, ControlClient, ControlServer

FRAMES, OVERSIZED, STRANGERS, CONFIGS = 1_000_000, 40, 5_000, 1_000
GOOD_EVERY = 50  # frames, or connections, between two good messages
_SESSION = bytes(8)  # of the control channel's foreign client
SETTLE_S = 20.0


class FuzzBenchmark(Benchmark):
    name = "fuzz"
    repeats = 1
    variants = ("frames", "oversized", "stranger", "configs")
    columns = COUNTS

    def measure(self, variant: str, repetition: int) -> dict[str, float]:
        rng = np.random.default_rng([repetition, 0xF0])
        if variant == "configs":
            return fuzz_configs(rng, CONFIGS)
        if variant == "oversized":
            return fuzz_oversized(OVERSIZED)
        return fuzz_frames(rng, FRAMES) if variant == "frames" else fuzz_strangers(rng, STRANGERS)

    def headline(self, samples: Samples) -> dict[str, float]:
        total = {key: sum(s[key] for variant in self.variants for s in samples[variant]) for key in COUNTS}
        return {
            "frames": samples["frames"][0]["tried"],
            "frames_unheard": samples["frames"][0]["unheard"],
            "oversized": samples["oversized"][0]["tried"],
            "oversized_cut_off": samples["oversized"][0]["refused"],
            "strangers": samples["stranger"][0]["tried"],
            "configs": samples["configs"][0]["tried"],
            "crashes": total["crashes"],
            "silent_acceptances": total["silent"],
            "good_messages_lost": total["lost"],
            "accepted_from_strangers": sum(s["accepted"] for s in samples["stranger"]),
        }

    def plot(self, axes, samples: Samples) -> None:
        axes.bar(self.variants, [samples[v][0]["refused"] / samples[v][0]["tried"] for v in self.variants])
        axes.set_ylabel("share refused")


def examples() -> list[tuple[m.Message, m.Arrays]]:
    """Return messages of many kinds."""
    ticket = m.Ticket(
        ticket_id=7,
        step=3,
        min_version=2,
        prompt="1+2=",
        answer="3",
        prompt_tokens=[3, 12, 4, 13],
        seeds=[2**61, 5],
        issued=0.5,
    )
    group = m.Group(
        ticket=ticket,
        generator="generator0",
        rewards=[0.0, 1.0],
        truncated=[False, True],
        verifications=9,
        proposed=27,
        accepted=20,
        draft_version=3,
        phases=[m.Phase("generate", 1.0, 2.0)],
        proximal_version=2,
    )
    arrays = {
        "tokens": np.arange(9, dtype=np.int32),
        "behavior": np.zeros(9, np.float32),
        "lengths": np.array([4, 5], np.int32),
    }
    return [
        (ticket, {}),
        (group, arrays),
        (m.Membership("policy", 2, ["trainer", "generator0"], "gloo"), {}),
        (m.Ready("logprob"), {}),
        (m.Welcome({"trainer": "tcp://127.0.0.1:1"}, "127.0.0.1", 5, {"policy": 3}), {}),
        (m.Interrupt("interrupted"), {}),
        (m.Lost("generator0", "generator0 died: SIGKILL", "generator0.1", True), {}),
        (m.DraftEnded(), {}),
        (m.Spans("trainer", [m.Span("train", 1.0, 2.0, 3)], {"x": 1.0}), {}),
        (m.Stop("finished"), {}),
    ]


def damaged(rng: np.random.Generator, frames: list[bytes]) -> list[bytes]:
    """Damage frames in one of nine ways. Our senders never send the result, or hardly ever."""
    frames = [bytes(frame) for frame in frames]
    at = int(rng.integers(len(frames)))
    kind = int(rng.integers(9))
    if kind == 0:
        frames[at] = frames[at][: int(rng.integers(len(frames[at]) + 1))]
    elif kind == 1:
        frames[at] += rng.bytes(int(rng.integers(1, 9)))
    elif kind == 2 and frames[at]:
        changed = bytearray(frames[at])
        for _ in range(int(rng.integers(1, 4))):
            changed[int(rng.integers(len(changed)))] = int(rng.integers(256))
        frames[at] = bytes(changed)
    elif kind == 3:
        frames.pop(at)
    elif kind == 4:
        frames.insert(at, rng.bytes(int(rng.integers(40))))
    elif kind == 5:
        frames = [rng.bytes(int(rng.integers(60))) for _ in range(int(rng.integers(6)))]
    elif kind == 6:
        rng.shuffle(frames)
    elif kind == 7:
        frames *= int(rng.integers(2, 4))
    else:
        frames[0] = b"\x93" * int(rng.integers(1, 2000))  # arrays nested in arrays
    return frames


def says_so(header: bytes, message: m.Message) -> bool:
    """Whether a header says what was decoded from it: no field was skipped or changed."""

    def within(part: Any, whole: Any) -> bool:
        if isinstance(part, dict) and isinstance(whole, dict):
            return all(key in whole and within(value, whole[key]) for key, value in part.items())
        if isinstance(part, list) and isinstance(whole, list):
            return len(part) == len(whole) and all(map(within, part, whole))
        return part == whole or (
            isinstance(part, float) and isinstance(whole, float) and math.isnan(part) and math.isnan(whole)
        )

    sent, read = msgspec.msgpack.decode(header), msgspec.msgpack.decode(codec.encode(message)[0])
    return isinstance(sent, list) and within(sent[1], read[1])


def fuzz_frames(rng: np.random.Generator, count: int) -> dict[str, float]:
    """Send damaged frames from a peer with the keys, half to an inbox and half to a control server."""
    counts = dict.fromkeys(COUNTS, 0)
    with _Served() as served:
        queue, control = served.peer(served.inbox.address), served.peer(served.server.address)
        queue.send(b"O")
        control.send(HEADER.pack(_SESSION, 0, 0))
        originals = [codec.encode(*example) for example in examples()]
        number = 0  # the number of the last queue frame that counts
        for i in itertools.count():
            if counts["tried"] == count:
                break
            frames = damaged(rng, originals[int(rng.integers(len(originals)))])
            if i % 2:
                step = int(rng.integers(-1, 3)) if rng.random() < 0.05 else 1
                framed = rng.random() < 0.95
                number += framed and step == 1 and bool(frames)
                sent = (
                    [b"D", transport._STAMP.pack(max(0, number + step - (step == 1 and bool(frames))), 0.0), *frames]
                    if framed
                    else frames
                )
            else:  # without a number, so that each is new
                framed = rng.random() < 0.95 and bool(frames)
                sent = [HEADER.pack(_SESSION, 0, 0), *frames] if framed else frames
            if not sent or (not i % 2 and len(sent) == 1 and len(sent[0]) == HEADER.size):  # the latter opens a channel
                continue
            counts["tried"] += 1
            try:
                (queue if i % 2 else control).send_multipart(sent)
                served.drain()
                if counts["tried"] % GOOD_EVERY == 0:
                    served.send_good(str(i))
                    served.settle(counts["tried"])
                    number = served.inbox._seen.get(b"peer", number)
            except Exception:
                counts["crashes"] += 1
        served.settle(counts["tried"])
        counts["lost"], counts["accepted"], counts["refused"] = served.good_lost(), served.foreign, served.refused()
        counts["unheard"] = counts["tried"] - counts["accepted"] - counts["refused"]
    # Again without the sockets: a frame that decodes must say, word for word, what was decoded.
    for _ in range(min(count, 100_000)):
        frames = damaged(rng, originals[int(rng.integers(len(originals)))])
        try:
            message, _ = codec.decode(frames)
        except codec.WireError:
            continue
        except Exception:
            counts["crashes"] += 1
            continue
        counts["silent"] += not says_so(frames[0], message)
    return counts


def fuzz_oversized(count: int) -> dict[str, float]:
    """Send frames larger than the limit from peers with the keys. Each peer loses its connection.

    They go to the control server only: the limit of an inbox is more than a small machine should send, and the same
    code enforces both limits.
    """
    counts, frame = dict.fromkeys(COUNTS, 0), bytes(MAX_CONTROL_BYTES + 1)
    with _Served() as served:
        for i in range(count):
            counts["tried"] += 1
            try:
                peer = served.peer(served.server.address)
                monitor, until = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED), time.monotonic() + SETTLE_S
                peer.send(frame)
                while not (cut := monitor.poll(10)) and time.monotonic() < until:
                    served.drain()
                counts["refused"] += bool(cut)
                peer.disable_monitor()
                peer.close(0)
                served.send_good(str(i))
            except Exception:
                counts["crashes"] += 1
        served.settle(0)
        counts["lost"], counts["accepted"] = served.good_lost(), served.foreign
    return counts


def fuzz_strangers(rng: np.random.Generator, count: int) -> dict[str, float]:
    """Connect peers without the keys: random bytes, damaged greetings, other keys, no encryption. Nothing that they
    send gets through.
    """
    counts = dict.fromkeys(COUNTS, 0)
    with _Served() as served:
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
        peers = []
        for i in range(count):
            address = (served.inbox, served.server)[i % 2].address
            counts["tried"] += 1
            try:
                if i % 50 == 0:  # a whole client, with the keys of another run or unencrypted
                    transport.use_keys(served.folder / "other" if i % 100 == 0 else None)
                    peers.append(served.peer(address))
                    for _ in range(20):
                        peers[-1].send_multipart(codec.encode(m.Ready("stranger")), zmq.NOBLOCK)
                    transport.use_keys(served.folder)
                else:
                    host, port = address.removeprefix("tcp://").split(":")
                    with socket.create_connection((host, int(port)), timeout=1) as raw:
                        raw.sendall(
                            greeting[: int(rng.integers(len(greeting) + 1))] + rng.bytes(int(rng.integers(200)))
                        )
                served.drain()
                if i % GOOD_EVERY == 0:
                    served.send_good(str(i))
            except (ConnectionError, TimeoutError):  # the server closed the connection
                pass
            except Exception:
                counts["crashes"] += 1
        served.settle(0)
        counts["lost"], counts["accepted"] = served.good_lost(), served.foreign
        counts["refused"] = counts["tried"] - counts["accepted"]
        for peer in peers:
            peer.close(0)
    return counts


class _Served:
    """An inbox and a control server with keys, and a peer that sends good messages to both."""

    def __enter__(self) -> _Served:
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        (self.folder / "other").mkdir()
        for folder in (self.folder / "other", self.folder):
            transport.make_keys(folder)
            transport.use_keys(folder)
        self.inbox, self.server = transport.Inbox("127.0.0.1", 64), ControlServer("127.0.0.1")
        self.box, self.control = (
            transport.Outbox(self.inbox.address),
            ControlClient(self.server.address, "good"),
        )
        self.expected: list[m.Message] = []  # the good messages, in order
        self.came = {"queue": 0, "control": 0}  # how many of them have arrived in their order
        self.foreign = 0  # accepted messages that are not good ones
        self._peers: list[zmq.Socket] = []
        return self

    def __exit__(self, *error) -> None:
        for item in (self.inbox.socket, self.server.socket, self.box, self.control, *self._peers):
            item.close(0)
        transport.use_keys(None)
        self._folder.cleanup()

    def peer(self, address: str) -> zmq.Socket:
        peer = transport.make_socket(zmq.DEALER, serving=False)
        peer.identity, peer.linger = (
            b"peer" if not self._peers or len(self._peers) == 1 else f"peer{len(self._peers)}".encode(),
            0,
        )
        peer.connect(address)
        self._peers.append(peer)
        return peer

    def send_good(self, text: str) -> None:
        self.expected.append(m.Ready(f"good {text}"))
        self.box.put(self.expected[-1])
        self.control.send(self.expected[-1])

    def drain(self) -> None:
        self.box.flush()
        while (item := self.inbox.take()) is not None:
            self._note("queue", item[0])
        while (item := self.server.receive()) is not None:
            self._note("control", item[1])

    def _note(self, way: str, message: m.Message) -> None:
        if not (isinstance(message, m.Ready) and message.name.startswith("good")):
            self.foreign += 1
        elif self.came[way] < len(self.expected) and message == self.expected[self.came[way]]:
            self.came[way] += 1

    def settle(self, tried: int) -> None:
        """Wait until all good messages have arrived and `tried` others are accepted or refused, SETTLE_S at most."""
        until = time.monotonic() + SETTLE_S
        while time.monotonic() < until:
            self.drain()
            if self.good_lost() == 0 and self.foreign + self.refused() >= tried:
                return
            waiting.wait([self.inbox, self.server, self.box], 0.01)

    def refused(self) -> int:
        return self.inbox.rejected + self.inbox.duplicates + self.server.rejected

    def good_lost(self) -> int:
        """Return how many good messages have not arrived, or not in order."""
        return sum(len(self.expected) - came for came in self.came.values())


def make(overrides: Sequence[str], out: Path) -> FuzzBenchmark:
    if overrides:
        raise UserError(f"bench fuzz {overrides[0]}: expected no overrides, because it runs no job")
    return FuzzBenchmark()
