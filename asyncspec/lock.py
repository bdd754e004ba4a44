"""Locks that keep two processes from writing the same files, on every file system.

A lock is `flock`, which ends with its process. Some file systems have none, as Lustre without the mount option flock.
There a file beside the locked one says that it is locked. Its holder renews it every RENEW_S seconds, so one that no
longer changes is left from a process that died.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

from asyncspec.deadlines import LOCK_LEFT_S, LOCK_RENEW_S

SUFFIX = ".owner"  # appended to the name of a locked file where there is no flock


class Taken(Exception):
    """Another process holds the lock."""


class Lock:
    """A lock that this process holds until it ends or calls `release`."""

    def __init__(self, file: Path) -> None:
        """Take the lock of a file, which is made if it is not there.

        Raises:
            Taken: another process holds it.
            OSError: the file cannot be opened, made or locked.
        """
        self._owner, self._over, self._me = file.with_name(file.name + SUFFIX), threading.Event(), uuid.uuid4().hex
        self._renewing: threading.Thread | None = None
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not _flock(self._descriptor, fcntl.LOCK_EX):
                self._take_owner()
        except BaseException:
            os.close(self._descriptor)
            raise

    def release(self) -> None:
        if self._renewing is not None:
            self._over.set()
            self._renewing.join()
            if _content(self._owner) == self._me:
                self._owner.unlink(missing_ok=True)
        os.close(self._descriptor)

    def _take_owner(self) -> None:
        left = _content(self._owner)
        if left is not None:
            if _renewed(self._owner):
                raise Taken
            self._move_aside(left)
        mine = self._owner.with_name(f"{self._owner.name}.{self._me}")
        mine.write_text(self._me)
        try:
            os.link(mine, self._owner)  # of several processes one succeeds
        except FileExistsError:
            raise Taken from None
        finally:
            mine.unlink()
        self._renewing = threading.Thread(target=self._renew, name="lock", daemon=True)
        self._renewing.start()

    def _move_aside(self, left: str) -> None:
        """Remove a file that a dead process has left, unless another process has just replaced it."""
        aside = self._owner.with_name(f"{self._owner.name}.{self._me}")
        try:
            self._owner.rename(aside)
        except FileNotFoundError:
            return
        if _content(aside) != left:
            with suppress(FileExistsError):
                os.link(aside, self._owner)
            aside.unlink()
            raise Taken
        aside.unlink()

    def _renew(self) -> None:
        while not self._over.wait(LOCK_RENEW_S):
            if (found := _content(self._owner)) == self._me:
                with suppress(OSError):  # a server that cannot be reached now; the next time will do
                    os.utime(self._owner)
            elif found is not None:  # this process was stopped for so long that another one took the lock
                print(f"{self._owner}: another process has taken the lock; this one ends", flush=True)
                os.kill(os.getpid(), signal.SIGTERM)
                return


def held(file: Path) -> bool:
    """Whether a process holds the lock of a file. Without flock this takes some seconds.

    Raises:
        OSError: the file cannot be opened.
    """
    with open(file) as opened:
        try:
            if _flock(opened.fileno(), fcntl.LOCK_SH):
                return False
        except Taken:
            return True
        except OSError:
            pass
    return _renewed(file.with_name(file.name + SUFFIX))


def _flock(descriptor: int, how: int) -> bool:
    """Take a lock. Return False if this file system has none.

    Raises:
        Taken: another process holds it.
        OSError: it cannot be taken, for another reason: an NFS server that cannot be asked, for example.
    """
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Taken from None
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        return False
    return True


def _content(owner: Path) -> str | None:
    """Return what a file says; None if it is not there, or cannot be read now."""
    with suppress(OSError):
        return owner.read_text()
    return None


def _renewed(owner: Path) -> bool:
    """Wait until a lock's holder renews it. Return False if it does not, or nobody holds it."""
    first, until = _changed(owner), time.monotonic() + LOCK_LEFT_S
    while first is not None and time.monotonic() < until:
        time.sleep(LOCK_RENEW_S / 4)
        if (changed := _changed(owner)) != first:
            return changed is not None
    return False


def _changed(owner: Path) -> int | None:
    """Return when a file was last changed, in nanoseconds; None if it is not there. It is opened, since a network file
    system may otherwise tell what it remembers.
    """
    with suppress(OSError), open(owner) as file:
        return os.fstat(file.fileno()).st_mtime_ns
    return None
