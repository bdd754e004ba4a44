"""Processes that need not load their libraries: a server has loaded them once, and forks.

Loading takes seconds of a processor for each process; a fork takes milliseconds, so a run starts sooner, and what replaces the dead is there at
once. multiprocessing's own fork server forks only for the process that has begun it; here whoever can run a command may ask, Monarch's
hosts among them, and the process that asked (fork_client.py) stands for the forked one: it ends as that does, and that ends when it does.

    server = ForkServer(["torch"])
    subprocess.Popen(server.command("package.module", "argument"), pass_fds=[server.descriptor])    # python -m package.module argument

The server has one thread and touches no GPU. When whoever began it ends, so do the server and all it forked. Where there is none, the client
runs the module as Python would, and that too ends with who began it.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import NamedTuple, Sequence

from asyncspec.loading import uncollected

_CLIENT = str(Path(__file__).with_name("fork_client.py"))
_PR_SET_PDEATHSIG = 1
_MOST = 16  # descriptors that come with a request


class ForkServer:
    """The server, as seen by the process that begins it, which should do so in its main thread: with the thread ends the server."""

    def __init__(self, modules: Sequence[str]) -> None:
        """
        Args:
            modules: that it loads; those that begin threads must not be among them.
        """
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # which libraries read as they are loaded
        self._modules = list(modules)
        self._process: subprocess.Popen | None = None
        self._requests: socket.socket | None = None
        self._begin()

    def _begin(self) -> None:
        self.close()
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.set_inheritable(True)  # Monarch's processes inherit it
        command = [sys.executable, "-m", __name__, str(os.getpid()), str(theirs.fileno()), *self._modules]
        # A session of its own: an interrupt from the terminal is for the launcher.
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True)
        theirs.close()

    @property
    def descriptor(self) -> int:
        """What a process that runs `command` must inherit."""
        return self._requests.fileno()

    def command(self, module: str, *args: str, keep: Sequence[int] = ()) -> list[str]:
        """A command, for a child of this process, that does what `python -m module args...` does; begins another server if this one has died.

        Args:
            keep: further descriptors that the module inherits.
        """
        if self._process.poll() is not None:
            self._begin()
        kept = ",".join(map(str, keep))
        return [sys.executable, "-I", "-S", _CLIENT, str(self.descriptor), str(os.getpid()), kept, module, *args]

    def close(self) -> None:
        """End the server and all that it has forked."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._requests.close()


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; call it first."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class _Forked(NamedTuple):
    pid: int
    descriptor: int  # readable once it has ended
    client: socket.socket  # readable once that has ended


def _serve(requests: socket.socket) -> dict:
    """Fork for each request; returns in each process that was forked: what was asked for."""
    selector, server = selectors.DefaultSelector(), os.getpid()
    selector.register(requests, selectors.EVENT_READ)
    alive: list[_Forked] = []
    while True:
        for key, _ in selector.select():
            if selector.get_map().get(key.fd) != key:  # taken out just now, with the other of a process's two
                continue
            one: _Forked | None = key.data
            if one is not None and key.fileobj is one.client:  # nobody stands for it any more
                selector.unregister(one.client)
                signal.pidfd_send_signal(one.descriptor, signal.SIGKILL)
            elif one is not None:
                _tell(one.client, b"%d" % os.waitstatus_to_exitcode(os.waitpid(one.pid, 0)[1]))
                for held in {one.descriptor, one.client.fileno()} & set(selector.get_map()):
                    selector.unregister(held)
                os.close(one.descriptor)
                one.client.close()
                alive.remove(one)
            else:
                found = _next(requests)
                if found is None:
                    continue
                asked, client, given = found
                try:
                    pid = os.fork()
                except OSError as error:  # who asked runs it by itself, then
                    print(f"fork server: {error.strerror}", file=sys.stderr)
                    pid = -1
                if pid == 0:
                    die_with(server)
                    selector.close()
                    for other in alive:
                        os.close(other.descriptor)
                    for held in (requests, client, *(other.client for other in alive)):
                        held.close()
                    _become(asked, given)
                    return asked
                for descriptor in given:
                    os.close(descriptor)
                if pid < 0:
                    client.close()
                    continue
                _tell(client, b"!")
                alive.append(one := _Forked(pid, os.pidfd_open(pid), client))
                for fileobj in (one.descriptor, client):
                    selector.register(fileobj, selectors.EVENT_READ, one)


def _next(requests: socket.socket) -> tuple[dict, socket.socket, list[int]] | None:
    """(what is asked for, the connection to who asks, the descriptors that came with it); None if who asked has ended."""
    message, descriptors, _, _ = socket.recv_fds(requests, 1, _MOST)
    if not message:  # nobody is left who could ask
        os._exit(0)
    descriptor, *given = descriptors
    client = socket.socket(fileno=descriptor)
    try:
        with client.makefile("rb") as file:
            return json.loads(file.readline()), client, given
    except (OSError, ValueError):
        client.close()
        for descriptor in given:
            os.close(descriptor)
        return None


def _tell(client: socket.socket, what: bytes) -> None:
    try:
        client.sendall(what)
    except OSError:  # it has ended
        pass


def _become(asked: dict, given: Sequence[int]) -> None:
    """What a process inherits when it is begun: descriptors by their numbers, a directory, an environment; and a session of its own."""
    os.setsid()
    free = max(asked["descriptors"]) + 1
    out_of_the_way = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, free) for descriptor in given]
    for descriptor in given:
        os.close(descriptor)
    for moved, wanted in zip(out_of_the_way, asked["descriptors"]):
        os.dup2(moved, wanted)
        os.close(moved)
    os.chdir(asked["directory"])
    os.environ.clear()
    os.environ.update(asked["environment"])


def _main() -> None:
    parent, descriptor, *modules = sys.argv[1:]
    die_with(int(parent))
    with uncollected():
        for module in modules:
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # what is loaded stays, in memory that those who are forked share
    asked = _serve(socket.socket(fileno=int(descriptor)))
    sys.argv[1:] = asked["args"]
    code = 1
    try:
        runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)  # taking all that is loaded apart, which a whole exit does, takes as long as loading it


if __name__ == "__main__":
    _main()
