"""A matrix of the engine's, multiplied by whichever library does that fastest where it lies.

torch's own products use half of an AMD processor with AVX-512: there small matrices go to numpy's BLAS and large ones
to oneDNN.

Shape suffixes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from threadpoolctl import threadpool_info

from asyncspec.engine.memory import Arena
from asyncspec.engine.workspace import Buffer, Workspace

PACKED_FROM = 1_000_000  # multiply-adds from which on oneDNN's faster kernels make up for their dearer call
LARGE = 2**18  # weights of a matrix, from which on oneDNN is faster than numpy
# multiply-adds of a product, up to which OpenBLAS reads its operands where they lie; larger ones take 5 to 9 us more to
# pack them
UNPACKED = 1_000_000
LEAST_PIECE = 32  # tokens, from which on a product in such pieces is faster: each is a call more
AVX512_KERNELS = ("SkylakeX", "Cooperlake", "SapphireRapids")  # OpenBLAS's names


class Matrix:
    """x @ weight.T."""

    def __init__(self, weight_OI: torch.Tensor, arena: Arena) -> None:
        """
        Args:
            arena: where a CPU's copy of the weights goes.
        """
        weight_OI = arena.keep(weight_OI.detach())
        self._most = UNPACKED // weight_OI.numel()  # tokens whose product is that small
        # A transposed view: mm on it is half the price of linear where the matrix is small.
        self.weight = weight_OI.t()
        self._array = self._packed = None
        if weight_OI.dtype is torch.float32 and slowed_by_mkl(weight_OI.device.type):
            if numpy_uses_avx512() and weight_OI.numel() < LARGE:
                self._array = arena.keep(self.weight).numpy()  # of a view numpy makes a copy each time
            else:
                self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, None)

    def to_numpy(self) -> np.ndarray:
        """[I, O]"""
        return self.weight.numpy()

    def __call__(self, x: torch.Tensor | Buffer) -> torch.Tensor:
        x_TI = x.tensor if isinstance(x, Buffer) else x
        if self._array is not None:
            return torch.from_numpy(np.matmul(x_TI.numpy() if x is x_TI else x.array, self._array))
        return self._packed_product(x_TI) if self._is_large(x_TI) else torch.mm(x_TI, self.weight)

    def write(self, x: Buffer, out: Buffer) -> None:
        """out = x @ weight.T."""
        if self._array is not None:
            self._numpy_product(x.array, out.array)
        elif self._is_large(x.tensor):
            out.tensor.copy_(self._packed_product(x.tensor))
        else:
            torch.mm(x.tensor, self.weight, out=out.tensor)

    def add(self, x: Buffer, space: Workspace) -> None:
        """The workspace's x += x @ weight.T."""
        if self._array is not None:
            self._numpy_product(x.array, space.change.array)
            space.x.tensor.add_(space.change.tensor)
        elif self._is_large(x.tensor):
            space.x.tensor.add_(self._packed_product(x.tensor))
        else:
            space.x.tensor.addmm_(x.tensor, self.weight)

    def _numpy_product(self, x_TI: np.ndarray, out_TO: np.ndarray) -> None:
        """out = x @ weight.T, in equal pieces that OpenBLAS need not pack."""
        T, most = len(x_TI), self._most
        if T <= most or most < LEAST_PIECE:
            np.matmul(x_TI, self._array, out=out_TO)
            return
        size = -(-T // -(-T // most))
        for start in range(0, T, size):
            np.matmul(x_TI[start : start + size], self._array, out=out_TO[start : start + size])

    def _is_large(self, x_TI: torch.Tensor) -> bool:
        return self._packed is not None and len(x_TI) * self.weight.numel() >= PACKED_FROM

    def _packed_product(self, x_TI: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x_TI.contiguous(), self._packed, None, "none", [], "")


@lru_cache
def slowed_by_mkl(device: str) -> bool:
    """Whether torch's own products use half of the processor: on AMD's with AVX-512. oneDNN and numpy then have better
    ones.
    """
    if (
        device != "cpu"
        or not torch.backends.mkldnn.is_available()
        or torch.backends.cpu.get_cpu_capability() != "AVX512"
    ):
        return False
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


@lru_cache
def numpy_uses_avx512() -> bool:
    """Whether numpy's BLAS does; which kernels it takes is settled when it is loaded, and OPENBLAS_CORETYPE can settle
    it otherwise.
    """
    return any(
        library.get("architecture") in AVX512_KERNELS
        for library in threadpool_info()
        if library["internal_api"] == "openblas"
    )
