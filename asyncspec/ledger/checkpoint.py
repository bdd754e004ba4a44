"""Checkpoints to resume from: written in the background, whole or not at all; the newest few are kept.

    RUN/checkpoints/trainer-000040/    files of torch.distributed.checkpoint, and manifest.json, with the size of each
                                       file, and the CRC-32 of each tensor in it

A checkpoint is written under a temporary name and renamed when its manifest is on disk, so an interrupted one never has
a checkpoint's name. A checkpoint that was damaged later does not match its manifest; it is passed over, and the one
before it is used. Sizes are compared before a checkpoint is chosen, and sums while it is loaded.

Several ranks write their files each in a thread of its own, and leave word of it in their store. No rank waits for
another one to train on, and the first renames the checkpoint when all have left word:

    first rank    plan | train ...  folder, write | all have left word: manifest, rename
    other rank    plan | train ...                   write, slowly | word

A rank that cannot write, or that is too late, costs this checkpoint. The next one begins when all ranks have ended.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from asyncspec.errors import Damaged, first_line
from asyncspec.files import BEFORE, put_back, replace_folder

if TYPE_CHECKING:
    from asyncspec.ledger.storage import File, Plan, Word

FOLDER, MANIFEST, PARTIAL, DAMAGED = "checkpoints", "manifest.json", ".partial", ".damaged"
EXPORTS = "exports"  # the folder of the policies that a run exports
_ASK_EVERY_S = 0.1  # whether the other ranks have left word


class Checkpoints:
    """The checkpoints that one actor writes in a run."""

    def __init__(
        self,
        run_dir: Path,
        kind: str,
        keep: int,
        ranks=None,
        group=None,
        patience_s: float = 3600.0,
        visit: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            run_dir: the run's directory.
            kind: which actor writes them: trainer or draft.
            keep: number of complete checkpoints to keep.
            ranks: the `Ranks` that write a checkpoint together, into a directory that all can reach; None: this process
                writes alone.
            group: their process group to plan a checkpoint in.
            patience_s: seconds that the ranks wait for each other's threads.
            visit: called in the thread before it writes; an OSError that it raises counts as one of the disk.
        """
        import asyncspec.ledger.storage  # noqa: F401  this takes a second, which should be part of loading

        self.run_dir, self.folder, self.kind, self.keep = run_dir, run_dir / FOLDER, kind, keep
        self._rank: int = 0 if ranks is None else ranks.rank
        self._size: int = 1 if ranks is None else ranks.size
        self._store: Any = None if ranks is None else ranks.store
        self._group = group
        self._patience_s, self._visit = patience_s, visit
        if self._rank == 0:
            drop_cut_short(run_dir, kind)  # left by a dead actor that this one replaces
        self._writing: tuple[int, Future] | None = None
        self._begun = 0  # version of the newest checkpoint begun
        self._late: set[int] = set()  # see `late`

    @property
    def busy(self) -> bool:
        """Whether a rank still writes: in the first rank any, in the others this one."""
        return (self._writing is not None and not self._writing[1].done()) or bool(self.late)

    @property
    def late(self) -> list[int]:
        """The ranks that still write their part of the newest checkpoint; of the other ranks only the first knows."""
        for rank in self._late - {self._rank}:
            if self._store.check([self._key(self._begun, rank)]):
                self._late.discard(rank)
        return sorted(self._late)

    def save(self, version: int, state: dict[str, Any]) -> None:
        """Copy the state now and write it in the background. Only one at a time: the first rank checks `busy` first.
        `saved` reports the end. Collective.

        Raises:
            OSError: a rank could not begin. Earlier checkpoints are unchanged.
        """
        from torch.distributed.checkpoint.api import CheckpointException

        from asyncspec.ledger.storage import Plan

        try:
            plan = Plan(state, self._partial(version), self._group)
        except CheckpointException as error:
            raise self._lost(version, {rank: _root(failure[0]) for rank, failure in error.failures.items()}) from error
        future: Future = Future()
        self._writing, self._begun = (version, future), version
        self._late = {self._rank} if self._rank else set(range(self._size))
        # A daemon, because a process must be able to end while another rank still writes.
        threading.Thread(
            target=self._run, args=(future, plan, version), name=f"checkpoint-{self.kind}", daemon=True
        ).start()

    def saved(self, wait: bool = False) -> int | None:
        """Return the version of a checkpoint that was completed since the last call; None if there is none. In a rank
        beyond the first: of one that this rank has written its part of.

        Args:
            wait: wait until the checkpoint that is being written is complete.

        Raises:
            OSError: it could not be written (for example, the disk is full). Earlier checkpoints are unchanged.
        """
        if self._writing is None or not (self._writing[1].done() or wait):
            return None
        version, future = self._writing
        try:
            future.result()
        except Exception as error:
            if self._rank == 0:
                shutil.rmtree(self._partial(version), ignore_errors=True)
            raise error if isinstance(error, OSError) else self._lost(version, {self._rank: _root(error)}) from error
        finally:
            self._writing = None
        return version

    def _make_folder(self, version: int) -> None:
        """Make the folder of the checkpoint's files; a rank beyond the first waits until it is made."""
        made = f"checkpoint/{version}/made"
        if self._rank:
            deadline = time.monotonic() + self._patience_s
            while not self._store.check([made]) and time.monotonic() < deadline:
                time.sleep(_ASK_EVERY_S)
            return
        try:
            self._partial(version).mkdir(parents=True, exist_ok=True)
        finally:
            if self._size > 1:
                self._store.set(made, "")

    def _partial(self, version: int) -> Path:
        final = where(self.run_dir, self.kind, version)
        return final.with_name(final.name + PARTIAL)

    def _key(self, version: int, rank: int) -> str:
        return f"checkpoint/{version}/{rank}"

    def _lost(self, version: int, reasons: dict[int, str]) -> OSError:
        said = "; ".join(f"rank {rank}: {why}" if self._size > 1 else why for rank, why in sorted(reasons.items()))
        return OSError(f"checkpoint of version {version}: {said}")

    def _run(self, future: Future, plan: Plan, version: int) -> None:
        """Write this rank's part, leave word of it, and in the first rank complete the checkpoint; in a thread."""
        from asyncspec.ledger.storage import Word

        try:
            try:
                self._visit()
                self._make_folder(version)
                mine = plan.write()
            except BaseException as error:  # torch wraps the file system's errors in many types
                mine = Word(error=_root(error))
            if self._rank:
                self._store.set(self._key(version, self._rank), msgspec.json.encode(mine))
            self._late.discard(self._rank)
            words = {self._rank: mine} | (self._words(version) if self._rank == 0 else {})
            if errors := {rank: word.error for rank, word in words.items() if word.error}:
                raise self._lost(version, errors)
            if self._rank == 0:
                self._seal(version, plan.finish(list(words.values())))
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    def _words(self, version: int) -> dict[int, Word]:
        """Wait until the other ranks have left word."""
        from asyncspec.ledger.storage import Word

        deadline = time.monotonic() + self._patience_s
        while late := self.late:
            if time.monotonic() > deadline:
                return {rank: Word(error=f"has not written its part within {self._patience_s:.0f} s") for rank in late}
            time.sleep(_ASK_EVERY_S)
        return {
            rank: msgspec.json.decode(self._store.get(self._key(version, rank)), type=Word)
            for rank in range(1, self._size)
        }

    def _seal(self, version: int, files: dict[str, File]) -> None:
        partial, final = self._partial(version), where(self.run_dir, self.kind, version)
        with open(partial / MANIFEST, "w") as manifest:
            json.dump({"kind": self.kind, "version": version, "files": files}, manifest)
            manifest.flush()
            os.fsync(manifest.fileno())
        replace_folder(final, partial)  # there may be one of the same version, written before a rewind
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


