"""Hosts on one machine: network namespaces, each with an address, joined by a bridge over links with a rate and a
delay.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncspec.errors import UserError

NETWORK, NETWORK6 = "10.77.0", "fd00:77:"
RATE, DELAY = "10gbit", "100us"
SHAPERS = {
    "rate and delay": ("netem", "delay", DELAY, "rate", RATE),
    "rate": ("tbf", "rate", RATE, "burst", "16mb", "latency", "50ms"),
}


class Hosts:
    """Hosts in network namespaces. Call `close`, because namespaces outlive the process that made them."""

    def __init__(self, count: int, name: str = f"as{os.getpid() % 10000}", version: int = 4) -> None:
        """Make the namespaces and connect them.

        Args:
            version: of the only addresses that the hosts have, 4 or 6.

        Raises:
            UserError: this account may not make namespaces, or the tools for it are not installed.
        """
        self.count, self.name, self.version = count, name, version
        if os.geteuid() or not shutil.which("ip"):
            raise UserError(
                "bench deployment: expected root and the ip command (Debian: iproute2) to make network namespaces"
            )
        try:
            _ip("link", "add", name, "type", "bridge")
            _ip("link", "set", name, "up")
            for i in range(count):
                namespace, outside, inside = self._namespace(i), f"{name}o{i}", f"{name}i{i}"
                _ip("netns", "add", namespace)
                _ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", namespace)
                _ip("link", "set", outside, "master", name, "up")
                # nodad: the address can be used at once
                where = ["dev", inside] if version == 4 else ["dev", inside, "nodad"]
                _ip("-n", namespace, "addr", "add", f"{self.address(i)}/{24 if version == 4 else 64}", *where)
                _ip("-n", namespace, "link", "set", inside, "up")
                _ip("-n", namespace, "link", "set", "lo", "up")
            self.shaped = self._shape()
        except subprocess.CalledProcessError as error:
            self.close()
            raise UserError(
                f"bench deployment: {' '.join(error.cmd)}: {error.stderr.strip() or error.returncode}"
            ) from None

    def address(self, i: int) -> str:
        return f"{NETWORK}.{i + 1}" if self.version == 4 else f"{NETWORK6}:{i + 1:x}"

    def start(self, i: int, arguments: Sequence[str], output: Path) -> subprocess.Popen:
        """Start a Python process on host i; its output goes to a file."""
        command = ["ip", "netns", "exec", self._namespace(i), sys.executable, *arguments]
        with open(output, "w") as written:
            return subprocess.Popen(
                command,
                stdout=written,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def cut_off(self, i: int, off: bool = True) -> None:
        """Take a host's link down, or bring it up again."""
        _ip("link", "set", f"{self.name}o{i}", "down" if off else "up")

    def close(self) -> None:
        for i in range(self.count):
            left = subprocess.run(
                ["ip", "netns", "pids", self._namespace(i)], capture_output=True, text=True
            ).stdout.split()
            for pid in left:
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    pass
            subprocess.run(["ip", "netns", "del", self._namespace(i)], capture_output=True)
            subprocess.run(["ip", "link", "del", f"{self.name}o{i}"], capture_output=True)
        subprocess.run(["ip", "link", "del", self.name], capture_output=True)

    def _namespace(self, i: int) -> str:
        return f"{self.name}n{i}"

    def _shape(self) -> str:
        """Give the links a rate and a delay, or only a rate, as far as this kernel can; return what they got."""
        for shaped, discipline in SHAPERS.items():
            if all(self._queue(i, discipline) for i in range(self.count)):
                return shaped
        return ""

    def _queue(self, i: int, discipline: Sequence[str]) -> bool:
        command = [
            "ip",
            "netns",
            "exec",
            self._namespace(i),
            "tc",
            "qdisc",
            "replace",
            "dev",
            f"{self.name}i{i}",
            "root",
            *discipline,
        ]
        return not subprocess.run(command, capture_output=True).returncode


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
