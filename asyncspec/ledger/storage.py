"""The files of a checkpoint as one of several ranks writes them, in the format of torch.distributed.checkpoint.

    plan     copies the state and divides the files among the ranks; collective
    write    writes this rank's files and sums them on the way; in a thread, and without the other ranks
    finish   in the first rank, once all have left word of what they wrote: writes .metadata

torch's own `async_save` joins the ranks once more when they have written. There a slow rank fails all others.
"""

from __future__ import annotations

import io
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import msgspec
import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, Metadata
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

METADATA = ".metadata"


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
    files: dict[str, tuple[int, int]] = {}  # name -> bytes, CRC-32
    items: list[Item] = []


class Plan:
    """One rank's copy of the state, and where it goes."""

    def __init__(self, state: dict[str, Any], folder: Path, ranks: int, prepare: Callable[[], None]) -> None:
        """Copy the state into host memory, and agree with the other ranks who writes what. Collective.

        Args:
            ranks: how many ranks write together, which torch.distributed connects; 1: this process writes alone.
            prepare: called first. Its errors reach all ranks.

        Raises:
            CheckpointException: a rank could not do its part; its `failures` say which and why.
        """
        warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")  # it warns about a single process
        together = _DistWrapper(None, ranks > 1, 0)
        self._planner, self._writer = DefaultSavePlanner(), FileSystemWriter(folder)
        self._files = self._writer.fs = _SummingFiles()
        self._metadata: Metadata | None = None  # in the first rank
        self._mine = self._planner.finish_plan(
            together.reduce_scatter("plan", lambda: self._begin(state, together, prepare), self._divide)
        )

    def _begin(self, state: dict[str, Any], together: _DistWrapper, prepare: Callable[[], None]) -> SavePlan:
        prepare()
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
        return Word(files=self._files.sums, items=[_item(result) for result in written.value()])

    def finish(self, words: list[Word]) -> dict[str, tuple[int, int]]:
        """Write .metadata; return all files: name -> bytes, CRC-32. For the first rank only."""
        assert self._metadata is not None
        self._writer.finish(self._metadata, [[_result(item) for item in word.items] for word in words])
        own = self._files.sums
        own[METADATA] = own.pop(METADATA + ".tmp")  # the name under which it was written
        return dict(
            sorted({name: sum for word in [Word(files=own), *words] for name, sum in word.files.items()}.items())
        )


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
    """Sums files while they are written."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[int, int]] = {}  # name -> bytes, CRC-32

    @contextmanager
    def create_stream(self, path, mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as stream:
            summed = _Summed(cast(IO[bytes], stream))
            yield cast(io.IOBase, summed)
        self.sums[Path(path).name] = summed.size, summed.crc


class _Summed:
    """A file that is written from its beginning to its end."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self.size, self.crc = stream, 0, 0
        self.flush, self.fileno, self.close = stream.flush, stream.fileno, stream.close

    def write(self, data) -> int:
        self.crc = zlib.crc32(data, self.crc)
        self.size += memoryview(data).nbytes
        return self._stream.write(data)

    def tell(self) -> int:
        return self.size
