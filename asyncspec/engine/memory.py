"""Memory in huge pages, for what each engine step reads: weights and KV cache.

A step over a few tokens reads all weights and a piece of each row of the cache, in every layer. In pages of 4 KiB these
are more than a processor keeps the addresses of (its TLB), and where such pages lie makes one engine slower than the
next.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import torch

HUGE = 1 << 21
CHUNK = 4 * HUGE
ALIGNED = 64  # bytes, a cache line


def zeros(*size: int, dtype: torch.dtype, device) -> torch.Tensor:
    """As torch.zeros; on a CPU in huge pages, if it fills one and the system has any."""
    count = math.prod(size) * dtype.itemsize
    if torch.device(device).type != "cpu" or count < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(*size, dtype=dtype, device=device)
    try:
        block = mmap.mmap(-1, count + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # torch will say how much is wanted
        return torch.zeros(*size, dtype=dtype, device=device)
    with suppress(OSError):  # a kernel without huge pages
        block.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(block, dtype=torch.uint8)  # holds the block
    start = -memory.data_ptr() % HUGE
    return memory[start : start + count].view(dtype).view(size).zero_()  # touched now: what does not fit fails here


class Arena:
    """Tensors one after the other, on a CPU in such memory: what is derived from new weights goes where that from the
    old ones was.
    """

    def __init__(self) -> None:
        self._chunks: list[torch.Tensor] = []
        self._elsewhere: list[torch.Tensor] = []  # not on a CPU
        self.clear()

    def clear(self) -> None:
        """What is kept from now on overwrites what was kept before, in the same order."""
        self._chunk = self._used = self._next = 0

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """On a CPU a contiguous copy in here; elsewhere the tensor itself, made contiguous, or one that was kept in its
        place before and is now like it.
        """
        if tensor.device.type != "cpu":
            return self._keep_elsewhere(tensor.contiguous())
        count = tensor.numel() * tensor.dtype.itemsize
        while self._chunk < len(self._chunks) and self._used + count > len(self._chunks[self._chunk]):
            self._chunk, self._used = self._chunk + 1, 0
        if self._chunk == len(self._chunks):
            self._chunks.append(zeros(max(CHUNK, count), dtype=torch.uint8, device="cpu"))
        start = self._used
        self._used = -(-(start + count) // ALIGNED) * ALIGNED
        return self._chunks[self._chunk][start : start + count].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def _keep_elsewhere(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._next == len(self._elsewhere):
            self._elsewhere.append(tensor)
        kept = self._elsewhere[self._next]
        self._next += 1
        return kept if kept.data_ptr() == tensor.data_ptr() else kept.copy_(tensor)