def versions(run_dir: Path, kind: str) -> list[int]:
    """Return the versions that have a checkpoint, damaged or not, the oldest first."""
    return [version for version, _ in reversed(_found(run_dir / FOLDER, kind))]


def where(run_dir: Path, kind: str, version: int) -> Path:
    """Return the path of a version's checkpoint, whether it exists or not."""
    return run_dir / FOLDER / f"{kind}-{version:06d}"


def export_of(run_dir: Path, version: int) -> Path:
    """Return where a run exports a version as a Hugging Face directory, whether it has or not."""
    return run_dir / EXPORTS / f"step-{version}"


def learned(module, *optimizers) -> dict[str, Any]:
    """Return a module's trained parameters and the moments that its AdamW or Muon keeps of each, for `save`. They are
    the live tensors, so `load` fills them in place.
    """
    import torch

    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    names = {id(parameter): name for name, parameter in trained.items()}
    parameters = {name: parameter.detach() for name, parameter in trained.items()}
    moments = {}
    for optimizer in optimizers:
        muon = isinstance(optimizer, torch.optim.Muon)
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if not optimizer.state[
                parameter
            ]:  # before the first step; the optimizer itself starts with the same values
                kept = ("momentum_buffer",) if muon else ("exp_avg", "exp_avg_sq")
                optimizer.state[parameter] = {} if muon else {"step": torch.zeros(())}
                optimizer.state[parameter] |= {key: torch.zeros_like(parameter, requires_grad=False) for key in kept}
            for key, value in optimizer.state[parameter].items():
                moments[f"{names[id(parameter)]}/{key}"] = value
    return {"parameters": parameters, "moments": moments}


