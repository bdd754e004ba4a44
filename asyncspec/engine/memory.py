"""Memory in huge pages for the weights and the KV cache, which each engine step reads.

A step over a few tokens reads all weights and a part of each row of the cache, in every layer. In pages of 4 KiB these
are more pages than a processor's TLB holds, and their placement makes one engine slower than another.
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
    """Like torch.zeros, but on a CPU in huge pages, if the tensor fills one and the system has them."""
    count = math.prod(size) * dtype.itemsize
    if torch.device(device).type != "cpu" or count < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(*size, dtype=dtype, device=device)
    try:
        block = mmap.mmap(-1, count + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # torch's error says how much memory was asked for
        return torch.zeros(*size, dtype=dtype, device=device)
    with suppress(OSError):  # a kernel without huge pages
        block.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(block, dtype=torch.uint8)  # keeps the block alive
    start = -memory.data_ptr() % HUGE
    return memory[start : start + count].view(dtype).view(size).zero_()  # touched now, so a lack of memory fails here


class Arena:
    """Tensors laid out one after the other, on a CPU in huge pages. Tensors derived from new weights overwrite those
    derived from the old weights.
    """

    def __init__(self) -> None:
        self._chunks: list[torch.Tensor] = []
        self._elsewhere: list[torch.Tensor] = []  # tensors on other devices
        self.clear()

    def clear(self) -> None:
        """Start over: tensors kept from now on overwrite those kept before, in the same order."""
        self._chunk = self._used = self._next = 0

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Keep a tensor.

        Returns:
            On a CPU a contiguous copy in this memory. Elsewhere the tensor itself, made contiguous; after `clear` the
            tensor that was kept in its place, with the new values.
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
