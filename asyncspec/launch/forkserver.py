"""A fork server: it loads the libraries once, and the processes that it forks need not load them.

Loading takes each process seconds of processor time; a fork takes milliseconds. So a run starts sooner, and the
replacement of a dead actor is up at once. multiprocessing's own fork server forks only for the process that started it.
This one forks for any process that can run a command, Monarch's hosts among them. That process, the client
(fork_client.py), stands in for the forked one: it ends as the forked process ends, and the forked process ends with it.

    server = ForkServer(["torch"])
    # does what `python -m package.module argument` does
    subprocess.Popen(server.command("package.module", "argument"), pass_fds=[server.descriptor])

The server has one thread and touches no GPU. When the process that started it ends, the server and all processes that
it forked end too. If there is no server, or it cannot fork, the client runs the module itself, as Python would; the
client then ends with its parent. A forked process has the server's module search path and string hashes.
"""

from __future__ import annotations

import atexit
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
from asyncspec.parent import die_with

_CLIENT = str(Path(__file__).with_name("fork_client.py"))
_ALWAYS = ("connection", "request", "stdin", "stdout", "stderr")  # descriptors that come with each request
_MOST = 16  # descriptors in one request, with those that the module keeps


class ForkServer:
    """The server, as seen by the process that starts it. Start it in the main thread: it ends when the thread that
    started it ends.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        """
        Args:
            modules: the modules that the server loads. None of them may start threads.
        """
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # libraries read it while they load
        self._modules = list(modules)
        # A process that runs `command` must inherit this descriptor. A new server keeps its number.
        self.descriptor = os.open(os.devnull, os.O_RDONLY)
        self._begin()

    def _begin(self) -> None:
        requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.dup2(requests.fileno(), self.descriptor)  # makes it inheritable: Monarch's processes inherit it
        requests.close()
        command = [sys.executable, "-P", "-m", __name__, str(os.getpid()), str(theirs.fileno()), *self._modules]
        # The server has its own session, so an interrupt from the terminal reaches the launcher alone.
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
        )
        theirs.close()

    def command(self, module: str, *args: str, keep: Sequence[int] = ()) -> list[str]:
        """Return a command, for a child of this process, that does what `python -m module args...` does. Starts a new
        server if this one has died.

        Args:
            keep: a few further descriptors that the module inherits.
        """
        assert len(keep) <= _MOST - len(_ALWAYS), keep
        if self._process.poll() is not None:
            self._begin()
        kept = ",".join(map(str, keep))
        return [sys.executable, "-I", "-S", _CLIENT, str(self.descriptor), str(os.getpid()), kept, module, *args]

    def close(self) -> None:
        """End the server and all processes that it has forked. Start no process after this."""
        self._process.kill()
        self._process.wait()
        os.close(self.descriptor)


class _Forked(NamedTuple):
    pid: int
    descriptor: int  # readable once the process has ended
    client: socket.socket  # readable once the client has ended


def _serve(requests: socket.socket) -> dict:
    """Fork for each request. Returns only in the forked processes, each time the request."""
    selector, server = selectors.DefaultSelector(), os.getpid()
    selector.register(requests, selectors.EVENT_READ)
    alive: list[_Forked] = []
    while True:
        for key, _ in selector.select():
            if selector.get_map().get(key.fd) != key:  # unregistered just now, with the process's other descriptor
                continue
            one: _Forked | None = key.data
            if one is not None and key.fileobj is one.client:  # the client has ended
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
                if pid < 0:  # the client then runs the module itself
                    client.close()
                    continue
                _tell(client, b"!")
                alive.append(one := _Forked(pid, descriptor, client))
                for fileobj in (one.descriptor, client):
                    selector.register(fileobj, selectors.EVENT_READ, one)


def _fork() -> tuple[int, int]:
    """Fork. Returns the new process's id and a descriptor of it. The id is 0 in the new process, and negative if there
    is no room for another process.
    """
    try:
        number = os.open(os.devnull, os.O_RDONLY)  # reserves a number for the descriptor
        pid = os.fork()
        os.close(number)
        return pid, os.pidfd_open(pid) if pid else -1
    except OSError as error:
        print(f"fork server: {error.strerror}", file=sys.stderr, flush=True)
        return -1, -1


def _next(requests: socket.socket) -> tuple[dict, socket.socket, list[int]] | None:
    """Return (the request, the connection to the client, the descriptors that came with it), or None if not all of them
    arrived.
    """
    try:
        message, descriptors, flags, _ = socket.recv_fds(requests, 1, _MOST)
    except OSError:  # no descriptor number is free
        return None
    if not message:  # no process is left that could send a request
        os._exit(0)
    if flags & socket.MSG_CTRUNC or len(descriptors) < len(_ALWAYS):
        _close(descriptors)
        return None
    connection, request, *given = descriptors
    with open(request, "rb") as file:  # a file in memory: reading it never waits
        file.seek(0)
        return json.load(file), socket.socket(fileno=connection), given


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _tell(client: socket.socket, what: bytes) -> None:
    try:
        client.sendall(what)
    except OSError:  # the client has ended
        pass


def _become(asked: dict, given: Sequence[int]) -> None:
    """Give this process what the client passed on: the descriptors under their numbers, the directory and the
    environment. Start a session of its own as well.
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
    """End a forked process as Python ends one, but without tearing down the loaded modules: that takes as long as to
    load them.

    Args:
        code: the argument of SystemExit.
    """
    threading._shutdown()  # as multiprocessing does
    atexit._run_exitfuncs()
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # the reader is gone, the stream is closed, or there is none
            pass
    os._exit((code or 0) & 0xFF)


def _main() -> None:
    parent, descriptor, *modules = sys.argv[1:]
    die_with(int(parent))
    with gc_paused(), without_gpus() if "torch" in modules else nullcontext():
        for module in modules:
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # the forked processes share the memory of what is loaded
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # otherwise each forked process would print what is still buffered
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
