"""bench publish: a version reaches its readers while the trainer computes, and publishing does not slow the trainer.

A sender and two readers, each a process, broadcast made-up weights of 64 M elements over gloo. The sender's main thread
has one core to itself; the threads that send, and the readers, share another. The main thread either computes without a
pause or is idle. One publication takes from its announcement until the last reader has the whole version.

- arrival_ratio: the time of a publication beside a trainer that computes, over the time beside an idle one.
- step_ratio: the time of a stretch of computing beside a publication, over the time without one.
- wire_bytes_ratio: bytes handed to the process group for a version in bfloat16, over those in float32.
"""

from __future__ import annotations

import os
import queue
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from asyncspec.bench.harness import Benchmark, Samples, ratio
from asyncspec.errors import UserError
from asyncspec.wire.layout import Layout, WholeSnapshot
from asyncspec.wire.messages import Membership, Publish
from asyncspec.wire.weights import Publisher, Receiver

READERS = ("generator0", "logprob")
ELEMENTS, TENSOR = 1 << 26, 1 << 22  # of all weights, and of one tensor
LATEST_S = 120.0  # for a version to arrive
SIZE, STRETCH = 256, 40  # rows of the matrices that the trainer multiplies, and products between two looks at the clock
DTYPES = ("bfloat16", "float32")


def weights() -> dict[str, torch.Tensor]:
    return {str(i): torch.full((TENSOR,), float(i)) for i in range(ELEMENTS // TENSOR)}


def read(port: int, me: str, core: int, dtype: str, orders, told) -> None:
    """Receive versions until there are no more orders. Tells the time at which each one is complete."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    receiver = Receiver(
        "127.0.0.1",
        port,
        "policy",
        me,
        "cpu",
        Layout.of(weights(), dtype),
        lambda version: told.put((me, version, time.monotonic())),
    )
    receiver.form(_membership(), LATEST_S, lambda: told.put((me, 0, time.monotonic())))
    while (version := orders.get()) is not None:
        receiver.expect(version, 1)
    receiver.close()
    os._exit(0)  # gloo's own threads outlive an interpreter that ends, and complain


def _membership() -> Membership:
    return Membership("policy", 1, ["trainer", *READERS], "gloo")


class Broadcasting:
    """The sender, in this process, and its readers."""

    def __init__(self, dtype: str, core: int) -> None:
        """
        Args:
            core: for the readers, and for the thread that sends.
        """
        context = mp.get_context("spawn")
        self.tensors, self.version = weights(), 0
        self.layout, self.told = Layout.of(self.tensors, dtype), context.Queue()
        self.orders = {name: context.Queue() for name in READERS}
        store = self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.readers = [
            context.Process(
                target=read, args=(store.port, name, core, dtype, self.orders[name], self.told), daemon=True
            )
            for name in READERS
        ]
        for reader in self.readers:
            reader.start()
        self.publisher = Publisher("127.0.0.1", store.port, "policy", "trainer", "cpu", self.layout)
        joined, own = threading.Event(), os.sched_getaffinity(0)
        os.sched_setaffinity(0, {core})  # the thread that sends inherits it
        self.publisher.form(_membership(), LATEST_S, joined.set)
        os.sched_setaffinity(0, own)
        if not joined.wait(LATEST_S):
            raise UserError(f"bench publish: the readers did not start within {LATEST_S:.0f} s")
        self.arrivals(0)

    def arrivals(self, version: int) -> float:
        """Return when the last reader has a version."""
        found: dict[str, float] = {}
        while len(found) < len(READERS):
            try:
                name, got, at = self.told.get(timeout=LATEST_S)
            except queue.Empty:
                raise UserError(f"bench publish: version {version} did not arrive within {LATEST_S:.0f} s") from None
            if got == version:
                found[name] = at
        return max(found.values())

    def publish(self) -> float:
        """Begin to publish a version; return when it was announced."""
        self.version += 1
        at: list[float] = []

        def announced(message) -> None:
            at.append(time.monotonic())
            for orders in self.orders.values():
                orders.put(message.version)

        self.publisher.publish(
            Publish("policy", self.version), WholeSnapshot(self.layout, self.tensors, "cpu"), announced
        )
        return at[0]

    @property
    def sent(self) -> int:
        """Bytes that the process group was given for each version, on average."""
        return self.publisher.sent // max(1, self.version)

    def close(self) -> None:
        for orders in self.orders.values():
            orders.put(None)
        self.publisher.close()
        for reader in self.readers:
            reader.join(10)
            if reader.is_alive():
                reader.kill()


class PublishBenchmark(Benchmark):
    name = "publish"
    repeats = 7
    variants = ("idle", "computing", "computing, no publication", "float32, idle")
    columns = ("arrival_s", "stretch_s", "megabytes")

    def __init__(self, overrides: Sequence[str], out: Path) -> None:
        if overrides:
            raise UserError(f"bench publish: {overrides[0]!r}: expected no overrides: it runs no job")
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            raise UserError("bench publish: expected two CPU cores: one for the trainer, one for sender and readers")
        os.sched_setaffinity(0, {cores[0]})
        torch.set_num_threads(1)
        self.matrix = torch.randn(SIZE, SIZE)
        self.groups = {dtype: Broadcasting(dtype, cores[1]) for dtype in DTYPES}
        for group in self.groups.values():  # the first version of each touches all memory
            group.publish()
            group.arrivals(1)

    def measure(self, variant: str, repetition: int) -> dict[str, float]:
        group = self.groups["float32" if variant.startswith("float32") else "bfloat16"]
        begun = None if "no publication" in variant else group.publish()
        stretches, ended = [], []
        if begun is not None:
            waiter = threading.Thread(target=lambda: ended.append(group.arrivals(group.version)))
            waiter.start()
        if "computing" in variant:
            until = time.monotonic() + 1.0
            while not ended and (begun is not None or time.monotonic() < until):
                start = time.monotonic()
                for _ in range(STRETCH):
                    torch.mm(self.matrix, self.matrix)
                stretches.append(time.monotonic() - start)
        measured = {} if not stretches else {"stretch_s": statistics.median(stretches)}
        if begun is not None:
            waiter.join(LATEST_S)
            measured |= {"arrival_s": ended[0] - begun, "megabytes": group.sent / 1e6}
            while group.publisher.busy:
                time.sleep(0.001)
        return measured

    def headline(self, samples: Samples) -> dict[str, float]:
        megabytes = {
            name: statistics.median(s["megabytes"] for s in samples[name]) for name in ("idle", "float32, idle")
        }
        return {
            "arrival_ratio": ratio(samples, "arrival_s", "computing", "idle"),
            "step_ratio": ratio(samples, "stretch_s", "computing", "computing, no publication"),
            "wire_bytes_ratio": megabytes["idle"] / megabytes["float32, idle"],
            "float32_arrival_ratio": ratio(samples, "arrival_s", "float32, idle", "idle"),
        }

    def plot(self, axes, samples: Samples) -> None:
        shown = [variant for variant in samples if "arrival_s" in samples[variant][0]]
        axes.boxplot([[s["arrival_s"] for s in samples[variant]] for variant in shown], orientation="horizontal")
        axes.set_yticks(range(1, len(shown) + 1), shown)
        axes.set_xlabel("seconds from the announcement until both readers have the version")
        axes.set_xlim(left=0)

    def close(self) -> None:
        for group in self.groups.values():
            group.close()


def make(overrides: Sequence[str], out: Path) -> PublishBenchmark:
    return PublishBenchmark(overrides, out)
