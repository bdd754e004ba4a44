"""Stands in for a process that the fork server forks (forkserver.py), and ends with its exit code or signal.

Run it by its path. It loads only a few modules of the standard library:

    python -I -S fork_client.py DESCRIPTOR PARENT KEEP MODULE ARGUMENT...
"""

import json
import os
import resource
import signal
import socket
import sys


def _ask(server: int, keep: list, module: str, args: list) -> socket.socket | None:
    """Ask the server to run a module. Returns the connection on which the server reports the module's end, or None if
    nobody answered.
    """
    # If a standard stream is closed, no other descriptor may get its number.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(descriptor)
    kept = [0, 1, 2, *keep]
    try:
        asked = {
            "module": module,
            "args": args,
            "descriptors": kept,
            "directory": os.getcwd(),
            "environment": dict(os.environ),
        }
        mine, theirs = socket.socketpair()
        with socket.socket(fileno=server) as requests, open(os.memfd_create("request"), "w") as file:
            file.write(json.dumps(asked))
            file.flush()
            socket.send_fds(requests, [b"?"], [theirs.fileno(), file.fileno(), *kept])
        theirs.close()
        if not mine.recv(1):
            return None
    except OSError:
        return None
    # The forked process holds these now. A reader that waits for their end must not have to wait for this process.
    for descriptor in kept:
        os.close(descriptor)
    return mine


def _end(connection: socket.socket) -> int:
    """Wait for the forked process to end. Returns its exit code, negative for a signal."""
    told = b""
    try:
        while more := connection.recv(64):
            told += more
    except OSError:
        pass
    return int(told or -signal.SIGKILL)  # no report: the server has died, and the process with it


def main() -> None:
    descriptor, parent, keep, module, *args = sys.argv[1:]
    connection = _ask(int(descriptor), [int(number) for number in keep.split(",") if number], module, args)
    if connection is None:
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # as parent.die_with does; it survives exec
        if os.getppid() != int(parent):
            os._exit(1)
        os.execv(sys.executable, [sys.executable, "-P", "-m", module, *args])
    if (code := _end(connection)) < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:  # whose action cannot be set
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
