"""Checkpoints to resume from: written in the background, whole or not at all; the newest few are kept.

    RUN/checkpoints/trainer-000040/    files of torch.distributed.checkpoint, and manifest.json, with the size in bytes
                                       and the CRC-32 of each file

A checkpoint is written under a temporary name and renamed when its manifest is on disk, so an interrupted one never has
a checkpoint's name. A checkpoint that was damaged later does not match its manifest; it is skipped, and the one before
it is used.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from asyncspec.errors import first_line

FOLDER, MANIFEST, PARTIAL = "checkpoints", "manifest.json", ".partial"
_BLOCK = 1 << 22


class Checkpoints:
    """The checkpoints that one actor writes in a run."""

    def __init__(self, run_dir: Path, kind: str, keep: int, ranks=None) -> None:
        """
        Args:
            run_dir: the run's directory.
            kind: which actor writes them: trainer or draft.
            keep: number of complete checkpoints to keep.
            ranks: the `Ranks` that write a checkpoint together, into a directory that all can reach; None: this process
                writes alone.
        """
        import torch.distributed.checkpoint  # noqa: F401  this takes a second, which should be part of loading

        self.run_dir, self.folder, self.kind, self.keep = run_dir, run_dir / FOLDER, kind, keep
        self._leads = ranks is None or ranks.rank == 0
        self._group = None if ranks is None else ranks.checkpoints
        if self._leads:
            drop_cut_short(run_dir, kind)  # left by a dead actor that this one replaces
        self._pool = ThreadPoolExecutor(1, f"checkpoint-{kind}")
        self._writing: tuple[int, Future] | None = None

    @property
    def busy(self) -> bool:
        return self._writing is not None and not self._writing[1].done()

    def save(self, version: int, state: dict[str, Any]) -> None:
        """Copy the state now and write it in the background. Only one at a time: check `busy` first. `saved` reports
        the end.
        """
        import torch.distributed.checkpoint as dcp

        warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")  # it warns about a single process
        partial = self._partial(version)
        if self._leads:
            shutil.rmtree(partial, ignore_errors=True)
            self.folder.mkdir(parents=True, exist_ok=True)
        staged = dcp.async_save(
            state, checkpoint_id=str(partial), no_dist=self._group is None, process_group=self._group
        )
        self._writing = version, self._pool.submit(self._seal, cast(Future, staged), partial, version)

    def saved(self, wait: bool = False) -> int | None:
        """Return the version of a checkpoint that was completed since the last call; None if there is none.

        Args:
            wait: wait until the checkpoint that is being written is complete.

        Raises:
            OSError: it could not be written (for example, the disk is full). Earlier checkpoints are unchanged.
        """
        if self._writing is None or (self.busy and not wait):
            return None
        version, future = self._writing
        self._writing = None
        try:
            future.result()
        except BaseException as error:  # torch wraps the file system's errors in many types
            if self._leads:
                shutil.rmtree(self._partial(version), ignore_errors=True)
            raise OSError(f"checkpoint of version {version}: {_root(error)}") from error
        return version

    def _partial(self, version: int) -> Path:
        final = where(self.run_dir, self.kind, version)
        return final.with_name(final.name + PARTIAL)

    def _seal(self, staged: Future, partial: Path, version: int) -> None:
        staged.result()  # returns when all ranks have written their files
        if not self._leads:
            return
        files = {file.name: [file.stat().st_size, _crc(file)] for file in sorted(partial.iterdir())}
        with open(partial / MANIFEST, "w") as manifest:
            json.dump({"kind": self.kind, "version": version, "files": files}, manifest)
            manifest.flush()
            os.fsync(manifest.fileno())
        final = where(self.run_dir, self.kind, version)
        shutil.rmtree(final, ignore_errors=True)  # of the same version, written before a rewind
        partial.rename(final)
        _sync(self.folder)
        for _, old in _found(self.folder, self.kind)[self.keep :]:
            shutil.rmtree(old, ignore_errors=True)


def newest(
    run_dir: Path, kind: str, passed_over: Callable[[str], None] = lambda text: None, at_most: int | None = None
) -> tuple[int, Path] | None:
    """Return the version and the path of the newest complete checkpoint; None if there is none.

    Args:
        passed_over: called with one line for each newer checkpoint that is damaged and skipped.
        at_most: ignore versions after this one.
    """
    for version, found in _found(run_dir / FOLDER, kind):
        if at_most is not None and version > at_most:
            continue
        if not (fault := damage(found)):
            return version, found
        passed_over(f"checkpoint {found.name} is skipped: {fault}")
    return None


def where(run_dir: Path, kind: str, version: int) -> Path:
    """Return the path of a version's checkpoint, whether it exists or not."""
    return run_dir / FOLDER / f"{kind}-{version:06d}"


def learned(module, optimizer) -> dict[str, Any]:
    """Return a module's parameters and its AdamW's moments, for `save`. They are the live tensors, so `load` fills them
    in place.
    """
    import torch

    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    for parameter in module.parameters():
        if not optimizer.state[parameter]:  # before the first step; AdamW itself starts with the same values
            optimizer.state[parameter] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }
    moments = {
        f"{name}/{key}": value
        for name, parameter in module.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    return {"parameters": parameters, "moments": moments}


def load(path: Path, state: dict[str, Any]) -> None:
    """Read a checkpoint into `state`, in place. It must have the same structure as the state that was saved."""
    import torch.distributed.checkpoint as dcp

    dcp.load(state, checkpoint_id=str(path), no_dist=True)


def drop_after(run_dir: Path, kind: str, version: int) -> None:
    """Remove the checkpoints of later versions, which a rewind to `version` has undone."""
    for later, found in _found(run_dir / FOLDER, kind):
        if later > version:
            shutil.rmtree(found, ignore_errors=True)


def drop_cut_short(run_dir: Path, kind: str) -> None:
    """Remove unfinished checkpoints, left by a writer that died."""
    for path in (run_dir / FOLDER).glob(f"{kind}-*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


def damage(path: Path) -> str:
    """Compare a checkpoint's files with its manifest; return what is wrong, in one line, or "" if nothing is."""
    try:
        files = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
        for name, (size, crc) in files.items():
            if (found := (path / name).stat().st_size) != size:
                return f"{name} has {found} bytes, expected {size}"
            if _crc(path / name) != crc:
                return f"{name} has changed since it was written"
    except OSError as error:
        return f"{Path(error.filename or path).name}: {error.strerror}"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{MANIFEST} is damaged"
    return ""


def _found(folder: Path, kind: str) -> list[tuple[int, Path]]:
    """Return the version and the path of each folder with a checkpoint's name, the newest first."""
    named = [
        (re.fullmatch(rf"{kind}-(\d+)", item.name), item) for item in (folder.iterdir() if folder.is_dir() else ())
    ]
    return sorted(((int(match[1]), item) for match, item in named if match), reverse=True)


def _crc(file: Path) -> int:
    value = 0
    with open(file, "rb") as stream:
        while block := stream.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _root(error: BaseException) -> str:
    """Return the operating system's message inside the exceptions that torch wraps around it, or the last one's."""
    waiting, seen = [error], []
    while waiting:
        current = waiting.pop()
        if isinstance(current, OSError):
            return str(current)
        seen.append(current)
        # A CheckpointException keeps the failure of each rank separately, with its stack.
        inside = [failure[0] for failure in getattr(current, "failures", {}).values()]
        waiting += [e for e in (*inside, current.__cause__, current.__context__) if e is not None and e not in seen]
    return first_line(seen[-1])
