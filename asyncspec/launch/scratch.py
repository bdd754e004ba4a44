"""Keeps what Monarch leaves behind out of the user's temporary directory.

Monarch puts a socket for each process into a directory that it never removes, and a socket's path may have 107 bytes
only. So a launcher gives it a directory with a short path, and removes it. A launcher that is killed cannot; the next
one removes the directory then. Monarch also appends to a log in /tmp/USER, without end; it gets one of its own, for
errors only, which the launcher removes. Who needs that log sets MONARCH_FILE_LOG, for example to info.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from asyncspec.errors import UserError


def _login() -> str:
    """Return the name of the user that this process runs as, as Monarch has it."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container's user without a name
        return os.environ.get("USER", "")


_ELSEWHERE = ("/tmp", "/var/tmp", "/dev/shm")  # where to look if the user's temporary directory cannot be used
_PREFIX, _LOCK = "asyncspec-", "lock"
_LIKE_MONARCH = ".tmpabcdef-0123456789ab"  # as long as a socket's path in the directory, or longer

# Monarch reads these when it is imported, and makes these directories.
_LEVEL, _SUFFIX = (
    os.environ.setdefault(name, value)
    for name, value in (("MONARCH_FILE_LOG", "error"), ("MONARCH_LOG_SUFFIX", "asyncspec"))
)
_ABSENT = [
    path
    for path in {f"/tmp/{_login()}", os.path.join(os.environ.get("TMPDIR") or "/tmp", os.environ.get("USER", ""))}
    if not os.path.exists(path)
]


@contextmanager
def directory() -> Iterator[str]:
    """Make a directory for sockets, and remove it in the end. Remove those of dead launchers as well.

    Raises:
        UserError: no temporary directory of this host can hold sockets.
    """
    path, lock = _make()
    for old in Path(path).parent.glob(f"{_PREFIX}*/{_LOCK}"):
        _remove_dead(old)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
        _remove_log()


def check() -> str:
    """Check that there can be such a directory. Returns where.

    Raises:
        UserError: no temporary directory of this host can hold sockets.
    """
    with directory() as path:
        return f"{os.path.dirname(path)} can hold sockets"


@contextmanager
def monarch_in(path: str) -> Iterator[None]:
    """Have Monarch make its directory in this one, and print nothing on standard error: it does not survive if that
    cannot be written. Start Monarch's host in here, and nothing else.
    """
    before, error = os.environ.get("XDG_RUNTIME_DIR"), os.dup(2)
    os.environ["XDG_RUNTIME_DIR"] = path
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(error, 2)
        os.close(error)
        os.close(nowhere)
        if before is None:
            del os.environ["XDG_RUNTIME_DIR"]
        else:
            os.environ["XDG_RUNTIME_DIR"] = before


def _make() -> tuple[str, int]:
    """Make a directory in the first temporary directory that can hold sockets. Return it and its lock's descriptor."""
    asked, wrong = os.environ.get("TMPDIR", ""), ""
    for parent in dict.fromkeys((asked or _ELSEWHERE[0], *_ELSEWHERE)):
        path = ""
        try:
            path = tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=os.path.abspath(parent))
            _hold_socket(path)
            descriptor = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # It gets the name that others look for only once it is locked.
            os.rename(path, named := os.path.join(os.path.dirname(path), os.path.basename(path)[1:]))
            return named, descriptor
        except OSError as error:
            wrong = wrong or f"{parent}: {error.strerror or error}"
            shutil.rmtree(path, ignore_errors=True)
    raise UserError(
        f"TMPDIR={asked!r}: {wrong}; expected a directory that can hold sockets, and neither can any of "
        f"{', '.join(_ELSEWHERE)}; nearest valid choice: TMPDIR set to another directory with a short path"
    )


def _hold_socket(path: str) -> None:
    """Make a socket with a path as long as Monarch's, and remove it.

    Raises:
        OSError: its path is too long, or the file system has no sockets.
    """
    name = os.path.join(path, _LIKE_MONARCH)
    with socket.socket(socket.AF_UNIX) as probe:
        probe.bind(name)
    os.unlink(name)


def _remove_dead(lock: Path) -> None:
    """Remove the directory of this lock if nobody holds the lock."""
    if lock.parent.lstat().st_uid != os.geteuid():
        return
    with suppress(OSError), open(lock) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(lock.parent, ignore_errors=True)


def _remove_log() -> None:
    """Remove the log that Monarch has opened in this process, unless the user has asked for it. Remove the directories
    that it has made for itself.
    """
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{descriptor}").removesuffix(" (deleted)")
            if (_LEVEL, _SUFFIX) == ("error", "asyncspec") and path.endswith("/monarch_log_asyncspec.log"):
                os.unlink(path)
    for made in _ABSENT:
        with suppress(OSError):  # something else is in it
            os.rmdir(made)
