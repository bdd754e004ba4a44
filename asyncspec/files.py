"""The files of a run: those that are replaced as a whole, and those that grow line by line."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def replace_file(file: Path, content: str | bytes) -> None:
    """Write a file's new content under a temporary name beside it, then rename it. A reader sees the old file or the
    new one, never a part of one.

    Raises:
        OSError: it cannot be written; the error names it.
    """
    partial = file.with_name(file.name + ".partial")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        partial.replace(file)
    except OSError as error:
        error.filename = error.filename or str(partial)
        raise


def write_json(file: Path, content: Any) -> None:
    """Replace a file by an object as indented JSON."""
    replace_file(file, json.dumps(content, indent=2) + "\n")


BEFORE = ".before.partial"  # appended to the name of a folder that another one replaces


def replace_folder(folder: Path, by: Path) -> None:
    """Give a folder the name of another one, which is removed if it is there.

    Raises:
        OSError: it cannot be renamed.
    """
    before = folder.with_name(folder.name + BEFORE)
    if folder.exists():  # else an earlier call was cut short, and `before` is all there is
        shutil.rmtree(before, ignore_errors=True)
        folder.rename(before)  # NFS does not remove a folder while somebody reads a file of it
    try:
        by.rename(folder)
    except OSError:
        with suppress(OSError):
            before.rename(folder)
        raise
    shutil.rmtree(before, ignore_errors=True)


def put_back(folder: Path) -> None:
    """Give a folder its name back that `replace_folder` had renamed when it was cut short."""
    before = folder.with_name(folder.name + BEFORE)
    if before.is_dir() and not folder.exists():
        before.rename(folder)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder under a temporary name. At the end it gets its name, and takes the place of a folder that has it.
    What is not written to its end, also by a process that died, is removed.

    Raises:
        OSError: it cannot be made or renamed.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        replace_folder(folder, partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


SPARE_BYTES = 1 << 22  # kept for the last lines of a run whose disk is full: of the steps that are still coming in


class LineFiles:
    """Files of one directory that grow line by line and belong together. Once one of them cannot be written, because
    its disk is full or it was removed, the run has to end. A full disk still has room for a run's last lines, which was
    kept for them. When that is used up, or was not to be had, none of the files is written any more: so they agree.
    """

    def __init__(self, folder: Path, failed: Callable[[str], None], spare: int = SPARE_BYTES) -> None:
        """
        Args:
            folder: the directory.
            failed: called once, with a line that names the file and the cause, when a file cannot be written.
            spare: bytes to keep for the last lines.
        """
        self.folder, self._failed = folder, failed
        self.failure = ""  # that line; "": all is well
        self.stopped = False  # nothing is written any more
        self._spare: int | None = None
        if not spare:
            return
        with suppress(OSError):  # there is no room, or this file system has no files without a name
            self._spare = os.open(folder, os.O_TMPFILE | os.O_WRONLY)
            os.posix_fallocate(self._spare, 0, spare)

    def open(self, name: str, new: bool = False) -> LineFile:
        """Open a file to append to it. Make it if it is not there.

        Args:
            new: empty the file first.

        Raises:
            OSError: it cannot be opened.
        """
        return LineFile(self, self.folder / name, new)

    def fail(self, path: Path, error: OSError) -> bool:
        """Note that a file cannot be written. Return whether there is room now to try again."""
        again = self._spare is not None and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        self.stopped = not again
        if not self.failure:
            self.failure = f"{path} cannot be written: {error.strerror}"
            self._failed(self.failure)
        return again


class LineFile:
    """One of several `LineFiles`. What is written to it at once is in it whole or not at all, unless this process is
    killed meanwhile.
    """

    def __init__(self, files: LineFiles, path: Path, new: bool) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if new else 0)
        self._files, self._path = files, path
        self.descriptor = os.open(path, flags, 0o666)

    def write(self, text: str | bytes) -> None:
        """Write a line, or several."""
        if self._files.stopped:
            return
        rest = memoryview(text.encode() if isinstance(text, str) else text)
        size = os.fstat(self.descriptor).st_size
        try:
            while rest:
                rest = rest[os.write(self.descriptor, rest) :]
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self.descriptor, size)
            if self._files.fail(self._path, error):
                self.write(text)

    def sync(self) -> None:
        """Flush what was written to the disk, so that it survives a crash of the machine and not only of this process.
        Check that the file is still there.
        """
        if self._files.stopped:
            return
        try:
            os.fsync(self.descriptor)
            if not os.path.samestat(os.stat(self._path), os.fstat(self.descriptor)):
                raise FileNotFoundError(0, "another file has taken its place")
        except OSError as error:
            self._files.fail(self._path, error)

    def close(self) -> None:
        try:
            os.close(self.descriptor)
        except OSError as error:  # some file systems report only now that they had no room
            self._files.fail(self._path, error)
