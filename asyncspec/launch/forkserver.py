"""Processes that need not load their libraries: a server has loaded them once, and forks.

Loading takes seconds of a processor for each process; a fork takes milliseconds, so a run starts sooner, and what
replaces the dead is there at once. multiprocessing's own fork server forks only for the process that has begun it; here
whoever can run a command may ask, Monarch's hosts among them, and the process that asked (fork_client.py) stands for
the forked one: it ends as that does, and that ends when it does.

    server = ForkServer(["torch"]) subprocess.Popen(server.command("package.module", "argument"),
    pass_fds=[server.descriptor])    # python -m package.module argument

The server has one thread and touches no GPU. When whoever began it ends, so do the server and all it forked. Where
there is none, or it cannot fork, the client runs the module as Python would, and that too ends with who began it. What
is forked looks for modules where the server does, and hashes strings alike.
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
import threading
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

from asyncspec.launch import ending
from asyncspec.loading import gc_paused, without_gpus

_CLIENT = str(Path(__file__).with_name("fork_client.py"))
_PR_SET_PDEATHSIG = 1
_ALWAYS = ("connection", "request", "stdin", "stdout", "stderr")  # descriptors that come with a request
_MOST = 16  # of them, with those to be kept


class ForkServer:
    """The server, as seen by the process that begins it, which should do so in its main thread: with the thread ends
    the server.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        """
        Args:
            modules: that it loads; those that begin threads must not be among them.
        """
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # which libraries read as they are loaded
        self._modules = list(modules)
        # which a process that runs `command` must inherit; it keeps its number
        self.descriptor = os.open(os.devnull, os.O_RDONLY)
        self._begin()

    def _begin(self) -> None:
        requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.dup2(requests.fileno(), self.descriptor)  # inheritable: Monarch's processes do
        requests.close()
        command = [sys.executable, "-m", __name__, str(os.getpid()), str(theirs.fileno()), *self._modules]
        # A session of its own: an interrupt from the terminal is for the launcher.
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
        )
        theirs.close()

    def command(self, module: str, *args: str, keep: Sequence[int] = ()) -> list[str]:
        """A command, for a child of this process, that does what `python -m module args...` does; begins another server
        if this one has died.

        Args:
            keep: further descriptors that the module inherits, few.
        """
        assert len(keep) <= _MOST - len(_ALWAYS), keep
        if self._process.poll() is not None:
            self._begin()
        kept = ",".join(map(str, keep))
        return [sys.executable, "-I", "-S", _CLIENT, str(self.descriptor), str(os.getpid()), kept, module, *args]

    def close(self) -> None:
        """End the server and all that it has forked; nothing is to be begun after it."""
        self._process.kill()
        self._process.wait()
        os.close(self.descriptor)


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
                ending.end(one.descriptor)
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
                pid, descriptor = _fork()
                if pid == 0:
                    die_with(server)
                    selector.close()
                    for other in alive:
                        os.close(other.descriptor)
                    for held in (requests, client, *(other.client for other in alive)):
                        held.close()
                    _become(asked, given)
                    return asked
                _close(given)
                if pid < 0:  # who asked runs it by itself, then
                    client.close()
                    continue
                _tell(client, b"!")
                alive.append(one := _Forked(pid, descriptor, client))
                for fileobj in (one.descriptor, client):
                    selector.register(fileobj, selectors.EVENT_READ, one)


def _fork() -> tuple[int, int]:
    """A new process's id and a descriptor of it; its id is 0 in itself, and negative where there is no room for
    another.
    """
    try:
        number = os.open(os.devnull, os.O_RDONLY)  # for the descriptor
        pid = os.fork()
        os.close(number)
        return pid, os.pidfd_open(pid) if pid else -1
    except OSError as error:
        print(f"fork server: {error.strerror}", file=sys.stderr, flush=True)
        return -1, -1


def _next(requests: socket.socket) -> tuple[dict, socket.socket, list[int]] | None:
    """(what is asked for, the connection to who asks, the descriptors that came with it); None if they have not all
    come.
    """
    try:
        message, descriptors, flags, _ = socket.recv_fds(requests, 1, _MOST)
    except OSError:  # no number is left for any
        return None
    if not message:  # nobody is left who could ask
        os._exit(0)
    if flags & socket.MSG_CTRUNC or len(descriptors) < len(_ALWAYS):
        _close(descriptors)
        return None
    connection, request, *given = descriptors
    with open(request, "rb") as file:  # in memory: nobody is waited for
        file.seek(0)
        return json.load(file), socket.socket(fileno=connection), given


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _tell(client: socket.socket, what: bytes) -> None:
    try:
        client.sendall(what)
    except OSError:  # it has ended
        pass


def _become(asked: dict, given: Sequence[int]) -> None:
    """What a process inherits when it is begun: descriptors by their numbers, a directory, an environment; and a
    session of its own.
    """
    os.setsid()
    free = max(asked["descriptors"]) + 1
    out_of_the_way = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, free) for descriptor in given]
    _close(given)
    for moved, wanted in zip(out_of_the_way, asked["descriptors"]):
        os.dup2(moved, wanted)
        os.close(moved)
    os.chdir(asked["directory"])
    os.environ.clear()
    os.environ.update(asked["environment"])


def _end(code: object) -> None:
    """Of a process that was forked, as Python ends one, but without taking apart all that is loaded: that takes as long
    as loading it.

    Args:
        code: what SystemExit was given.
    """
    threading._shutdown()  # as multiprocessing does
    atexit._run_exitfuncs()
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # nobody reads it any more; it is closed; there is none
            pass
    os._exit((code or 0) & 0xFF)


def _main() -> None:
    parent, descriptor, *modules = sys.argv[1:]
    die_with(int(parent))
    with gc_paused(), without_gpus() if "torch" in modules else nullcontext():
        for module in modules:
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # what is loaded stays, in memory that those who are forked share
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or each of them would print what is left
    asked = _serve(socket.socket(fileno=int(descriptor)))
    sys.argv[1:] = asked["args"]
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    try:
        runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        _end(end.code)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        _end(1)
    _end(None)


if __name__ == "__main__":
    _main()
