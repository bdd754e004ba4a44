"""The controller's side of the weight broadcasts: it keeps each group's members and epoch, and sends them their orders.
See wire/weights.py.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncspec.wire import messages as m
from asyncspec.wire.addresses import listening

MOST_BROKEN = 10  # epochs that may fail in a row with no version received in between


def broadcast_backend(devices: list[str]) -> str:
    """Return "nccl" if each member has a GPU of its own, which NCCL requires; otherwise "gloo".

    Args:
        devices: the `device` of each member's Hello.
    """
    alone = len(set(devices)) == len(devices)
    return "nccl" if alone and all(device.startswith("cuda") for device in devices) else "gloo"


class Broadcasts:
    """The broadcast groups of a run, one for each kind of weights: policy and draft."""

    def __init__(self, host: str, send: Callable[[str, m.Message], bool]) -> None:
        """
        Args:
            host: the address on which the members' store listens.
            send: callable(actor's name, message).
        """
        import torch.distributed as dist

        self._send = send
        # Open the socket here: the store itself would listen on all interfaces.
        listener = listening(host)
        self.port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self.members: dict[str, list[str]] = {}  # kind -> names; the first member sends
        self.epochs: dict[str, int] = {}
        self.versions = {"policy": 0, "draft": 0}  # kind -> the newest published version
        self.devices: dict[str, str] = {}  # member -> device
        self._has: dict[tuple[str, str], int] = {}  # (kind, member) -> the newest version that it has received
        self._lacking: dict[str, list[str]] = {}  # kind -> the receivers of the present epoch's catch-up group
        self._broken: dict[str, int] = {}  # kind -> epochs that failed in a row
        self._before: dict[str, tuple[int, list[str]]] = {}  # kind -> the last epoch, and its members
        self._told: dict[tuple[str, str], int] = {}  # (kind, member) -> the newest epoch that it was told of
        self._headless: set[str] = set()  # kinds whose sender is gone and may be replaced

    def make(self, kind: str, members: list[str]) -> None:
        self.members[kind], self.epochs[kind] = list(members), 0
        self.form(kind)

    def form(self, kind: str) -> None:
        """Start a new epoch of a group, with its present members. Those that lack its newest version form a second
        group with its sender, in which they get it.
        """
        if kind in self._headless:
            return
        self.epochs[kind] += 1
        members, epoch = self.members[kind], self.epochs[kind]
        backend = broadcast_backend([self.devices[name] for name in members])
        whole, difference = m.Membership(kind, epoch, list(members), backend), self._difference(kind, backend)
        for name in members:
            knows = difference is not None and self._told.get((kind, name)) == difference.since
            if self._send(name, difference if knows else whole):
                self._told[kind, name] = epoch
        self._before[kind] = epoch, list(members)
        lacking = [name for name in members[1:] if self._has.get((kind, name), 0) < self.versions[kind]]
        self._lacking[kind] = lacking
        for name in [members[0], *lacking] if lacking else ():
            self._send(name, m.Membership(kind, self.epochs[kind], [members[0], *lacking], backend, catch_up=True))

    def _difference(self, kind: str, backend: str) -> m.Membership | None:
        """Return what has changed since the last epoch of a group; None if that does not lead to its members."""
        since, before = self._before.get(kind, (0, []))
        now, held = set(self.members[kind]), set(before)
        came = [name for name in self.members[kind] if name not in held]
        left = [name for name in before if name not in now]
        made = m.Membership(kind, self.epochs[kind], came, backend, since=since, left=left)
        return made if since and made.whole(before) == self.members[kind] else None

    @property
    def senders(self) -> dict[str, str]:
        """Kind of weights -> the member that sends them."""
        return {kind: names[0] for kind, names in self.members.items() if names and kind not in self._headless}

    def end_draft(self) -> None:
        """Dissolve the draft's group: nobody sends drafts any more."""
        for name in self.members.pop("draft", []):
            self._send(name, m.DraftEnded())

    def remove(self, name: str) -> None:
        """Remove a member from its groups, each of which gets a new epoch. A group without a sender waits for one."""
        for kind, members in self.members.items():
            self._told.pop((kind, name), None)
            if name in members:
                if members[0] == name:
                    self._headless.add(kind)
                members.remove(name)
                self.form(kind)

    def add(self, hello: m.Hello, kinds: dict[str, bool]) -> None:
        """Add a member to its groups, each of which gets a new epoch.

        Args:
            kinds: the groups that it joins -> whether it is their sender.
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
        """Note that an epoch failed in a member. Return whether a new epoch was started for that.

        Raises:
            RuntimeError: too many epochs failed in a row.
        """
        kind = message.kind
        self._told.pop((kind, message.name), None)
        if kind not in self.members or message.epoch != self.epochs[kind] or kind in self._headless:
            return False
        self._broken[kind] = self._broken.get(kind, 0) + 1
        if self._broken[kind] > MOST_BROKEN:
            raise RuntimeError(
                f"{kind} weights: more than {MOST_BROKEN} broadcasts failed in a row, the last in {message.name}: "
                f"{message.error}"
            )
        self.form(kind)
        return True

    def received(self, message: m.Received) -> None:
        """Note that a member has received a version."""
        self._broken.pop(message.kind, None)
        key = message.kind, message.name
        self._has[key] = max(self._has.get(key, 0), message.version)

    def relay(self, sender: str, message: m.Publish) -> bool:
        """Tell the receivers to take part in a broadcast. Return False if `sender` does not lead such a group."""
        if sender not in self.members.get(message.kind, [])[:1]:
            return False
        self.versions[message.kind] = max(self.versions[message.kind], message.version)
        receivers = self._lacking[message.kind] if message.catch_up else self.members[message.kind][1:]
        for name in receivers:
            self._send(name, m.Receive(message.kind, message.version, message.epoch, message.catch_up))
        return True
