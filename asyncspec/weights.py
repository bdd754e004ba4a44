"""Versioned weight broadcast: an immutable snapshot, a shadow buffer, a commit record, a swap between two engine steps.

One sender (the trainer for the policy, the draft adapter for the draft) and its receivers form a broadcast group: NCCL where
each member has a GPU of its own, else gloo through host memory; one code path. The controller decides who is a member and
how; each membership has its epoch and its group.

    sender    snapshot(v+1) | announce -> broadcast payload, record          (a thread; training goes on)
    receiver                    staging <- payload, record matches v+1       (a thread; generation goes on)
    receiver                                                      take() -> v+1, between two engine steps

A reader sees version v or v+1, never a mixture: the staging buffer is handed over only after the commit record (version,
epoch, elements) arrived and matched. Every collective has a deadline.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Callable, Mapping

import torch
import torch.distributed as dist

from asyncspec.messages import Membership

COLLECTIVE_TIMEOUT_S = 60.0


class BroadcastError(RuntimeError):
    """A broadcast that failed or delivered something else than announced."""


@dataclass(frozen=True)
class Layout:
    """How named float32 tensors lie in one flat buffer."""

    entries: tuple[tuple[str, tuple[int, ...], int], ...]  # name, shape, first element
    elements: int

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> "Layout":
        entries, offset = [], 0
        for name, tensor in tensors.items():
            entries.append((name, tuple(tensor.shape), offset))
            offset += tensor.numel()
        return cls(tuple(entries), offset)

    @torch.no_grad()
    def snapshot(self, tensors: Mapping[str, torch.Tensor], device: str) -> torch.Tensor:
        """A copy of all tensors on `device`, float32 [elements]; later changes of the tensors do not reach it."""
        flat = torch.empty(self.elements, dtype=torch.float32, device=device)
        for (name, shape, offset) in self.entries:
            flat[offset : offset + tensors[name].numel()] = tensors[name].detach().reshape(-1)
        return flat

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The named tensors inside a flat buffer."""
        return {name: flat[offset : offset + torch.Size(shape).numel()].view(shape) for name, shape, offset in self.entries}


class BroadcastGroup:
    """One epoch of a broadcast group."""

    def __init__(self, store_host: str, store_port: int, membership: Membership, timeout_s: float, me: str, device: str):
        """Joins; collective over the members.

        Args:
            device: what this member computes on; payloads lie there with NCCL, in host memory with gloo (`self.device`).

        Raises:
            BroadcastError: not all members joined within timeout_s.
        """
        join_timeout, timeout = timedelta(seconds=timeout_s), timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        self.kind, self.epoch, self.members = kind, epoch, members = membership.kind, membership.epoch, membership.members
        self.device = device if membership.backend == "nccl" else "cpu"
        self._stream = None
        rank, size = members.index(me), len(members)
        try:
            store = dist.TCPStore(store_host, store_port, is_master=False, timeout=join_timeout)
            prefix = dist.PrefixStore(f"{kind}/{epoch}", store)
            # The group's own rendezvous would wait as long as a collective may take; joining has its own limit.
            prefix.set(f"joined/{me}", "")
            prefix.wait([f"joined/{member}" for member in members], join_timeout)
            if membership.backend == "nccl":
                torch.cuda.set_device(device)  # each thread has its own current device
                self._stream = torch.cuda.Stream(device)
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                self._group = dist.ProcessGroupNCCL(prefix, rank, size, options)
            else:
                options = dist.ProcessGroupGloo._Options()
                options._timeout = timeout
                options._devices = [dist.ProcessGroupGloo.create_device(hostname=store_host)]
                self._group = dist.ProcessGroupGloo(prefix, rank, size, options)
        except RuntimeError as error:
            raise BroadcastError(f"{kind} group, epoch {epoch}, members {members}: {error}") from None

    def broadcast(self, flat: torch.Tensor) -> None:
        """Send (first member) or receive (others) in place. Collective; blocks this thread until done or the deadline."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        data = flat.view(torch.uint8)  # bytes, so that every backend carries every dtype
        try:
            if self._stream is None:
                self._group.broadcast([data], options).wait()
                return
            # After what the default stream has been given so far (the snapshot), but not in its way from then on.
            self._stream.wait_stream(torch.cuda.default_stream(self.device))
            with torch.cuda.stream(self._stream):
                self._group.broadcast([data], options).wait()
            self._stream.synchronize()
        except RuntimeError as error:
            raise BroadcastError(f"{self.kind} broadcast, epoch {self.epoch}, members {self.members}: {error}") from None

    def record(self, version: int, elements: int) -> torch.Tensor:
        """The commit record that follows a payload."""
        return torch.tensor([version, self.epoch, elements], dtype=torch.int64, device=self.device)


class _Worker:
    """A thread that does collectives in order; errors surface in the owner's next call."""

    def __init__(self, name: str, store_host: str, store_port: int, kind: str, me: str, device: str) -> None:
        self._where, self.kind = (store_host, store_port), kind
        self._me, self._device = me, device
        self._tasks: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._error: BaseException | None = None
        self.group: BroadcastGroup | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def form(self, membership: Membership, timeout_s: float, joined: Callable[[], None]) -> None:
        """Join a new epoch within timeout_s; `joined` is called in the thread when the group stands."""

        def task() -> None:
            self.group = BroadcastGroup(*self._where, membership, timeout_s, self._me, self._device)
            joined()

        self._tasks.put(task)

    def check(self) -> None:
        """Raises what the thread raised, if it did."""
        if self._error is not None:
            raise BroadcastError(str(self._error)) from self._error

    def close(self) -> None:
        self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except BaseException as error:  # handed to the owner by check()
                self._error = error
                return


