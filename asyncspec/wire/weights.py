"""Versioned weight broadcast: an immutable snapshot, a staging buffer, a commit record, a swap between engine steps.

One sender (the trainer for the policy; the draft adapter or, for mtp, the trainer for the draft) and its receivers form
a broadcast group: over NCCL if each member has its own GPU, else over gloo through host memory, in one code path. The
controller decides the members and the backend. Each membership is an epoch, with its own group and its own thread in
each member. When a member dies or joins, all get a new epoch. A version that was on its way is sent again to all;
otherwise only the members that lack the newest version get it, in a group of their own with the sender (catch-up).

    sender    snapshot(v+1) | announce -> broadcast buckets, record          (a thread; training continues)
    receiver                    staging <- buckets, record matches v+1       (a thread; generation continues)
    receiver                                                      take() -> v+1, between two engine steps

A version is announced once its first bucket is ready. Weights travel in the dtype that the policy computes in.

A reader sees version v or v+1, never a mixture: the staging buffer is handed over only after the commit record
(version, epoch, elements, checksum) has arrived and matched. Every collective has a deadline, and so has the wait for a
new epoch after a failure.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import msgspec
import torch

from asyncspec.deadlines import PREPARED_S, REGROUP_S
from asyncspec.errors import first_line
from asyncspec.wire.broadcast import BroadcastError, BroadcastGroup
from asyncspec.wire.layout import Layout, Snapshot, checksum, settle, side_stream
from asyncspec.wire.messages import Broken, Membership, Message, Publish, Whole

__all__ = ["BroadcastError", "Publisher", "Receiver"]


class _Lane:
    """One epoch in one member: its group, and the tasks of its thread, in order."""

    def __init__(self, membership: Membership, device: str) -> None:
        """
        Args:
            device: where this member computes.
        """
        self.membership, self._where = membership, device
        self.device = device if membership.backend == "nccl" else "cpu"  # of payloads
        self.group: BroadcastGroup | None = None
        self.busy = self.reported = False
        self.error: BaseException | None = None
        self.failed_at = 0.0
        self.announcement: Publish | None = None  # to be sent once `prepared` is set
        self.prepared = threading.Event()
        self.tasks: queue.Queue[Callable[[], None] | None] = queue.Queue()

    @property
    def joined(self) -> BroadcastGroup:
        assert self.group is not None  # the first task of this lane joined the group
        return self.group

    @property
    def idle(self) -> bool:
        """Whether the group is joined, works, and sends nothing."""
        return self.group is not None and not self.busy and self.error is None

    def run(self) -> None:
        with side_stream(self._where):
            while (task := self.tasks.get()) is not None:
                try:
                    task()
                except BaseException as error:  # handed to the owner by check()
                    self.failed_at, self.error, self.busy = time.monotonic(), error, False
                    return

    def end(self) -> None:
        """End the thread, and what it waits for where that is possible."""
        self.tasks.put(None)
        if self.group is not None:
            self.group.end()


class _Worker:
    """Runs collectives in threads. Errors of a thread are raised in the owner's calls."""

    def __init__(
        self, name: str, store_host: str, store_port: int, kind: str, me: str, device: str, layout: Layout
    ) -> None:
        self._name, self._where, self.kind = name, (store_host, store_port), kind
        self._me, self._device, self.layout = me, device, layout
        self._lane: _Lane | None = None  # of all members
        self._side: _Lane | None = None  # of the sender and those that lack its newest version
        self.whole: Whole | None = None  # the newest version that this member has sent or received whole

    @property
    def epoch(self) -> int:
        return self._lane.membership.epoch if self._lane is not None else 0

    @property
    def _lanes(self) -> list[_Lane]:
        return [lane for lane in (self._lane, self._side) if lane is not None]

    def tend(self, send: Callable[[Message], None]) -> None:
        """Report to the controller, once, that this epoch has failed. The owner calls this in each turn.

        Args:
            send: callable(message), which sends to the controller.
        """
        for lane in self._lanes:
            if lane.error is not None and not lane.reported:
                lane.reported = True
                send(Broken(self._me, self.kind, lane.membership.epoch, first_line(lane.error)))

    def form(self, membership: Membership, timeout_s: float, joined: Callable[[], None]) -> None:
        """Join a new epoch, or its catch-up group, within timeout_s; `joined` is called in the thread once all members
        have joined.
        """
        if membership.catch_up and membership.epoch != self.epoch:
            return
        missed = membership.since if membership.since != self.epoch else 0
        if membership.since and self._lane is not None and not missed:
            members = membership.whole(self._lane.membership.members)
            membership = msgspec.structs.replace(membership, members=members, since=0, left=[])
        lane = _Lane(membership, self._device)
        if membership.catch_up:
            self._side = lane
        else:
            self.close()
            self._lane, self._side = lane, None

        def task() -> None:
            if missed:  # a message was lost with the connection; the controller tells all members again
                raise BroadcastError(f"{self.kind} group, epoch {membership.epoch}: epoch {missed} was not heard of")
            lane.group = BroadcastGroup(
                *self._where, membership, timeout_s, self._me, self._device, self.layout.largest
            )
            if lane not in self._lanes:  # the members have another epoch already
                lane.group.end()
                return
            joined()

        lane.tasks.put(task)
        side = "-catch-up" if membership.catch_up else ""
        threading.Thread(target=lane.run, name=f"{self._name}-{membership.epoch}{side}", daemon=True).start()

    def check(self) -> None:
        """Raise a BroadcastError if the thread failed and no new epoch was formed within REGROUP_S."""
        for lane in self._lanes:
            if lane.error is not None and time.monotonic() - lane.failed_at > REGROUP_S:
                raise BroadcastError(str(lane.error)) from lane.error

    def close(self) -> None:
        for lane in self._lanes:
            lane.end()


