"""Hosts elsewhere, reached through Monarch: each plays one node of a run as `asyncspec train --join` would there.

    asyncspec host                                  on each of them, once: launchers may start processes there
    asyncspec train --hosts HOST1,HOST2 ...         on the first node: plays that, and has the others played there

The launcher keeps a thread for each node. Where a host is lost, its node moves to one that is named and plays none, or waits for one.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import Sequence

import monarch.actor as monarch

from asyncspec import topology, transport
from asyncspec.config import Config, ConfigError
from asyncspec.deadlines import HOST_ALONE_S, HOST_ASKED_S, HOST_LOST_S, HOST_REACHED_S, HOST_RETRY_S, MESH_STOP_S
from asyncspec.launch.interrupt import InterruptFlag

PORT = 26600  # Monarch's own jobs serve at the same
NEWS_BYTES = 1 << 16
HOST_TRIES = 3  # before it is said that a host does not answer: it may be starting like the launcher
_OWN = re.compile(r"(?:[^@:/]+@)?tcp://(?P<host>[^@:/]+):(?P<port>[0-9]+)(?:@.*)?")  # as Monarch writes it
_SHORT = re.compile(r"(?P<host>[^@:/,\s]*)(?::(?P<port>[0-9]{1,5}))?")


@dataclass(frozen=True)
class Address:
    """Where a host is served."""

    host: str
    port: int
    url: str  # for Monarch

    @classmethod
    def parse(cls, text: str, field: str) -> "Address":
        """HOST, HOST:PORT, or what Monarch takes.

        Raises:
            ConfigError: the text is none of these.
        """
        found = _OWN.fullmatch(text) or _SHORT.fullmatch(text)
        port = int(found["port"] or PORT) if found else 0
        if not found or not found["host"] or not 0 < port < 65536:
            nearest = text.partition(":")[0] or "localhost"
            raise ConfigError(f"{field} {text!r}: expected HOST or HOST:PORT; nearest valid choice: {nearest}:{PORT}")
        return cls(found["host"], port, text if "://" in text else f"tcp://{found['host']}:{port}")

    def answers(self) -> bool | None:
        """Whether somebody listens there; None if not even the host answers."""
        try:
            socket.create_connection((self.host, self.port), HOST_REACHED_S).close()
        except ConnectionRefusedError:
            return False
        except OSError:
            return None
        return True

    def from_here(self) -> str:
        """This host's address on the way there.

        Raises:
            ConfigError: nobody knows the way.
        """
        try:
            return transport.own_address(self.host, self.port)
        except OSError as error:
            raise ConfigError(f"--hosts: {self.host!r}: {error.strerror}; expected a host that this one reaches") from None

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def serve(text: str) -> int:
    """Let launchers elsewhere start processes on this host, until an interrupt; returns the exit code.

    Raises:
        ConfigError: nothing can listen there.
    """
    host, _, port = text.rpartition(":") if ":" in text else (text, "", "")
    address = Address.parse(f"{host or socket.gethostname()}:{port or PORT}", "asyncspec host:")
    try:
        socket.inet_aton(address.host)
        listens = address.host
    except OSError:  # a name, which may stand for the loopback interface on the host whose name it is
        listens = "0.0.0.0"
    try:
        socket.create_server((listens, address.port)).close()
    except OSError as error:
        raise ConfigError(f"asyncspec host {address}: {os.strerror(error.errno)}; expected an address of this host and a free port") from None
    interrupt = InterruptFlag()
    served = monarch.start_worker_loop_forever(ca="trust_all_connections", address=f"{address.url}@tcp://{listens}:{address.port}")
    interrupt.arm()
    print(f"launchers may start processes on this host: --hosts {address}; so may whoever else reaches that port. Ctrl-C ends it.", flush=True)
    while not interrupt.count:
        try:
            served.get(timeout=0.5)
            return 0
        except TimeoutError:
            continue
    return 130


class _Node(monarch.Actor):
    """Plays one node on its host, in a child process, and ends with the launcher."""

    def __init__(self) -> None:
        self._child: subprocess.Popen | None = None
        self._output, self._told, self._asked = tempfile.TemporaryFile(), 0, time.monotonic()
        threading.Thread(target=self._end_alone, daemon=True).start()

    @monarch.endpoint
    def play(self, run_dir: str, node: int, directory: str) -> str:
        """Returns what is wrong, in a line, or "".

        Args:
            directory: what paths in the configuration are relative to.
        """
        if not os.path.isdir(directory):
            return f"{directory}: no such directory there; expected the file system that the nodes share"
        command = [sys.executable, "-m", "asyncspec.launch.join", str(os.getpid()), run_dir, str(node)]
        self._child = subprocess.Popen(command, cwd=directory, stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT)
        return ""

    @monarch.endpoint
    def news(self) -> tuple[int | None, str]:
        """The child's exit code, None before its end, and what it has printed since this was last asked."""
        self._asked, code = time.monotonic(), self._child.poll()
        new = os.pread(self._output.fileno(), NEWS_BYTES, self._told)
        self._told += len(new)
        return code, new.decode(errors="replace")

    def _end_alone(self) -> None:
        """The launcher has died, or cannot be reached; Monarch would leave this process there."""
        while time.monotonic() - self._asked < HOST_ALONE_S:
            time.sleep(1.0)
        os._exit(1)  # the child goes with it


