"""bench fuzz: what is none of ours is refused. A million damaged frames through real sockets, with the run's keys and without, and a
thousand damaged configurations: none may crash anything, none may be taken for something it does not say.

- frames: a peer that has the keys sends mutated messages, random bytes, repeated, skipped and oversized ones to a queue and a control
  channel, between good ones. Every good one arrives, in order; of the others only those arrive that say, word for word, a message.
- stranger: the same bytes from peers without the keys; nothing arrives.
- configs: fields with values of other types, out of range, misspelt; each is refused in one line, or is what the configuration then says.
"""

from __future__ import annotations

import math
import tempfile
import time
from pathlib import Path
from typing import Any, Sequence

import msgspec
import numpy as np
import yaml
import zmq

from asyncspec import config as configuration
from asyncspec import messages as m
from asyncspec import transport
from asyncspec.bench.harness import Benchmark, Samples

FRAMES, CONFIGS = 1_000_000, 1_000
GOOD_EVERY = 50  # frames between two good ones
SETTLE_S = 20.0
_COUNTS = ("tried", "refused", "accepted", "crashes", "silent", "lost")


class FuzzBenchmark(Benchmark):
    name = "fuzz"
    repeats = 1
    variants = ("frames", "stranger", "configs")
    columns = _COUNTS

    def measure(self, variant: str, repetition: int) -> dict[str, float]:
        rng = np.random.default_rng([repetition, 0xF0])
        if variant == "configs":
            return fuzz_configs(rng, CONFIGS)
        return fuzz_frames(rng, FRAMES // 2, stranger=variant == "stranger")

    def headline(self, samples: Samples) -> dict[str, float]:
        total = {key: sum(s[key] for variant in self.variants for s in samples[variant]) for key in _COUNTS}
        return {"frames": sum(s["tried"] for v in ("frames", "stranger") for s in samples[v]), "configs": samples["configs"][0]["tried"],
                "crashes": total["crashes"], "silent_acceptances": total["silent"], "good_messages_lost": total["lost"],
                "accepted_from_strangers": sum(s["accepted"] for s in samples["stranger"])}

    def plot(self, axes, samples: Samples) -> None:
        axes.bar(self.variants, [samples[v][0]["refused"] / samples[v][0]["tried"] for v in self.variants])
        axes.set_ylabel("share refused")


def examples() -> list[tuple[m.Message, m.Arrays]]:
    """A message of many kinds."""
    ticket = m.Ticket(7, 3, 2, "1+2=", "3", [3, 12, 4, 13], [2**61, 5], 0.5)
    group = m.Group(ticket, "generator0", [0.0, 1.0], 0, 9, 27, 20, 3, [m.Phase("generate", 1.0, 2.0)], 2)
    arrays = {"tokens": np.arange(9, dtype=np.int32), "behaviour": np.zeros(9, np.float32), "lengths": np.array([4, 5], np.int32)}
    return [(ticket, {}), (group, arrays), (m.Membership("policy", 2, ["trainer", "generator0"], "gloo"), {}), (m.Ready("logprob"), {}),
            (m.Welcome({"trainer": "tcp://127.0.0.1:1"}, "127.0.0.1", 5, {"policy": 3}), {}), (m.Interrupt("interrupted"), {}),
            (m.Spans("trainer", [m.Span("train", 1.0, 2.0, 3)], {"x": 1.0}), {}), (m.Stop("finished"), {})]


def damaged(rng: np.random.Generator, frames: list[bytes]) -> list[bytes]:
    """Frames as no sender of ours sends them, or hardly."""
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
        frames[0] = b"\x93" * int(rng.integers(1, 2000))  # nested deeper and deeper
    return frames


def says_so(header: bytes, message: m.Message) -> bool:
    """Whether a header says what was read from it: no field of it was passed over or changed."""
    def within(part: Any, whole: Any) -> bool:
        if isinstance(part, dict) and isinstance(whole, dict):
            return all(key in whole and within(value, whole[key]) for key, value in part.items())
        if isinstance(part, list) and isinstance(whole, list):
            return len(part) == len(whole) and all(map(within, part, whole))
        return part == whole or (isinstance(part, float) and isinstance(whole, float) and math.isnan(part) and math.isnan(whole))

    sent, read = msgspec.msgpack.decode(header), msgspec.msgpack.decode(m.encode(message)[0])
    return isinstance(sent, list) and within(sent[1], read[1])


def fuzz_frames(rng: np.random.Generator, count: int, stranger: bool) -> dict[str, float]:
    """Damaged frames to an inbox and a control server, half each.

    Args:
        stranger: the sender lacks the keys.
    """
    counts = dict.fromkeys(_COUNTS, 0)
    with tempfile.TemporaryDirectory() as folder:
        transport.make_keys(Path(folder))
        transport.use_keys(Path(folder))
        inbox, server = transport.Inbox("127.0.0.1", 64), transport.ControlServer("127.0.0.1")
        good_box, good_control = transport.Outbox(inbox.address), transport.ControlClient(server.address, "good")
        senders = []
        for address in (inbox.address, server.address):
            if stranger:
                transport.use_keys(Path(folder) / "none")
            sender = transport._socket(zmq.DEALER, serving=False)
            sender.identity, sender.linger = b"peer", 0
            sender.sndhwm = 1000
            sender.connect(address)
            senders.append(sender)
        expected, received, told = [], [], []
        originals = [m.encode(*example) for example in examples()]
        number = 0

        def good(message: m.Message) -> bool:
            return isinstance(message, m.Ready) and message.name.startswith("good")

        def drain() -> None:
            while (item := inbox.take()) is not None:
                received.append(item[0])
            while (item := server.receive()) is not None:
                told.append(item[1])

        def send(sender: zmq.Socket, frames: list[bytes]) -> None:
            until = time.monotonic() + 0.2
            while frames and time.monotonic() < until:
                try:
                    sender.send_multipart(frames, zmq.NOBLOCK)
                    return
                except zmq.Again:  # strangers' frames go nowhere
                    if stranger:
                        return
                    drain()

        senders[0].send(b"O") if not stranger else None
        for i in range(count):
            frames = damaged(rng, originals[int(rng.integers(len(originals)))])
            if i % 2:
                skipped = int(rng.integers(-1, 3)) if rng.random() < 0.05 else 1
                framed = rng.random() < 0.95
                frames = [b"D", transport._NUMBER.pack(number + skipped if number + skipped > 0 else 0), *frames] if framed else frames
                number += skipped == 1 and framed
            counts["tried"] += 1
            try:
                send(senders[0] if i % 2 else senders[1], frames)
                if i % GOOD_EVERY == 0:
                    expected.append(m.Ready(f"good {i}"))
                    good_box.put(expected[-1])
                    good_control.send(expected[-1])
                    drain()
                    good_box.flush()
            except Exception:
                counts["crashes"] += 1
        until = time.monotonic() + SETTLE_S
        while time.monotonic() < until and min(len([b for b in got if good(b)]) for got in (received, told)) < len(expected):
            try:
                drain()
                good_box.flush()
            except Exception:
                counts["crashes"] += 1
            time.sleep(0.01)
        counts["lost"] = sum([b for b in got if good(b)] != expected for got in (received, told))
        foreign = [b for got in (received, told) for b in got if not good(b)]
        counts["accepted"] = len(foreign)
        counts["refused"] = counts["tried"] - len(foreign)
        for item in (inbox, server, good_box, *senders):
            (item.socket if hasattr(item, "socket") else item).close(0)
        good_control.close(0)
        transport.use_keys(Path(folder) / "none")
    # What a frame that is accepted says is looked at once more without the sockets.
    for _ in range(min(count, 100_000)):
        frames = damaged(rng, originals[int(rng.integers(len(originals)))])
        try:
            message, _ = m.decode(frames)
        except m.WireError:
            continue
        except Exception:
            counts["crashes"] += 1
            continue
        counts["silent"] += not says_so(frames[0], message)
    return counts


_VALUES = ("", "x", "-1", "0", "1", "1.5", "1e400", "nan", "inf", "-inf", "true", "null", "[]", "{}", "[1, 2]", "{a: 1}", "0x10", "1_000", "1e-9",
           "9" * 30, "'1'", "~", "../..", "/nonexistent", "none", "auto", "é", "a b", "a=b", "${seed}", "???", "!!python/object:os.system {}")


def fuzz_configs(rng: np.random.Generator, count: int) -> dict[str, float]:
    """Overrides with damaged names and values."""
    counts = dict.fromkeys(_COUNTS, 0)
    names = [name for name, _, _ in configuration.describe()]
    for _ in range(count):
        name, text = str(rng.choice(names)), str(rng.choice(_VALUES))
        misspelt = rng.random() < 0.25
        if misspelt:
            at = int(rng.integers(len(name)))
            name = (name[:at] + name[at + 1 :], name[:at] + "q" + name[at:], name.upper())[int(rng.integers(3))]
        counts["tried"] += 1
        try:
            loaded = configuration.load("tiny", [f"{name}={text}"])
        except configuration.ConfigError as error:
            counts["refused"] += 1
            counts["silent"] += "\n" in str(error) or not str(error)
            continue
        except Exception:
            counts["crashes"] += 1
            continue
        counts["accepted"] += 1
        value = configuration.value_of(loaded, name) if name in names else None
        counts["silent"] += (name not in names) or not same(value, text)
    return counts


def same(value: Any, text: str) -> bool:
    """Whether a field's value is what its text says."""
    if text.startswith("${"):  # another field's value
        return True
    if isinstance(value, str):
        return value == text
    said = yaml.safe_load(text)
    if isinstance(said, str):  # YAML 1.1 takes 1e-9 for a word
        try:
            said = float(said)
        except ValueError:
            return False
    return type(said) in (int, float, bool) and isinstance(said, bool) == isinstance(value, bool) and value == type(value)(said)


def make(overrides: Sequence[str], out: Path) -> FuzzBenchmark:
    if overrides:
        raise configuration.ConfigError(f"bench fuzz {overrides[0]}: expected no overrides; it runs no job")
    return FuzzBenchmark()
