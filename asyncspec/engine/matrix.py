"""The engine's matrices, each multiplied by the library that is fastest on its device.

torch's own products use only half of an AMD processor with AVX-512. There numpy's BLAS multiplies small matrices, and
oneDNN multiplies large ones.

Shape suffixes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from asyncspec.engine.memory import Arena
from asyncspec.engine.workspace import Buffer, Workspace

LARGE = 2**18  # weights; in a matrix with at least as many, oneDNN is faster than numpy
# Multiply-adds of a product. Up to this many, OpenBLAS uses the operands in place; for larger products it spends 5 to
# 9 us more on packing them.
UNPACKED = 1_000_000
LEAST_PIECE = 32  # tokens; a product is not split into smaller pieces than that, because each piece is one more call


class Matrix:
    """x @ weight.T, computed by torch."""

    def __init__(self, weight_OI: torch.Tensor) -> None:
        # mm with this transposed view takes half as long as linear if the matrix is small.
        self.weight = weight_OI.t()

    def to_numpy(self) -> np.ndarray:
        """Return the transposed weight, [I, O]."""
        return self.weight.numpy()

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return torch.mm(x_TI, self.weight)

    def write(self, x: Buffer, out: Buffer) -> None:
        """Set out = x @ weight.T."""
        torch.mm(x.tensor, self.weight, out=out.tensor)

    def add(self, x: Buffer, space: Workspace) -> None:
        """Add x @ weight.T to the workspace's x."""
        space.x.tensor.addmm_(x.tensor, self.weight)


class NumpyMatrix(Matrix):
    """x @ weight.T, computed by numpy."""

    def __init__(self, weight_OI: torch.Tensor, arena: Arena) -> None:
        """
        Args:
            arena: keeps the transposed copy; numpy would copy a transposed view in every product.
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
        """Set out = x @ weight.T, in about equal pieces that OpenBLAS does not pack."""
        T, most = len(x_TI), self._most
        if T <= most or not self._divisible:
            np.matmul(x_TI, self._array, out=out_TO)
            return
        size = -(-T // -(-T // most))
        for start in range(0, T, size):
            np.matmul(x_TI[start : start + size], self._array, out=out_TO[start : start + size])


class OneDnnMatrix(Matrix):
    """x @ weight.T, computed by oneDNN."""

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
    """Keeps what an engine derives from a model's parameters, and derives again whenever these change."""

    def matrix(self, weight_OI: torch.Tensor) -> Matrix:
        """Return the matrix for the library that multiplies it fastest."""
        weight_OI = self.keep(weight_OI.detach())
        if weight_OI.dtype is not torch.float32 or not slowed_by_mkl(weight_OI.device.type):
            return Matrix(weight_OI)
        if weight_OI.numel() < LARGE:
            return NumpyMatrix(weight_OI, self)
        return OneDnnMatrix(weight_OI)


@lru_cache
def slowed_by_mkl(device: str) -> bool:
    """Whether torch's own products use only half of the processor, which is so on AMD processors with AVX-512. oneDNN
    and numpy are faster there.
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
