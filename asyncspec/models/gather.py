"""Gathers the shards of a trained policy in rank 0, bucket by bucket, in a thread that training does not wait for.

Each rank packs its pieces of a bucket into one buffer, in the dtype of the layout. One collective brings the buffers to
rank 0, over NCCL on GPUs and over gloo on CPUs, and rank 0 puts the pieces into their places. So a shard travels once,
and only to the rank that needs it. The thread has a process group and, on a GPU, a stream of its own.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from asyncspec.wire.layout import Layout, mark, settle, side_stream, wait_for

Place = tuple[slice, ...]  # of a piece in its whole tensor


def pieces(tensor: torch.Tensor, ranks: Sequence[int]) -> dict[int, Place]:
    """Return where the part of each rank lies in a tensor, without the ranks that have the same part as one before
    them, or nothing.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor):
        return {ranks[0]: ()}
    mesh, found = tensor.device_mesh, {}
    for rank in ranks:
        at = (mesh.mesh == rank).nonzero()[0].tolist()
        sizes, firsts = _compute_local_shape_and_global_offset(tensor.shape, mesh.shape, at, tensor.placements)
        place = tuple(slice(first, first + size) for size, first in zip(sizes, firsts))
        if all(sizes) and place not in found.values():
            found[rank] = place
    return found


class ShardedSnapshot:
    """This rank's shards of a version. `begin` gathers them; call it in every rank. Rank 0 gets the result."""

    def __init__(
        self, layout: Layout, tensors: Mapping[str, torch.Tensor], gatherer: Gatherer, tell: Callable[[], None]
    ) -> None:
        """
        Args:
            tell: called by `begin`; in rank 0 it has the other ranks begin too.
        """
        from torch.distributed.tensor import DTensor

        self.layout, self._gatherer, self._tell = layout, gatherer, tell
        self.places = gatherer.places(tensors)
        self.shards = {
            name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().to(layout.dtype, copy=True)
            for name, tensor in tensors.items()
            if gatherer.rank in self.places[name]
        }
        self.copied = mark(gatherer.device)

    def begin(self) -> Generator[torch.Tensor]:
        self._tell()
        return self._gatherer.start(self)


class _Job:
    def __init__(self, snapshot: ShardedSnapshot) -> None:
        self.snapshot, self.abandoned = snapshot, threading.Event()
        self.ready: queue.Queue = queue.Queue(maxsize=1)

    def put(self, item) -> None:
        while not self.abandoned.is_set():
            try:
                return self.ready.put(item, timeout=0.05)
            except queue.Full:
                pass

    def next(self):
        """Return the next item.

        Raises:
            RuntimeError: the job was abandoned.
        """
        while True:
            try:
                return self.ready.get(timeout=0.5)
            except queue.Empty:
                if self.abandoned.is_set():
                    raise RuntimeError("another version is gathered now") from None


class Gatherer:
    """A thread that gathers snapshots one after the other. Every rank of the first replica gathers the same ones in
    the same order, and each one completely.
    """

    def __init__(self, ranks: list[int], rank: int, device: str, timeout: timedelta) -> None:
        """Make the process group and start the thread. Collective over all ranks, also those of other replicas.

        Args:
            ranks: those of the first replica.
            device: where this rank's shards are.
        """
        backend = "nccl" if device.startswith("cuda") else "gloo"
        self._group = dist.new_group(ranks, timeout=timeout, backend=backend)
        self.ranks, self.rank, self.device = ranks, rank, device
        self.gathered = 0  # bytes that rank 0 got from other ranks
        self._places: dict[str, dict[int, Place]] = {}
        self._job: _Job | None = None
        self._jobs: queue.Queue[_Job] = queue.Queue()
        threading.Thread(target=self._run, name="gather", daemon=True).start()

    def places(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[int, Place]]:
        """Return the pieces of each tensor. A tensor of a name is always divided alike."""
        new = {name: pieces(tensor, self.ranks) for name, tensor in tensors.items() if name not in self._places}
        self._places |= new
        return self._places

    def start(self, snapshot: ShardedSnapshot) -> Generator[torch.Tensor]:
        """Begin to gather a snapshot; in rank 0, return its buckets. Other ranks get none.

        The results of the gathering before are dropped, because their consumer may hang in a broadcast.
        """
        if self._job is not None:
            self._job.abandoned.set()
        if self.rank not in self.ranks:
            return (bucket for bucket in ())
        self._job = _Job(snapshot)
        self._jobs.put(self._job)
        if self.rank == self.ranks[0]:
            return self._results(self._job)
        self._job.abandoned.set()
        return (bucket for bucket in ())

    @staticmethod
    def _results(job: _Job) -> Generator[torch.Tensor]:
        try:
            while (item := job.next()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            job.abandoned.set()

    def _run(self) -> None:
        with side_stream(self.device):
            while True:
                job = self._jobs.get()
                try:
                    wait_for(job.snapshot.copied)
                    for names, first, end in job.snapshot.layout.buckets:
                        bucket = self._bucket(job.snapshot, names, end - first)
                        settle(self.device)
                        job.put(bucket)
                        del bucket  # else it would stay until the next version
                    job.put(None)
                except Exception as error:  # a rank was lost, which the main thread will notice too
                    job.put(error)
                del job

    def _bucket(self, snapshot: ShardedSnapshot, names: Sequence[str], elements: int) -> torch.Tensor | None:
        """Gather a bucket; in rank 0, return it. Collective."""
        layout, places = snapshot.layout, snapshot.places
        whole = torch.empty(elements if self.rank == self.ranks[0] else 0, dtype=layout.dtype, device=self.device)
        shapes = {name: shape for name, shape, _ in layout.entries if name in names}
        sizes = {
            rank: sum(_elements(shapes[name], places[name][rank]) for name in names if rank in places[name])
            for rank in self.ranks
        }
        own = [snapshot.shards[name].reshape(-1) for name in names if self.rank in places[name]]
        # gather takes buffers of one size
        buffer = torch.empty(max(sizes.values()), dtype=layout.dtype, device=self.device)
        torch.cat(own, out=buffer[: sizes[self.rank]]) if own else None
        leads = self.rank == self.ranks[0]
        buffers = [torch.empty_like(buffer) for _ in self.ranks] if leads else None
        dist.gather(buffer, buffers, dst=self.ranks[0], group=self._group)
        if buffers is None:
            return None
        views = layout.views(whole, names)
        for rank, found in zip(self.ranks, buffers):
            self.gathered += found.nbytes if rank != self.rank else 0
            taken = 0
            for name in names:
                if rank in places[name]:
                    view = views[name][places[name][rank]]
                    view.copy_(found[taken : taken + view.numel()].view(view.shape))
                    taken += view.numel()
        return whole


def _elements(shape: Sequence[int], place: Place) -> int:
    return torch.Size(shape if not place else [part.stop - part.start for part in place]).numel()
