"""The form in which weights travel: named tensors one after the other in a flat buffer, which is cut into buckets."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from asyncspec.wire import BUCKET_BYTES

_MIXED = 0x9E3779B1  # an odd number whose multiples spread over all bits
_ROW = 4096  # elements of a row of `checksum`
_PIECE = 256 * _ROW  # elements that are summed at once: a sum in int64 needs eight bytes for each
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # whole numbers of as many bytes


@dataclass(frozen=True)
class Layout:
    """The positions of named tensors in one flat buffer of a dtype."""

    entries: tuple[tuple[str, tuple[int, ...], int], ...]  # name, shape, first element
    elements: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], dtype: str = "float32") -> Layout:
        entries, offset = [], 0
        for name, tensor in tensors.items():
            entries.append((name, tuple(tensor.shape), offset))
            offset += tensor.numel()
        return cls(tuple(entries), offset, getattr(torch, dtype))

    @property
    def buckets(self) -> list[tuple[list[str], int, int]]:
        """Consecutive ranges of the buffer, each of whole tensors: (their names, first element, end)."""
        found, names, first = [], [], 0
        for name, shape, offset in self.entries:
            end = offset + torch.Size(shape).numel()
            names.append(name)
            if (end - first) * self.dtype.itemsize >= BUCKET_BYTES or end == self.elements:
                found.append((names, first, end))
                names, first = [], end
        return found

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket."""
        return max((end - first for _, first, end in self.buckets), default=0) * self.dtype.itemsize

    @torch.no_grad()
    def snapshot(self, tensors: Mapping[str, torch.Tensor], device: str) -> torch.Tensor:
        """Copy all tensors into one on `device`, [elements]; later changes of the tensors do not reach it."""
        flat = torch.empty(self.elements, dtype=self.dtype, device=device)
        for name, _shape, offset in self.entries:
            flat[offset : offset + tensors[name].numel()] = tensors[name].detach().reshape(-1)
        return flat

    def views(self, flat: torch.Tensor, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        """Return tensors by name as views of a flat buffer, or, given `names`, of one bucket that holds just these."""
        inside = self.entries if names is None else [entry for entry in self.entries if entry[0] in names]
        first = inside[0][2] if inside else 0
        return {
            name: flat[offset - first : offset - first + torch.Size(shape).numel()].view(shape)
            for name, shape, offset in inside
        }


def checksum(flat: torch.Tensor, before: int = 0) -> int:
    """Return a number that follows from all bytes of a buffer and, roughly, from their places. It finds damage, not
    malice.

    Args:
        before: the checksum of the buffers before this one.
    """
    data = flat.reshape(-1).view(_WHOLE[flat.element_size()])
    whole = data.numel() // _ROW * _ROW
    rows = [piece.view(-1, _ROW).sum(1, dtype=torch.int64) for piece in data[:whole].split(_PIECE)]
    sums = torch.cat([*rows, data[whole:].sum(dtype=torch.int64).view(1)])
    place = torch.arange(1, sums.numel() + 1, device=flat.device)
    found = int((sums * (place * _MIXED | 1)).sum())  # it wraps around, which is as good
    return (before * _MIXED + found) % (1 << 63)


class Snapshot(Protocol):
    """One version's weights, which later training does not change."""

    layout: Layout

    def begin(self) -> Generator[torch.Tensor]:
        """Return a generator of the buckets to send, [elements of the bucket]. The owner calls this, and a thread
        iterates. A new call ends the previous iteration.
        """


class WholeSnapshot:
    """A snapshot of weights that are whole on one device."""

    def __init__(self, layout: Layout, tensors: Mapping[str, torch.Tensor], device: str) -> None:
        self.layout, self.flat = layout, layout.snapshot(tensors, device)
        self._copied = mark(device)

    def begin(self) -> Generator[torch.Tensor]:
        for _, first, end in self.layout.buckets:
            wait_for(self._copied)
            yield self.flat[first:end]


# Threads that send, receive or gather work on streams of their own, so that nothing waits for the passes that are
# queued on the stream that computes.
def side_stream(device: str) -> AbstractContextManager:
    """Return a context in which a thread works on a new stream of a GPU; on a CPU it does nothing."""
    if not device.startswith("cuda"):
        return nullcontext()
    torch.cuda.set_device(device)  # each thread has its own current device
    return torch.cuda.stream(torch.cuda.Stream(device))


def mark(device: str) -> torch.cuda.Event | None:
    """Return a mark behind the work that this thread has given a GPU so far; None on a CPU."""
    if not device.startswith("cuda"):
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def wait_for(event: torch.cuda.Event | None) -> None:
    """Have this thread's stream wait for a mark, and for nothing behind it."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


def settle(device: str) -> None:
    """Wait until this thread's stream has done its work. Other streams go on."""
    if device.startswith("cuda"):
        torch.cuda.current_stream(device).synchronize()