def load(path: Path, state: dict[str, Any]) -> None:
    """Read a checkpoint into `state`, in place. It must have the same structure as the state that was saved. Each rank
    reads what it needs of the files, once, and compares the sums on the way.

    Raises:
        Damaged: a file has changed since it was written. The checkpoint no longer has a checkpoint's name then, and
            `state` has some of its values.
        OSError: a file cannot be read.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from asyncspec.ledger.storage import Reader

    aside = path.with_name(path.name + DAMAGED)
    try:
        dcp.load(state, storage_reader=Reader(path, _files(path)), no_dist=True)
    except (CheckpointException, OSError) as error:
        found = [error, *(failure[0] for failure in getattr(error, "failures", {}).values())]
        damaged = any(isinstance(each, Damaged) for each in found)
        if damaged:
            with suppress(FileNotFoundError):  # another rank has found damage too
                path.rename(aside)
        elif path.exists() or not aside.exists():
            raise OSError(f"checkpoint {path.name}: {_root(error)}") from error
        why = _root(error) if damaged else "another rank has found damage"
        raise Damaged(f"checkpoint {path.name}: {why}; it is now {aside.name}") from None


def drop_after(run_dir: Path, kind: str, version: int) -> None:
    """Remove the checkpoints of later versions, which a rewind to `version` has undone."""
    for later, found in _found(run_dir / FOLDER, kind):
        if later > version:
            shutil.rmtree(found, ignore_errors=True)


def drop_cut_short(run_dir: Path, kind: str) -> None:
    """Remove unfinished checkpoints, left by a writer that died."""
    for path in (run_dir / FOLDER).glob(f"{kind}-*{BEFORE}"):
        put_back(path.with_name(path.name.removesuffix(BEFORE)))
    for path in (run_dir / FOLDER).glob(f"{kind}-*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


def damage(path: Path) -> str:
    """Compare the sizes of a checkpoint's files with its manifest; return what is wrong, in one line, or "" if nothing
    is.
    """
    try:
        for name, (size, _) in _files(path).items():
            if (found := (path / name).stat().st_size) != size:
                return f"{name} has {found} bytes, expected {size}"
    except OSError as error:
        return f"{Path(error.filename or path).name}: {error.strerror}"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{MANIFEST} is damaged"
    return ""


def _files(path: Path) -> dict[str, File]:
    """Return a checkpoint's files. A manifest of an earlier version has one sum for each file, which is left out."""
    files = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
    return {
        name: (size, [] if isinstance(pieces, int) else [(first, length, crc) for first, length, crc in pieces])
        for name, (size, pieces) in files.items()
    }


def _found(folder: Path, kind: str) -> list[tuple[int, Path]]:
    """Return the version and the path of each folder with a checkpoint's name, the newest first."""
    named = [
        (re.fullmatch(rf"{kind}-(\d+)", item.name), item) for item in (folder.iterdir() if folder.is_dir() else ())
    ]
    return sorted(((int(match[1]), item) for match, item in named if match), reverse=True)


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
