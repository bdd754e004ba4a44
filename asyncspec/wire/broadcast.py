"""One epoch of a broadcast group: its members meet before each version, and then move it bucket by bucket.

A member that is in a long pass comes late, and nothing waits on a GPU for it: the members meet at a store first. Once
all are there, a bucket takes as long as its bytes need, and a member that hangs is noticed after BUCKET_S.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from asyncspec.deadlines import BUCKET_BYTES_S, BUCKET_S, MEET_S
from asyncspec.wire.addresses import own_address
from asyncspec.wire.layout import settle
from asyncspec.wire.messages import Membership

_NAMED = 8  # members whose names a message has
_LOOKED_S = 0.05  # most seconds between two looks at the store
MOST_CTAS = 8  # of a GPU's some hundred multiprocessors: the others compute meanwhile


class BroadcastError(RuntimeError):
    """A broadcast failed, or delivered something other than what was announced."""


class BroadcastGroup:
    """The members of an epoch, connected. The first one sends."""

    def __init__(
        self,
        store_host: str,
        store_port: int,
        membership: Membership,
        timeout_s: float,
        me: str,
        device: str,
        largest: int,
    ) -> None:
        """Join the group; collective over the members.

        Args:
            me: this member's name.
            device: where this member computes; payloads are there with NCCL, in host memory with gloo (`self.device`).
            largest: bytes of the largest bucket.

        Raises:
            BroadcastError: not all members joined within timeout_s.
        """
        join_timeout, timeout = timedelta(seconds=timeout_s), timedelta(seconds=BUCKET_S + largest / BUCKET_BYTES_S)
        self.kind, self.epoch, self.members = membership.kind, membership.epoch, membership.members
        self.device = device if membership.backend == "nccl" else "cpu"
        self.me, self.ended = me, threading.Event()
        self._group: Any  # of torch.distributed, which names no common type that has broadcast()
        rank, size = self.members.index(me), len(self.members)
        side = "/catch-up" if membership.catch_up else ""
        try:
            store = dist.TCPStore(store_host, store_port, is_master=False, timeout=join_timeout)
            self._store = dist.PrefixStore(f"{self.kind}/{self.epoch}{side}", store)
            # The group's own rendezvous would wait for a collective's timeout; joining has another one.
            # Counted, because in a large group each member would otherwise ask for the key of each other one.
            if self._store.add("joined", 1) == size:
                self._store.set("all joined", "")
            self._store.wait(["all joined"], join_timeout)
            if membership.backend == "nccl":
                from asyncspec.wire.nccl import ends_alone

                nccl = dist.ProcessGroupNCCL.Options()
                nccl._timeout, nccl.config.max_ctas = timeout, MOST_CTAS
                with ends_alone():
                    self._group = dist.ProcessGroupNCCL(self._store, rank, size, nccl)
            else:
                gloo: Any = dist.ProcessGroupGloo
                options = gloo._Options()
                options._timeout = timeout
                options._devices = [gloo.create_device(hostname=own_address(store_host, store_port))]
                self._group = gloo(self._store, rank, size, options)
        except RuntimeError as error:
            raise BroadcastError(f"{self._named}: {error}") from None

    @property
    def _named(self) -> str:
        named = ", ".join(self.members[:_NAMED]) + (" and others" if len(self.members) > _NAMED else "")
        return f"{self.kind} group, epoch {self.epoch}, {len(self.members)} members: {named}"

    def meet(self, version: int) -> None:
        """Wait until all members are at the broadcast of a version. Collective.

        Raises:
            BroadcastError: a member did not come within MEET_S, or this member left the epoch.
        """
        at, go, leads = f"at/{version}/".__add__, f"go/{version}", self.me == self.members[0]
        self._store.set(at(self.me), "")  # for the message below
        self._store.add(at("all"), 1)
        begun, pause = time.monotonic(), 0.001
        while not (self._store.add(at("all"), 0) >= len(self.members) if leads else self._store.check([go])):
            if self.ended.wait(pause):
                raise BroadcastError(f"{self._named}: this member left it")
            pause = min(_LOOKED_S, 1.5 * pause)
            if time.monotonic() - begun > MEET_S:
                late = [member for member in self.members if not self._store.check([at(member)])]
                raise BroadcastError(
                    f"{self._named}: version {version} waited {MEET_S:.0f} s for {', '.join(late) or self.members[0]}"
                )
        if leads:
            self._store.set(go, "")

    def broadcast(self, flat: torch.Tensor) -> None:
        """Send (first member) or receive (others) in place. Collective; blocks until done or until the deadline. On a
        GPU it runs on this thread's stream.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        data = flat.view(torch.uint8)  # every backend can send bytes, whatever the dtype
        try:
            self._group.broadcast([data], options).wait()
            settle(self.device)
        except RuntimeError as error:
            raise BroadcastError(f"{self._named}: {error}") from None

    def record(self, version: int, elements: int, checksum: int) -> torch.Tensor:
        """Return the commit record that follows a payload: version, epoch, elements, checksum."""
        return torch.tensor([version, self.epoch, elements, checksum], dtype=torch.int64, device=self.device)

    def end(self) -> None:
        """End what a thread waits for in this group, where the backend can: the members have another epoch. A thread
        that waits in gloo is left to its deadline.
        """
        self.ended.set()
        if self.device != "cpu":
            self._group.abort()
