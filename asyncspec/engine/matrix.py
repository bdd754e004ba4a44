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

from asyncspec.engine.memory import Arena
from asyncspec.engine.workspace import Buffer, Workspace

LARGE = 2**18  # weights of a matrix, from which on oneDNN is faster than numpy
# multiply-adds of a product, up to which OpenBLAS reads its operands where they lie; larger ones take 5 to 9 us more to
# pack them
UNPACKED = 1_000_000
LEAST_PIECE = 32  # tokens, from which on a product in such pieces is faster: each is a call more


class Matrix:
    """x @ weight.T, by torch."""

    def __init__(self, weight_OI: torch.Tensor) -> None:
        # A transposed view: mm on it is half the price of linear where the matrix is small.
        self.weight = weight_OI.t()

    def to_numpy(self) -> np.ndarray:
        """[I, O]"""
        return self.weight.numpy()

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return torch.mm(x_TI, self.weight)

    def write(self, x: Buffer, out: Buffer) -> None:
        """out = x @ weight.T."""
        torch.mm(x.tensor, self.weight, out=out.tensor)

    def add(self, x: Buffer, space: Workspace) -> None:
        """The workspace's x += x @ weight.T."""
        space.x.tensor.addmm_(x.tensor, self.weight)


class NumpyMatrix(Matrix):
    def __init__(self, weight_OI: torch.Tensor, arena: Arena) -> None:
        """
        Args:
            arena: where the transposed copy goes: of a view numpy makes a copy each time.
        """
        super().__init__(weight_OI)
        self._array = arena.keep(self.weight).numpy()
        self._most = UNPACKED // weight_OI.numel()  # tokens whose product is not packed
        self._divisible = self._most >= LEAST_PIECE

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.matmul(x_TI.numpy(), self._array))

    def write(self, x: Buffer, out: Buffer) -> None:
        self._product(x.array, out.array)

    def add(self, x: Buffer, space: Workspace) -> None:
        self._product(x.array, space.change.array)
        space.x.tensor.add_(space.change.tensor)

    def _product(self, x_TI: np.ndarray, out_TO: np.ndarray) -> None:
        """out = x @ weight.T, in equal pieces that OpenBLAS need not pack."""
        T, most = len(x_TI), self._most
        if T <= most or not self._divisible:
            np.matmul(x_TI, self._array, out=out_TO)
            return
        size = -(-T // -(-T // most))
        for start in range(0, T, size):
            np.matmul(x_TI[start : start + size], self._array, out=out_TO[start : start + size])


class OneDnnMatrix(Matrix):
    """x @ weight.T, by oneDNN."""

    def __init__(self, weight_OI: torch.Tensor) -> None:
        super().__init__(weight_OI)
        self._reordered = torch.ops.mkldnn._reorder_linear_weight(weight_OI, None)

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x_TI.contiguous(), self._reordered, None, "none", [], "")

    def write(self, x: Buffer, out: Buffer) -> None:
        out.tensor.copy_(self(x.tensor))

    def add(self, x: Buffer, space: Workspace) -> None:
        space.x.tensor.add_(self(x.tensor))


class Derived(Arena):
    """What an engine derives from a model's parameters, again each time when these change."""

    def matrix(self, weight_OI: torch.Tensor) -> Matrix:
        """Returns the matrix of whichever library multiplies it fastest."""
        weight_OI = self.keep(weight_OI.detach())
        if weight_OI.dtype is not torch.float32 or not slowed_by_mkl(weight_OI.device.type):
            return Matrix(weight_OI)
        if weight_OI.numel() < LARGE:
            return NumpyMatrix(weight_OI, self)
        return OneDnnMatrix(weight_OI)


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
