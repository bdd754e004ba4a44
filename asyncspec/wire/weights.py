"""Versioned weight broadcast: an immutable snapshot, a staging buffer, a commit record, a swap between engine steps.

One sender (the trainer for the policy; the draft adapter or, for mtp, the trainer for the draft) and its receivers form
a broadcast group: over NCCL if each member has its own GPU, else over gloo through host memory, in one code path. The
controller decides the members and the backend. Each membership is an epoch, with its own group and its own thread in
each member. When a member dies, the others get a new epoch without it, in which the sender begins with its newest
version. A thread that still hangs in the old epoch is left to its deadline.

    sender    snapshot(v+1) | announce -> broadcast buckets, record          (a thread; training continues)
    receiver                    staging <- buckets, record matches v+1       (a thread; generation continues)
    receiver                                                      take() -> v+1, between two engine steps

A reader sees version v or v+1, never a mixture: the staging buffer is handed over only after the commit record
(version, epoch, elements) has arrived and matched. Every collective has a deadline, and so has the wait for a new epoch
after a failure.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist

from asyncspec.deadlines import COLLECTIVE_S, REGROUP_S
from asyncspec.errors import first_line
from asyncspec.wire.messages import Broken, Membership, Message, Publish
from asyncspec.wire.transport import own_address

BUCKET_ELEMENTS = 1 << 24  # 64 MB; a bucket is broadcast, and gathered from several ranks, as one


class BroadcastError(RuntimeError):
    """A broadcast failed, or delivered something other than what was announced."""


@dataclass(frozen=True)
class Layout:
    """The positions of named float32 tensors in one flat buffer."""

    entries: tuple[tuple[str, tuple[int, ...], int], ...]  # name, shape, first element
    elements: int

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Layout:
        entries, offset = [], 0
        for name, tensor in tensors.items():
            entries.append((name, tuple(tensor.shape), offset))
            offset += tensor.numel()
        return cls(tuple(entries), offset)

    @property
    def buckets(self) -> list[tuple[list[str], int, int]]:
        """Consecutive ranges of the buffer, each of whole tensors: (their names, first element, end)."""
        found, names, first = [], [], 0
        for name, shape, offset in self.entries:
            end = offset + torch.Size(shape).numel()
            names.append(name)
            if end - first >= BUCKET_ELEMENTS or end == self.elements:
                found.append((names, first, end))
                names, first = [], end
        return found

    @torch.no_grad()
    def snapshot(self, tensors: Mapping[str, torch.Tensor], device: str) -> torch.Tensor:
        """Copy all tensors into one on `device`, float32 [elements]; later changes of the tensors do not reach it."""
        flat = torch.empty(self.elements, dtype=torch.float32, device=device)
        for name, _shape, offset in self.entries:
            flat[offset : offset + tensors[name].numel()] = tensors[name].detach().reshape(-1)
        return flat

    def views(self, flat: torch.Tensor, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        """Return tensors by name as views of a flat buffer, or, given `names`, of one bucket that holds just these."""
        inside = self.entries if names is None else [entry for entry in self.entries if entry[0] in names]
        first = inside[0][2] if inside else 0
        return {
            name: flat[offset - first : offset - first + torch.Size(shape).numel()].view(shape)
            for name, shape, offset in inside
        }


class Snapshot(Protocol):
    """One version's weights, which later training does not change."""

    def begin(self) -> Iterator[torch.Tensor]:
        """Return an iterator over the buckets to send, float32 [elements of the bucket]. The owner calls this, and a
        thread iterates. A new call ends the previous iteration.
        """


class WholeSnapshot:
    """A snapshot of weights that are whole on one device."""

    def __init__(self, layout: Layout, tensors: Mapping[str, torch.Tensor], device: str) -> None:
        self.layout, self.flat = layout, layout.snapshot(tensors, device)

    def begin(self) -> Iterator[torch.Tensor]:
        return (self.flat[first:end] for _, first, end in self.layout.buckets)