class Publisher(_Worker):
    """The sending end: it broadcasts one snapshot at a time."""

    def __init__(self, store_host: str, store_port: int, kind: str, me: str, device: str, layout: Layout) -> None:
        self.hold_back: Callable[[int], None] | None = None  # called in the thread before it sends a version
        self._newest: tuple[Publish, Snapshot] | None = None
        self._unsent = False  # the newest version has not yet been sent to all members of an epoch
        self._untold = False  # nor has it been announced
        self.sent = 0  # bytes given to the process groups, each counted once however many members receive it
        super().__init__(f"publish-{kind}", store_host, store_port, kind, me, device, layout)

    @property
    def busy(self) -> bool:
        """Whether the newest version is being sent, or is still to be announced: each version is announced in turn."""
        return self._untold or self._sending

    @property
    def _sending(self) -> bool:
        return any(lane.busy for lane in self._lanes)

    def tend(self, send: Callable[[Message], None]) -> None:
        """Report a failure, as every worker does, announce what is ready, and send the newest version to members of a
        new epoch that lack it.
        """
        super().tend(send)
        self._announce(send)
        main, side = self._lane, self._side
        if self._newest is None or main is None or self._sending:
            return
        if self._unsent:
            if main.idle:
                self._send(main)
        elif side is not None and side.idle and not side.prepared.is_set() and not main.prepared.is_set():
            self._send(side)  # nobody was sent anything in this epoch

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
        self.begin_with(announcement, snapshot)
        main = self._lane
        if main is not None and main.error is None:
            self._send(main)
            main.prepared.wait(PREPARED_S)  # the other ranks' shards of the first bucket
            self._announce(send)

    def begin_with(self, announcement: Publish, snapshot: Snapshot) -> None:
        """Set what the members of the next epoch are sent first."""
        self._newest, self._unsent, self._untold = (announcement, snapshot), True, True

    def _announce(self, send: Callable[[Message], None]) -> None:
        for lane in self._lanes:
            if lane.announcement is not None and lane.prepared.is_set():
                send(lane.announcement)
                lane.announcement, self._untold = None, False

    def _send(self, lane: _Lane) -> None:
        """Broadcast the newest version in a lane. It is announced when the first bucket is ready."""
        assert self._newest is not None  # a version was published
        announcement, snapshot = self._newest
        lane.busy, lane.prepared = True, threading.Event()
        lane.announcement = msgspec.structs.replace(
            announcement, epoch=lane.membership.epoch, catch_up=lane.membership.catch_up
        )
        payloads, prepared = snapshot.begin(), lane.prepared

        def task() -> None:
            elements, found, met = 0, 0, False
            try:
                for payload in payloads:
                    payload = payload.to(lane.device)
                    settle(self._device)
                    prepared.set()
                    if not met:
                        if self.hold_back is not None:
                            self.hold_back(announcement.version)
                        lane.joined.meet(announcement.version)
                        met = True
                    lane.joined.broadcast(payload)
                    self.sent += payload.nbytes
                    elements, found = elements + payload.numel(), checksum(payload, found)
            finally:
                payloads.close()  # the other ranks need not wait for this one to take the rest
            lane.joined.broadcast(lane.joined.record(announcement.version, elements, found))
            self.whole = Whole(announcement.version, found)
            if lane is self._lane:
                self._unsent = False
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
        self._received, self._keep = received, keep
        self._complete: dict[int, dict[str, torch.Tensor]] = {}
        self._taken = 0
        self._lock = threading.Lock()
        super().__init__(f"receive-{kind}", store_host, store_port, kind, me, device, layout)

    def expect(self, version: int, epoch: int, catch_up: bool = False) -> None:
        """Take part in the broadcast of `version`, unless it belongs to another epoch."""
        lane = self._side if catch_up else self._lane
        if lane is None or epoch != self.epoch:
            return

        def task() -> None:
            group = lane.joined
            group.meet(version)
            if self._keep is None:  # one version at a time is in staging
                with self._lock:
                    self._complete.clear()
            tensors: dict[str, torch.Tensor] = {}
            found = 0
            for names, first, end in self.layout.buckets:
                bucket = torch.empty(end - first, dtype=self.layout.dtype, device=lane.device)
                group.broadcast(bucket)
                found = checksum(bucket, found)
                arrived = self.layout.views(bucket, names)
                tensors |= (
                    arrived
                    if self._keep is None
                    else {name: self._keep(name, tensor) for name, tensor in arrived.items()}
                )
            settle(lane.device)
            expected = group.record(version, self.layout.elements, found)
            record = torch.zeros_like(expected)
            group.broadcast(record)
            if not torch.equal(record, expected):
                raise BroadcastError(
                    f"{self.kind} version {version} arrived damaged: (version, epoch, elements, checksum) is "
                    f"{tuple(expected.tolist())}, expected {tuple(record.tolist())}"
                )
            with self._lock:
                # the epoch is over, or the version was sent again for new members
                if lane not in self._lanes or version <= self._taken:
                    return
                if self._keep is None:
                    self._complete.clear()
                self._complete[version] = tensors
            self.whole = Whole(version, found)
            self._received(version)

        lane.tasks.put(task)

    @property
    def complete(self) -> list[int]:
        """The versions that can be taken."""
        with self._lock:
            return list(self._complete)

    def drop_before(self, version: int) -> None:
        """Drop the complete versions that are older than `version`."""
        with self._lock:
            self._complete = {later: held for later, held in self._complete.items() if later >= version}

    def take(self, version: int | None = None) -> tuple[int, dict[str, torch.Tensor]] | None:
        """Return a complete version and its tensors, once, and drop older ones; None if there is no new version.

        Args:
            version: which complete version to take; None: the newest.
        """
        self.check()
        with self._lock:
            if version not in self._complete if version is not None else not self._complete:
                return None  # a newer one is arriving in its place
            self._taken = version = max(self._complete) if version is None else version
            tensors = self._complete[version]
            self._complete = {later: held for later, held in self._complete.items() if later > version}
        for tensor in tensors.values():
            if tensor.is_cuda:  # it was made on another stream
                tensor.record_stream(torch.cuda.current_stream())
        return version, tensors
