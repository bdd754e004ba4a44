"""The files of a checkpoint as several ranks write and read them, in the format of torch.distributed.checkpoint.

    plan     copies the state and divides the files among the ranks; collective, and touches no disk
    write    writes this rank's files and sums them on the way; in a thread, and without the other ranks
    finish   in the first rank, once all have left word of what they wrote: writes .metadata
    read     reads what a rank needs, and compares its sums on the way

torch's own `async_save` joins the ranks once more when they have written. There a slow rank fails all others.

A file is a sequence of pieces, one for each tensor or part of one. Each piece has a sum of its own, so a rank that
reads only some pieces of a file checks just these.
"""

from __future__ import annotations

import dataclasses
import io
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import msgspec
import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter, Metadata
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from asyncspec.errors import Damaged

METADATA = ".metadata"
File = tuple[int, list[tuple[int, int, int]]]  # its bytes; and of each piece: first byte, bytes, CRC-32


class Item(msgspec.Struct, array_like=True):
    """A tensor, a part of one or another value in a file."""

    name: str
    offset: list[int] | None  # of a part in its tensor
    index: int | None
    size: int
    file: str
    first: int
    length: int


class Word(msgspec.Struct):
    """What a rank has written, or why it has not."""

    error: str = ""
    files: dict[str, File] = {}
    items: list[Item] = []


class Plan:
    """One rank's copy of the state, and where it goes."""

    def __init__(self, state: dict[str, Any], folder: Path, group: Any = None) -> None:
        """Copy the state into host memory, and agree with the other ranks who writes what. Collective.

        Args:
            folder: where the files are to be written; `write` expects it to exist.
            group: the process group of the ranks that write together; None: this process writes alone.

        Raises:
            CheckpointException: a rank could not do its part; its `failures` say which and why.
        """
        warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")  # it warns about a single process
        together = _DistWrapper(group, group is not None, 0)
        self._planner, self._writer = DefaultSavePlanner(), FileSystemWriter(folder)
        self._files = self._writer.fs = _SummingFiles()
        self._metadata: Metadata | None = None  # in the first rank
        self._mine = self._planner.finish_plan(
            together.reduce_scatter("plan", lambda: self._begin(state, together), self._divide)
        )

    def _begin(self, state: dict[str, Any], together: _DistWrapper) -> SavePlan:
        stager = DefaultStager(StagingOptions(False, False, False, False))
        try:
            copy = cast(dict, stager.stage(state))
        finally:
            stager.close()
        leads = together.is_coordinator
        self._planner.set_up_planner(copy, storage_meta=self._writer.storage_meta(), is_coordinator=leads)
        self._writer.set_up_storage_writer(leads, rank=together.rank, use_collectives=True)
        return self._writer.prepare_local_plan(self._planner.create_local_plan())

    def _divide(self, plans: list[SavePlan]) -> list[SavePlan]:
        plans, self._metadata = self._planner.create_global_plan(plans)
        return self._writer.prepare_global_plan(plans)

    def write(self) -> Word:
        """Write this rank's files.

        Raises:
            Exception: they cannot be written; of what type depends on torch.
        """
        written = self._writer.write_data(self._mine, self._planner)
        written.wait()
        return Word(files=self._files.written, items=[_item(result) for result in written.value()])

    def finish(self, words: list[Word]) -> dict[str, File]:
        """Write .metadata; return all files. For the first rank only."""
        assert self._metadata is not None
        self._writer.finish(self._metadata, [[_result(item) for item in word.items] for word in words])
        own = self._files.written
        own[METADATA] = own.pop(METADATA + ".tmp")  # the name under which it was written
        return dict(
            sorted({name: file for word in [Word(files=own), *words] for name, file in word.files.items()}.items())
        )


class Reader(FileSystemReader):
    """Reads a checkpoint: each piece once, in the order of the file, and with its sum."""

    def __init__(self, folder: Path, files: dict[str, File]) -> None:
        """Read .metadata.

        Raises:
            Damaged: it has changed.
        """
        super().__init__(folder)
        self._sums = {(name, first): crc for name, (_, pieces) in files.items() for first, _, crc in pieces}
        self._unsummed = {name for name, (_, pieces) in files.items() if not pieces}
        self.fs = _FilesWithMetadata(self._checked(METADATA, 0, (folder / METADATA).read_bytes()))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner):
        """
        Raises:
            Damaged: a piece has changed.
        """

        def place(item) -> tuple[str, int]:
            at = self.storage_data[item.storage_index]
            return at.relative_path, at.offset

        return super().read_data(dataclasses.replace(plan, items=sorted(plan.items, key=place)), planner)

    def _slice_file(self, file, sinfo: _StorageInfo) -> IO[bytes]:
        file.seek(sinfo.offset)
        return self._checked(sinfo.relative_path, sinfo.offset, file.read(sinfo.length))

    def _checked(self, name: str, first: int, content: bytes) -> IO[bytes]:
        if name not in self._unsummed and zlib.crc32(content) != self._sums.get((name, first)):
            raise Damaged(f"{name} has changed since it was written")
        return io.BytesIO(content)


def _item(result: WriteResult) -> Item:
    at, where = result.index, result.storage_data
    offset = None if at.offset is None else list(at.offset)
    return Item(at.fqn, offset, at.index, result.size_in_bytes, where.relative_path, where.offset, where.length)


def _result(item: Item) -> WriteResult:
    offset = None if item.offset is None else torch.Size(item.offset)
    return WriteResult(
        index=MetadataIndex(item.name, offset, item.index),
        size_in_bytes=item.size,
        storage_data=_StorageInfo(item.file, item.first, item.length),
    )


class _SummingFiles(FileSystem):
    """Sums files while they are written, into a folder that exists and is empty."""

    def __init__(self) -> None:
        self.written: dict[str, File] = {}

    def mkdir(self, path) -> None:
        """Do nothing: torch asks for the folder in a collective, where a slow disk would hold up all ranks."""

    def exists(self, path) -> bool:
        return False

    @contextmanager
    def create_stream(self, path, mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as stream:
            summed = _Summed(cast(IO[bytes], stream))
            yield cast(io.IOBase, summed)
        self.written[Path(path).name] = summed.tell(), summed.pieces


class _Summed:
    """A file that is written from its beginning to its end. A piece ends where its writer asks for the position."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._crc, self._first, self._size = stream, 0, 0, 0
        self.pieces: list[tuple[int, int, int]] = []
        self.flush, self.fileno, self.close = stream.flush, stream.fileno, stream.close

    def write(self, data) -> int:
        self._crc = zlib.crc32(data, self._crc)
        self._size += memoryview(data).nbytes
        return self._stream.write(data)

    def tell(self) -> int:
        if self._size > self._first:
            self.pieces.append((self._first, self._size - self._first, self._crc))
            self._first, self._crc = self._size, 0
        return self._size


class _FilesWithMetadata(FileSystem):
    """Reads files, except .metadata, which has been read already."""

    def __init__(self, metadata: IO[bytes]) -> None:
        self._metadata = metadata

    @contextmanager
    def create_stream(self, path, mode: str) -> Iterator[io.IOBase]:
        if Path(path).name == METADATA:
            yield cast(io.IOBase, self._metadata)
            return
        with super().create_stream(path, mode) as stream:
            yield stream