class Publisher(_Worker):
    """The sending end: one snapshot under way at a time."""

    def __init__(self, store_host: str, store_port: int, kind: str, me: str, device: str, layout: Layout, delay_s: float = 0.0) -> None:
        """
        Args:
            delay_s: how long each version is held back, to test what that is charged to.
        """
        self.layout, self.delay_s = layout, delay_s
        self.busy = False
        super().__init__(f"publish-{kind}", store_host, store_port, kind, me, device)

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor], announce: Callable[[], None]) -> None:
        """Snapshot now, announce, broadcast in the background; the group must stand.

        Raises:
            BroadcastError: the broadcast before this one failed or is still under way; wait until `busy` is False.
        """
        self.check()
        if self.busy:
            raise BroadcastError(f"version {version} published while the broadcast before it is under way")
        flat = self.layout.snapshot(tensors, self.group.device)
        announce()
        self.busy = True

        def task() -> None:
            time.sleep(self.delay_s)
            self.group.broadcast(flat)
            self.group.broadcast(self.group.record(version, flat.numel()))
            self.busy = False

        self._tasks.put(task)


class Receiver(_Worker):
    """The receiving end: staging buffers fill in the background, `take` hands over the newest complete version."""

    def __init__(self, store_host: str, store_port: int, kind: str, me: str, device: str, layout: Layout,
                 received: Callable[[int], None]) -> None:
        """
        Args:
            received: called in the thread with each version that is complete in staging.
        """
        self.layout = layout
        self._received = received
        self._complete: tuple[int, torch.Tensor] | None = None
        self._lock = threading.Lock()
        super().__init__(f"receive-{kind}", store_host, store_port, kind, me, device)

    def expect(self, version: int, epoch: int) -> None:
        """Take part in the broadcast of `version`."""

        def task() -> None:
            flat = torch.empty(self.layout.elements, dtype=torch.float32, device=self.group.device)
            self.group.broadcast(flat)
            expected = self.group.record(version, flat.numel())
            record = torch.zeros_like(expected)
            self.group.broadcast(record)
            if not torch.equal(record, expected) or epoch != self.group.epoch:
                raise BroadcastError(f"{self.kind}: commit record {record.tolist()}, expected {expected.tolist()}")
            with self._lock:
                self._complete = (version, flat)
            self._received(version)

        self._tasks.put(task)

    def take(self) -> tuple[int, dict[str, torch.Tensor]] | None:
        """The newest complete version and its tensors, once; None if there is no new one."""
        self.check()
        with self._lock:
            complete, self._complete = self._complete, None
        return None if complete is None else (complete[0], self.layout.views(complete[1]))
