"""The controller's side of the weight broadcasts: who is in which group, in which epoch, and what is sent to whom. See
wire/weights.py.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from asyncspec.wire import messages as m

MOST_BROKEN = 10  # epochs in a row that may fail before a version has arrived in one


def broadcast_backend(devices: list[str]) -> str:
    """NCCL if each member has a GPU of its own, as NCCL demands; otherwise gloo.

    Args:
        devices: as the members' Hello names them.
    """
    alone = len(set(devices)) == len(devices)
    return "nccl" if alone and all(device.startswith("cuda") for device in devices) else "gloo"


class Broadcasts:
    def __init__(self, host: str, send: Callable[[str, m.Message], bool]) -> None:
        """
        Args:
            host: where the members' store listens.
            send: callable(actor's name, message).
        """
        import torch.distributed as dist

        self._send = send
        # A socket of ours: the store itself would listen on all interfaces.
        listener = socket.create_server((host, 0))
        self.port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self.members: dict[str, list[str]] = {}  # by kind; the first one sends
        self.epochs: dict[str, int] = {}
        self.versions = {"policy": 0, "draft": 0}  # the newest published
        self.devices: dict[str, str] = {}  # of the members
        self._broken: dict[str, int] = {}  # epochs in a row that failed
        self._headless: set[str] = set()  # kinds whose sender is gone and may come back

    def make(self, kind: str, members: list[str]) -> None:
        self.members[kind], self.epochs[kind] = list(members), 0
        self.form(kind)

    def form(self, kind: str) -> None:
        """Give a group a new epoch, with the members it has now."""
        if kind in self._headless:
            return
        self.epochs[kind] += 1
        members = self.members[kind]
        backend = broadcast_backend([self.devices[name] for name in members])
        for name in members:
            self._send(name, m.Membership(kind, self.epochs[kind], list(members), backend))

    def end_draft(self) -> None:
        """Nobody sends drafts any more."""
        for name in self.members.pop("draft", []):
            self._send(name, m.DraftEnded())

    def remove(self, name: str) -> None:
        for kind, members in self.members.items():
            if name in members:
                if members[0] == name:
                    self._headless.add(kind)
                members.remove(name)
                self.form(kind)

    def add(self, hello: m.Hello, kinds: dict[str, bool]) -> None:
        """A new member.

        Args:
            kinds: the groups it joins, and whether as their sender.
        """
        name = hello.name
        self.devices[name] = hello.device
        for kind, sends in kinds.items():
            if kind in self.members:
                self.members[kind].insert(0 if sends else len(self.members[kind]), name)
                if sends:
                    self._headless.discard(kind)
                self.form(kind)

    def broken(self, message: m.Broken) -> bool:
        """A member says that an epoch failed; True if there is a new one because of that.

        Raises:
            RuntimeError: too many have failed in a row.
        """
        kind = message.kind
        if kind not in self.members or message.epoch != self.epochs[kind] or kind in self._headless:
            return False
        self._broken[kind] = self._broken.get(kind, 0) + 1
        if self._broken[kind] > MOST_BROKEN:
            raise RuntimeError(
                f"{kind} weights: {MOST_BROKEN} broadcast groups in a row have failed, the last in {message.name}: "
                f"{message.error}"
            )
        self.form(kind)
        return True

    def received(self, kind: str) -> None:
        """A version has arrived somewhere."""
        self._broken.pop(kind, None)

    def relay(self, sender: str, message: m.Publish) -> bool:
        """Have the receivers take part; False if the group is no more, or another is its sender."""
        if sender not in self.members.get(message.kind, [])[:1]:
            return False
        self.versions[message.kind] = max(self.versions[message.kind], message.version)
        for name in self.members[message.kind][1:]:
            self._send(name, m.Receive(message.kind, message.version, message.epoch))
        return True