class BroadcastGroup:
    """One epoch of a broadcast group."""

    def __init__(
        self, store_host: str, store_port: int, membership: Membership, timeout_s: float, me: str, device: str
    ):
        """Join the group; collective over the members.

        Args:
            me: this member's name.
            device: where this member computes; payloads are there with NCCL, in host memory with gloo (`self.device`).

        Raises:
            BroadcastError: not all members joined within timeout_s.
        """
        join_timeout, timeout = timedelta(seconds=timeout_s), timedelta(seconds=COLLECTIVE_S)
        kind, epoch, members = membership.kind, membership.epoch, membership.members
        self.kind, self.epoch, self.members = kind, epoch, members
        self.device = device if membership.backend == "nccl" else "cpu"
        self._stream: torch.cuda.Stream | None = None
        self._group: Any  # of torch.distributed, which names no common type that has broadcast()
        rank, size = members.index(me), len(members)
        try:
            store = dist.TCPStore(store_host, store_port, is_master=False, timeout=join_timeout)
            prefix = dist.PrefixStore(f"{kind}/{epoch}", store)
            # The group's own rendezvous would wait for a collective's timeout; joining has another one.
            prefix.set(f"joined/{me}", "")
            prefix.wait([f"joined/{member}" for member in members], join_timeout)
            if membership.backend == "nccl":
                # A collective that waits for a dead member ends its communicator, not this process.
                os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
                torch.cuda.set_device(device)  # each thread has its own current device
                self._stream = torch.cuda.Stream(device)
                nccl = dist.ProcessGroupNCCL.Options()
                nccl._timeout = timeout
                self._group = dist.ProcessGroupNCCL(prefix, rank, size, nccl)
            else:
                gloo: Any = dist.ProcessGroupGloo
                options = gloo._Options()
                options._timeout = timeout
                options._devices = [gloo.create_device(hostname=own_address(store_host, store_port))]
                self._group = gloo(prefix, rank, size, options)
        except RuntimeError as error:
            raise BroadcastError(f"{kind} group, epoch {epoch}, members {members}: {error}") from None

    def broadcast(self, flat: torch.Tensor) -> None:
        """Send (first member) or receive (others) in place. Collective; blocks until done or until the deadline."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        data = flat.view(torch.uint8)  # every backend can send bytes, whatever the dtype
        try:
            if self._stream is None:
                self._group.broadcast([data], options).wait()
                return
            # Wait for the work that the default stream has so far (the snapshot), but do not delay its later work.
            self._stream.wait_stream(torch.cuda.default_stream(self.device))
            with torch.cuda.stream(self._stream):
                self._group.broadcast([data], options).wait()
            self._stream.synchronize()
        except RuntimeError as error:
            raise BroadcastError(
                f"{self.kind} broadcast, epoch {self.epoch}, members {self.members}: {error}"
            ) from None

    def record(self, version: int, elements: int) -> torch.Tensor:
        """Return the commit record that follows a payload: version, epoch, elements."""
        return torch.tensor([version, self.epoch, elements], dtype=torch.int64, device=self.device)


class _Lane:
    """One epoch in one member: its group, and the tasks of its thread, in order."""

    def __init__(self, membership: Membership, device: str) -> None:
        self.membership = membership
        self.device = device if membership.backend == "nccl" else "cpu"
        self.group: BroadcastGroup | None = None
        self.busy = False
        self.error: BaseException | None = None
        self.failed_at = 0.0
        self.tasks: queue.Queue[Callable[[], None] | None] = queue.Queue()

    @property
    def joined(self) -> BroadcastGroup:
        assert self.group is not None  # the first task of this lane joined the group
        return self.group

    def run(self) -> None:
        while (task := self.tasks.get()) is not None:
            try:
                task()
            except BaseException as error:  # handed to the owner by check()
                self.failed_at, self.error, self.busy = time.monotonic(), error, False
                return


class _Worker:
    """Runs collectives in a thread. Errors of the thread are raised in the owner's calls."""

    def __init__(self, name: str, store_host: str, store_port: int, kind: str, me: str, device: str) -> None:
        self._name, self._where, self.kind = name, (store_host, store_port), kind
        self._me, self._device = me, device
        self._lane: _Lane | None = None
        self._reported = 0  # the newest epoch whose failure was reported to the controller

    @property
    def epoch(self) -> int:
        return self._lane.membership.epoch if self._lane is not None else 0

    def tend(self, send: Callable[[Message], None]) -> None:
        """Report to the controller, once, that this epoch has failed. The owner calls this in each turn.

        Args:
            send: callable(message), which sends to the controller.
        """
        if self._lane is not None and self._lane.error is not None and self._reported != self.epoch:
            self._reported = self.epoch
            send(Broken(self._me, self.kind, self.epoch, first_line(self._lane.error)))

    def form(self, membership: Membership, timeout_s: float, joined: Callable[[], None]) -> None:
        """Join a new epoch within timeout_s; `joined` is called in the thread once all members have joined."""
        self.close()
        lane = self._lane = _Lane(membership, self._device)

        def task() -> None:
            lane.group = BroadcastGroup(*self._where, membership, timeout_s, self._me, self._device)
            joined()

        lane.tasks.put(task)
        threading.Thread(target=lane.run, name=f"{self._name}-{membership.epoch}", daemon=True).start()

    def check(self) -> None:
        """Raise a BroadcastError if the thread failed and no new epoch was formed within REGROUP_S."""
        lane = self._lane
        if lane is not None and lane.error is not None and time.monotonic() - lane.failed_at > REGROUP_S:
            raise BroadcastError(str(lane.error)) from lane.error

    def close(self) -> None:
        if self._lane is not None:
            self._lane.tasks.put(None)


