"""Remote hosts, reached through Monarch. Each plays one node of a run, as `asyncspec train --join` would do there.

    asyncspec host                                  on each remote host, once: launchers may start processes there
    asyncspec train --hosts HOST1,HOST2 ...         on the first node: plays it, and has the hosts play the others

The launcher keeps a thread for each node. When a host is lost, its node moves to a spare host, one of --hosts that
plays no node. If there is none, the node waits.
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import monarch.actor as monarch

from asyncspec.config import Config, topology, work
from asyncspec.deadlines import HOST_ALONE_S, HOST_ASKED_S, HOST_LOST_S, HOST_REACHED_S, HOST_RETRY_S, MESH_STOP_S
from asyncspec.errors import ConfigError, UserError
from asyncspec.launch import scratch
from asyncspec.launch.interrupt import InterruptFlag
from asyncspec.wire.addresses import listening, own_address, url

PORT = 26600  # the port of Monarch's own jobs
NEWS_BYTES = 1 << 16
HOST_TRIES = 3  # before the launcher reports that a host does not answer: it may still be starting, too
_OWN = re.compile(r"(?:[^@:/]+@)?tcp://(?P<host>[^@:/]+):(?P<port>[0-9]+)(?:@.*)?")  # an address as Monarch writes it
_SHORT = re.compile(r"(?P<host>[^@:/,\s]*)(?::(?P<port>[0-9]{1,5}))?")
_RAISED = re.compile(r"[\w.]+(Error|Exit|Exception): ")
_ELSEWHERE = "192.0.2.1"  # no host has this address: the route to it is the route out


@dataclass(frozen=True)
class Address:
    """The address at which a host waits for launchers."""

    host: str
    port: int
    whole: str = ""  # the address as Monarch writes it, if it was given in that form

    @classmethod
    def parse(cls, text: str, field: str) -> Address:
        """Parse HOST, HOST:PORT, or an address as Monarch writes it.

        Raises:
            UserError: the text is none of these.
        """
        found = _OWN.fullmatch(text) or _SHORT.fullmatch(text)
        port = int(found["port"] or PORT) if found else 0
        if not found or not found["host"] or not 0 < port < 65536:
            nearest = text.partition(":")[0] or "localhost"
            raise UserError(f"{field} {text!r}: expected HOST or HOST:PORT; nearest valid choice: {nearest}:{PORT}")
        return cls(found["host"], port, text if "://" in text else "")

    def ip(self) -> str:
        """Return the host's IP address.

        Raises:
            OSError, ValueError: the name cannot be resolved.
        """
        return socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][4][0]

    def url(self) -> str:
        """Return the address for Monarch. It must be the one that the host itself uses: `serve` uses the IP address."""
        return self.whole or url(self.ip(), self.port)

    def answers(self) -> bool | None:
        """Whether a process listens at this address; None if not even the host answers."""
        try:
            socket.create_connection((self.host, self.port), HOST_REACHED_S).close()
        except ConnectionRefusedError:
            return False
        except (OSError, ValueError):
            return None
        return True

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def addresses(config: Config, texts: Sequence[str]) -> tuple[list[Address], str]:
    """Return the hosts of `--hosts`, and this host's own address on the way to them.

    Raises:
        UserError: there are too few hosts, one is named twice, or there is no route to one that plays a node.
    """
    found, field = [Address.parse(text, "--hosts:") for text in texts], f"--hosts {','.join(texts)}"
    nodes = len(topology.parse(config.deployment.nodes)) if config.deployment.nodes else 1
    if not 0 < nodes - 1 <= len(found):
        raise ConfigError(
            f"{field}: {len(found)} besides this host, which plays the first node; expected one for each further node "
            f"of deployment.nodes={config.deployment.nodes!r}, at least {max(1, nodes - 1)}"
            + ("" if nodes > 1 else "; deployment.nodes names no further node")
        )
    if twice := [str(address) for i, address in enumerate(found) if str(address) in map(str, found[:i])]:
        raise ConfigError(f"{field}: {twice[0]} is named twice; expected a different host for each node")
    for address in found[: nodes - 1]:
        try:
            here = own_address(address.ip(), address.port)
        except (OSError, ValueError) as error:
            raise UserError(
                f"--hosts: {address.host!r}: {getattr(error, 'strerror', None) or error}; expected a host that this "
                f"host can reach"
            ) from None
    return found, here


def serve(text: str) -> int:
    """Let launchers on other hosts start processes on this host, until an interrupt. Returns the exit code.

    Args:
        text: [HOST][:PORT]; HOST is this host's own name if it is left out.

    Raises:
        UserError: this host cannot listen at that address.
    """
    host, _, port = text.rpartition(":") if ":" in text else (text, "", "")
    address = Address.parse(f"{host or socket.gethostname()}:{port or PORT}", "asyncspec host:")
    if address.whole:
        raise UserError(f"asyncspec host {text}: expected [HOST][:PORT]; nearest valid choice: {address}")
    try:
        ip = address.ip()
        if not host and ip.startswith("127."):  # a host often resolves its own name to loopback
            ip = own_address(_ELSEWHERE, address.port)
        listening(ip, address.port).close()
    except (OSError, ValueError) as error:
        number = getattr(error, "errno", 0)
        why = os.strerror(number) if number > 0 else getattr(error, "strerror", None) or error
        raise UserError(f"asyncspec host {address}: {why}; expected an address of this host and a free port") from None
    interrupt = InterruptFlag()
    with scratch.directory() as sockets:
        with scratch.monarch_in(sockets):
            served = monarch.start_worker_loop_forever(ca="trust_all_connections", address=url(ip, address.port))
            ended = _ended(served)  # it starts meanwhile
        interrupt.arm()
        print(
            f"launchers can start processes on this host: --hosts {ip}:{address.port}; so can anyone else who reaches "
            f"that port; Ctrl-C ends this",
            flush=True,
        )
        while not ended and not interrupt.count:
            ended = _ended(served)
    return 0 if ended else 130


def _ended(served) -> bool:
    """Wait for half a second. Return whether Monarch has ended its loop."""
    try:
        served.get(timeout=0.5)
        return True
    except TimeoutError:
        return False


class _Node(monarch.Actor):
    """Plays one node on its host, in a child process, and ends with the launcher."""

    def __init__(self) -> None:
        self._child: subprocess.Popen | None = None
        self._output, self._told, self._asked = tempfile.TemporaryFile(), 0, time.monotonic()
        threading.Thread(target=self._end_alone, daemon=True).start()

    @monarch.endpoint
    def play(self, run_dir: str, node: int, launch: int, directory: str) -> str:
        """Start the child. Returns what is wrong, in a line, or "".

        Args:
            launch: identifies the launcher, see `Rendezvous`.
            directory: the directory that paths in the configuration are relative to.
        """
        if not os.path.isdir(directory):
            return f"{directory}: no such directory on that host; expected a file system that all nodes share"
        command = [
            sys.executable,
            "-P",
            "-m",
            "asyncspec.launch.join",
            str(os.getpid()),
            run_dir,
            str(node),
            str(launch),
        ]
        self._child = subprocess.Popen(
            command, cwd=directory, stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT
        )
        return ""

    @monarch.endpoint
    def news(self) -> tuple[int | None, str]:
        """Return the child's exit code, None before its end, and the lines that it has printed since the last call."""
        self._asked, code = time.monotonic(), self._child.poll()
        new = os.pread(self._output.fileno(), NEWS_BYTES, self._told)
        if code is None:
            new = new[: new.rfind(b"\n") + 1]  # the last line may be incomplete
        self._told += len(new)
        return code, new.decode(errors="replace")

    def _end_alone(self) -> None:
        """Exit once the launcher has not called for HOST_ALONE_S. It has died or cannot reach this host, and Monarch
        would leave this process running.
        """
        while time.monotonic() - self._asked < HOST_ALONE_S:
            time.sleep(1.0)
        os._exit(1)  # the child ends with this process