class Hosts:
    """The nodes of a run but the first."""

    def __init__(self, config: Config, addresses: Sequence[Address]) -> None:
        """
        Args:
            addresses: node k, counted from 1, plays at the k-th of them; what stands after those of the nodes takes the place of ones that do not answer.
        """
        nodes = len(topology.parse(config.deployment.nodes)) - 1
        self._config, self._at, self._free = config, dict(enumerate(addresses[:nodes], 1)), list(addresses[nodes:])
        self._turn, self._over, self._threads = threading.Lock(), threading.Event(), []
        self.wrong = ""  # why a node could not be played at all

    def play(self) -> None:
        """Have the nodes played until the run has ended; does not wait. Called again it does nothing."""
        if not self._threads:
            self._threads = [threading.Thread(target=self._keep, args=(node,), daemon=True) for node in self._at]
            for thread in self._threads:
                thread.start()

    def close(self) -> None:
        """Wait for their end, after the run's directory says that the run has ended."""
        self._over.set()
        deadline = time.monotonic() + self._config.deployment.stop_timeout_s + MESH_STOP_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _keep(self, node: int) -> None:
        """Have a node played, here or there, until the run has ended."""
        for left in range(self._config.deployment.replacements, -1, -1):
            tries = 0
            while (address := self._answering(node)) is None and not self._over.wait(HOST_RETRY_S):
                tries += 1
                if tries == HOST_TRIES:
                    print(f"node {node}: {self._at[node]} does not answer, nor any of --hosts that plays no other node; it is waited for", flush=True)
            if self._over.is_set():
                return
            code, how = self._play(node, address)
            if self._over.wait(HOST_RETRY_S):
                return
            if code == 2 and left == self._config.deployment.replacements:  # it would not have gone better elsewhere, or later
                self.wrong = f"node {node} at {address}: {how}"
                return
            print(f"node {node} at {address}: {how}; " + ("it is started again" if left else "deployment.replacements of it are used up"), flush=True)

    def _answering(self, node: int) -> Address | None:
        """A host for a node: the one that it had if that answers, or one that plays none."""
        with self._turn:
            for address in [self._at[node], *self._free]:
                if address.answers():
                    if address != self._at[node]:
                        self._free.remove(address)
                        self._free.append(self._at[node])
                        self._at[node] = address
                    return address
        return None

    def _play(self, node: int, address: Address) -> tuple[int, str]:
        """Have a node played once; returns its exit code and how that came about, in a line."""
        mesh, said, lost = None, "", time.monotonic() + self._config.deployment.start_timeout_s
        try:
            mesh = monarch.attach_to_workers(ca="trust_all_connections", workers=[address.url]).spawn_procs(name=f"node{node}")
            remote = mesh.spawn("node", _Node)
            asked = remote.play.call_one(self._config.run_dir, node, os.getcwd())
            while time.monotonic() < lost:
                try:
                    answer = asked.get(timeout=HOST_ASKED_S)
                except TimeoutError:
                    if address.answers() is False:  # and what it had started has ended with it
                        return 1, "nobody listens there any more"
                    continue
                lost = time.monotonic() + HOST_LOST_S
                if isinstance(answer, str):  # of play
                    if answer:
                        return 2, answer
                else:
                    code, new = answer
                    for said in new.splitlines():
                        print(said if said.startswith(f"node {node} ") else f"node {node}: {said}", flush=True)
                    if code is not None:
                        return code, f"killed by {signal.Signals(-code).name}" if code < 0 else said or f"ended with exit code {code}"
                time.sleep(HOST_ASKED_S / 10)
                asked = remote.news.call_one()
            return 1, "the host has not answered for long"
        except Exception as error:  # of Monarch: the process has ended, or the host with it
            return 1, f"its process ended: {(str(error).strip() or type(error).__name__).splitlines()[0][:200]}"
        finally:
            if mesh is not None:
                stop(mesh)


def stop(mesh) -> None:
    """End a mesh's processes."""
    try:
        mesh.stop().get(timeout=MESH_STOP_S)
    except Exception:  # it is gone already; nothing is left to stop
        pass