class Publisher(_Worker):
    """The sending end: it broadcasts one snapshot at a time."""

    def __init__(self, store_host: str, store_port: int, kind: str, me: str, device: str) -> None:
        self.hold_back: Callable[[int], None] | None = None  # called in the thread before it sends a version
        self._newest: tuple[Publish, Snapshot] | None = None
        self._sent_in = 0  # the newest epoch in which anything was sent
        super().__init__(f"publish-{kind}", store_host, store_port, kind=kind, me=me, device=device)

    @property
    def busy(self) -> bool:
        return self._lane is not None and self._lane.busy

    def tend(self, send: Callable[[Message], None]) -> None:
        """Report a failure, as every worker does, and send the newest version to the members of a new epoch."""
        super().tend(send)
        lane = self._lane
        if lane is None or lane.group is None or lane.busy or lane.error is not None:
            return
        if self._newest is not None and self._sent_in < self.epoch:
            self._send(send)

    def publish(self, announcement: Publish, snapshot: Snapshot, send: Callable[[Message], None]) -> None:
        """Announce a version and broadcast it in the background. If this epoch has failed, `tend` sends it in the next.

        Args:
            announcement: the message to the controller; its epoch is filled in here.
            send: callable(message), which sends to the controller.

        Raises:
            BroadcastError: the previous broadcast is not finished (wait until `busy` is False), or no new epoch was
                formed after a failure.
        """
        self.check()
        if self.busy:
            raise BroadcastError(f"version {announcement.version} published before the previous broadcast was finished")
        self._newest = (announcement, snapshot)
        self._send(send)

    def begin_with(self, announcement: Publish, snapshot: Snapshot) -> None:
        """Set what the members of the first epoch are sent: the version from which the run resumes."""
        self._newest = (announcement, snapshot)

    def _send(self, send: Callable[[Message], None]) -> None:
        """Announce and broadcast the newest version in this epoch."""
        assert self._lane is not None and self._newest is not None  # an epoch was formed, and a version published
        lane, (announcement, snapshot) = self._lane, self._newest
        self._sent_in = self.epoch
        lane.busy = lane.error is None
        send(msgspec.structs.replace(announcement, epoch=self.epoch))
        payloads = snapshot.begin()

        def task() -> None:
            group = lane.joined
            if self.hold_back is not None:
                self.hold_back(announcement.version)
            elements = 0
            for payload in payloads:
                group.broadcast(payload.to(lane.device))
                elements += payload.numel()
            group.broadcast(group.record(announcement.version, elements))
            lane.busy = False

        lane.tasks.put(task)


class Receiver(_Worker):
    """The receiving end: staging buffers fill in the background; `take` hands over the newest complete version."""

    def __init__(
        self,
        store_host: str,
        store_port: int,
        kind: str,
        me: str,
        device: str,
        layout: Layout,
        received: Callable[[int], None],
        keep: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """
        Args:
            received: called in the thread with each version that is complete in staging.
            keep: for one of several ranks that take versions together: callable(name, received tensor) -> a copy of
                this rank's part of it. A complete version then stays until it or a newer one is taken. None: only the
                newest version stays, with whole tensors.
        """
        self.layout = layout
        self._received, self._keep = received, keep
        self._complete: dict[int, dict[str, torch.Tensor]] = {}
        self._taken = 0
        self._lock = threading.Lock()
        super().__init__(f"receive-{kind}", store_host, store_port, kind=kind, me=me, device=device)

    def expect(self, version: int, epoch: int) -> None:
        """Take part in the broadcast of `version`, unless it belongs to another epoch."""
        lane = self._lane
        if lane is None or epoch != self.epoch:
            return

        def task() -> None:
            group = lane.joined
            tensors: dict[str, torch.Tensor] = {}
            for names, first, end in self.layout.buckets:
                bucket = torch.empty(end - first, dtype=torch.float32, device=lane.device)
                group.broadcast(bucket)
                arrived = self.layout.views(bucket, names)
                tensors |= (
                    arrived
                    if self._keep is None
                    else {name: self._keep(name, tensor) for name, tensor in arrived.items()}
                )
            expected = group.record(version, self.layout.elements)
            record = torch.zeros_like(expected)
            group.broadcast(record)
            if not torch.equal(record, expected):
                raise BroadcastError(f"{self.kind}: commit record {record.tolist()}, expected {expected.tolist()}")
            with self._lock:
                # the epoch is over, or the version was sent again for new members
                if lane is not self._lane or version <= self._taken:
                    return
                if self._keep is None:
                    self._complete.clear()
                self._complete[version] = tensors
            self._received(version)

        lane.tasks.put(task)

    @property
    def complete(self) -> list[int]:
        """The versions that can be taken."""
        with self._lock:
            return list(self._complete)

    def take(self, version: int | None = None) -> tuple[int, dict[str, torch.Tensor]] | None:
        """Return a complete version and its tensors, once, and drop older ones; None if there is no new version.

        Args:
            version: which complete version to take; None: the newest.
        """
        self.check()
        with self._lock:
            if not self._complete:
                return None
            self._taken = version = max(self._complete) if version is None else version
            tensors = self._complete[version]
            self._complete = {later: held for later, held in self._complete.items() if later > version}
        return version, tensors