class Hosts:
    """The nodes of a run except the first."""

    def __init__(self, config: Config, hosts: Sequence[Address]) -> None:
        """
        Args:
            hosts: node k, counted from 1, plays on the k-th host. The hosts after those are spares, which replace hosts
                that do not answer.
        """
        nodes = len(topology.parse(config.deployment.nodes)) - 1
        self._config, self._at, self._free = config, dict(enumerate(hosts[:nodes], 1)), list(hosts[nodes:])
        self._turn, self._over, self._launch = threading.Lock(), threading.Event(), 0
        self._threads: dict[int, threading.Thread] = {}
        self._meshes: dict[int, object] = {}
        self._left: dict[int, int] = {}  # node -> how often it may still be restarted
        self._played: set[int] = set()
        self.wrong = ""  # why a node cannot be played at all

    def play(self, launch: int) -> None:
        """Have the nodes played until the run has ended. Does not wait. Call it at each start of all actors.

        Args:
            launch: identifies this launcher, see `Rendezvous`.
        """
        self._launch = launch
        for node in self._at:
            self._left[node] = self._config.deployment.replacements
            if node not in self._threads or not self._threads[node].is_alive():
                self._threads[node] = threading.Thread(target=self._keep, args=(node,), daemon=True)
                self._threads[node].start()

    def close(self, now: bool = False) -> None:
        """End the nodes. Call it once the run's directory says that the run has ended.

        Args:
            now: do not wait for the nodes to end by themselves.
        """
        self._over.set()
        deadline = time.monotonic() + (0 if now else work.stop_s(self._config) + MESH_STOP_S)
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        with ThreadPoolExecutor(len(self._at)) as pool:
            pool.map(stop, list(self._meshes.values()))

    def _keep(self, node: int) -> None:
        """Have a node played, on one host or another, until the run has ended."""
        unfit = False
        while True:
            tries = 0
            while (address := self._answering(node, unfit)) is None and not self._over.wait(HOST_RETRY_S):
                tries += 1
                if tries == HOST_TRIES:
                    print(
                        f"node {node}: {self._at[node]} does not answer, nor does any spare host of --hosts; waiting "
                        f"for one of them",
                        flush=True,
                    )
            if self._over.is_set():
                return
            code, how = self._play(node, address)
            if self._over.wait(HOST_RETRY_S):
                return
            self._left[node] -= 1
            unfit = code == 2  # the same would go wrong on that host again
            if node not in self._played and (unfit or self._left[node] < 0):
                self.wrong = f"node {node} at {address}: {how}"
                return
            again = self._left[node] >= 0
            print(
                f"node {node} at {address}: {how}; "
                + ("restarting the node" if again else "its deployment.replacements are used up"),
                flush=True,
            )
            if not again:
                return

    def _answering(self, node: int, elsewhere: bool) -> Address | None:
        """Return a host for a node: the one that it had, if that answers, else a spare. If `elsewhere`, spares come
        first. None if no host answers.
        """
        with self._turn:
            for address in [*self._free, self._at[node]] if elsewhere else [self._at[node], *self._free]:
                if address.answers():
                    if address != self._at[node]:
                        self._free.remove(address)
                        self._free.append(self._at[node])
                        self._at[node] = address
                    return address
        return None

    def _play(self, node: int, address: Address) -> tuple[int, str]:
        """Have a node played once. Returns its exit code and the reason why it ended, in a line."""
        mesh, said, lost = None, "", time.monotonic() + work.start_s(self._config)
        try:
            mesh = monarch.attach_to_workers(ca="trust_all_connections", workers=[address.url()]).spawn_procs(
                name=f"node{node}"
            )
            self._meshes[node] = mesh
            remote = mesh.spawn("node", _Node)
            asked = remote.play.call_one(self._config.run_dir, node, self._launch, os.getcwd())
            while time.monotonic() < lost:
                try:
                    answer = asked.get(timeout=HOST_ASKED_S)
                except TimeoutError:
                    if address.answers() is False:  # the processes that it had started have ended with it
                        return 1, "no process listens there any more"
                    continue
                lost = time.monotonic() + HOST_LOST_S
                if isinstance(answer, str):  # the answer of `play`
                    if answer:
                        return 2, answer
                else:
                    code, new = answer
                    for said in new.splitlines():
                        if said.startswith(f"node {node} plays "):
                            self._played.add(node)
                        print(said if said.startswith(f"node {node} ") else f"node {node}: {said}", flush=True)
                    if code is not None:
                        return (
                            code,
                            f"killed by {signal.Signals(-code).name}"
                            if code < 0
                            else said or f"ended with exit code {code}",
                        )
                time.sleep(HOST_ASKED_S / 10)
                asked = remote.news.call_one()
            return 1, "the host has stopped answering"
        except Exception as error:  # from Monarch: the process has ended, perhaps with its host
            return 1, f"its process ended: {_reason(error)}"
        finally:
            if mesh is not None:
                stop(mesh)
                self._meshes.pop(node, None)


def _reason(error: Exception) -> str:
    """Return one line of Monarch's long message: the exception that was raised on the host, if there is one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return ([line for line in lines if _RAISED.match(line)] or lines[:1])[-1][:200]


def stop(mesh) -> None:
    """End a mesh's processes."""
    try:
        mesh.stop().get(timeout=MESH_STOP_S)
    except Exception:  # the mesh is already gone
        pass
