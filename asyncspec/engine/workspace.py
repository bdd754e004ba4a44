"""The memory that the layers of a pass compute in, one after the other, with every view of it made once.

A pass over few tokens takes as long as launching its operations and making their views. So a layer allocates little
and makes no views. Tensors that are never in use at the same time share memory, so that it stays in a processor's
caches. After each token's x stands a constant, sqrt(D * eps). RMSNorm divides x by the length of x and this constant
together, except for a factor sqrt(D), which is multiplied into the matrices after it (`layers.scale`).

Shape suffixes: B batch rows, L query positions, T = B * L tokens, I inputs, D model dimension, E = D + PAD, G key-value
groups, R = queries of a group, then its key, then its value; N = G * R heads, H head size, W = N * H; Q = the queries
of a group, A = G * Q * H, S = E + W; F hidden dimension.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

PAD = 16  # numbers after x: the constant, then zeros, so that the next numbers begin at a whole vector
KEPT, KEPT_BYTES = 64, 1 << 20  # how many workspaces are kept, and about how large each may be


class LayerShape(NamedTuple):
    dim: int
    groups: int  # key-value heads
    queries: int  # query heads that share a key-value head
    head_dim: int
    hidden_dim: int  # 0: a mixture of experts, which allocates its own memory
    eps: float  # of RMSNorm
    head_norms: bool  # whether queries and keys are normalized


class Buffer(NamedTuple):
    """A tensor and a numpy view of it, kept because making the view takes half as long as a small product."""

    tensor: torch.Tensor
    array: np.ndarray | None  # None unless the tensor is float32 on a CPU

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Buffer:
        return cls(tensor, tensor.numpy() if tensor.device.type == "cpu" and tensor.dtype is torch.float32 else None)


class Workspace:
    """Buffers for a pass over L tokens in each of B rows. `x` is the residual stream."""

    def __init__(self, shape: LayerShape, B: int, L: int, dtype: torch.dtype, device, inputs: int = 1) -> None:
        """
        Args:
            dtype: dtype of matrices and x; squares and rotations are in float32.
            inputs: 2 for drafts, whose inputs are an embedding (the first) and x (the last).
        """
        (D, G, Q, H, F, eps, head_norms), T = shape, B * L
        R, W = Q + 2, G * (Q + 2) * H
        narrow, float32 = dtype is not torch.float32, torch.float32

        def space(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def shared(*tensors: tuple[int, torch.dtype]) -> list[torch.Tensor]:
            """Return a tensor [T, size] for each size and dtype, all in the same memory."""
            counts = [T * size * of.itemsize for size, of in tensors]
            memory = space(max(counts), dtype=torch.uint8)
            return [memory[:count].view(of).view(T, size) for count, (size, of) in zip(counts, tensors)]

        self.rows = (B, L)
        row_TIE = space(T, inputs, D + PAD)
        row_TIE[..., D:].zero_()
        row_TIE[..., D].fill_((D * eps) ** 0.5)
        self._row_TE = row_TIE[:, -1]
        self.x, self._long_T, self._length_T1 = (
            Buffer.of(self._row_TE[:, :D]),
            self._row_TE[:, : D + 1],
            space(T, 1, dtype=float32),
        )
        unit_TD, attended_TA = shared((D, dtype), (G * Q * H, dtype))
        self.unit, self.attended = Buffer.of(unit_TD), Buffer.of(attended_TA)
        if inputs > 1:
            self.embedding_TD = row_TIE[:, 0, :D]
            self._inputs_TID, self._long_TI = row_TIE[..., :D], row_TIE[..., : D + 1]
            self._length_TI1, self._units_TID = space(T, inputs, 1, dtype=float32), space(T, inputs, D)
            self.units = Buffer.of(self._units_TID.view(T, inputs * D))
        square_TS, inward_TF = shared((D + PAD + W if head_norms else 0, float32), (2 * F, dtype))
        self.heads = Buffer.of(space(T, W))
        self._wide_TW = space(T, W, dtype=float32) if narrow else self.heads.tensor
        self._narrow_TW = self.heads.tensor if narrow else None
        self.heads_TNH, self._complex = (
            self._wide_TW.view(T, G * R, H),
            torch.view_as_complex(self._wide_TW.view(T, G, R * H // 2, 2)),
        )
        if head_norms:
            self.squares, self.factors = Buffer.of(square_TS), Buffer.of(space(T, G * R, dtype=float32))
            self._square_TE, self._square_TW = square_TS.split([D + PAD, W], 1)
            self.factors_TN1 = self.factors.tensor.unsqueeze(-1)
        joined = self.heads.tensor.view(T * G, R * H)
        self.kv = joined[:, Q * H :]  # [T * G, 2H]
        if L == 1:
            self._q, self._attended = joined[:, : Q * H].unflatten(1, (Q, H)), attended_TA.view(B * G, Q, H)
        else:
            self._q, self._attended = (
                joined.view(B, L, G, R, H)[:, :, :, :Q].transpose(1, 2),
                attended_TA.view(B, L, G, Q, H).transpose(1, 2),
            )
        if F:
            self.inward = Buffer.of(inward_TF)
            gate_TF, self.up_TF = inward_TF.chunk(2, -1)
            self.gate = Buffer.of(gate_TF)
        self.change = Buffer.of(space(T, D)) if self.x.array is not None else None  # numpy's product, added to x

    @property
    def q(self) -> torch.Tensor:
        """The queries, [B * G, L * Q, H]."""
        return (
            self._q if self.rows[1] == 1 else self._q.reshape(-1, self._q.shape[2] * self._q.shape[3], self._q.shape[4])
        )

    def put_attended(self, rows: slice, out: torch.Tensor) -> None:
        """Store attention's output for some of the B * G rows, [rows, L * Q, H]."""
        if self.rows[1] == 1:
            self._attended[rows] = out
        else:
            B, G, L, Q, H = self._attended.shape
            self._attended[rows.start // G : rows.stop // G] = out.view(-1, G, L, Q, H)

    def normalize(self) -> None:
        """Set unit = x / sqrt(sum(x^2) + D * eps)."""
        _length(self._long_T, self._length_T1)
        torch.div(self.x.tensor, self._length_T1, out=self.unit.tensor)

    def normalize_inputs(self) -> None:
        """Normalize each input in the same way, into units."""
        _length(self._long_TI, self._length_TI1)
        torch.div(self._inputs_TID, self._length_TI1, out=self._units_TID)

    def widen(self, bias_W: torch.Tensor | None = None) -> None:
        """Copy the heads, plus a bias, to float32, where they are scaled and rotated until `narrow`."""
        if bias_W is not None:
            torch.add(self.heads.tensor, bias_W, out=self._wide_TW)
        elif self._narrow_TW is not None:
            self._wide_TW.copy_(self._narrow_TW)

    def narrow(self) -> None:
        """Copy the heads back to the workspace's dtype."""
        if self._narrow_TW is not None:
            self._narrow_TW.copy_(self._wide_TW)

    def square(self) -> None:
        """Set squares to the squares of x, its constant and zeros, then those of the heads."""
        row_TE = self._row_TE.float()
        torch.mul(row_TE, row_TE, out=self._square_TE)
        torch.mul(self._wide_TW, self._wide_TW, out=self._square_TW)

    def rotate(self, rotation: torch.Tensor) -> None:
        """Rotate the interleaved heads by the rotations of `RoPE.at`."""
        self._complex.mul_(rotation)


class Workspaces:
    """Makes workspaces, and keeps those of small passes on a CPU: making one takes as long as computing a layer."""

    def __init__(
        self, kind: type[Workspace], shape: LayerShape, dtype: torch.dtype, device: torch.device, inputs: int
    ) -> None:
        self._make = lambda B, L: kind(shape, B, L, dtype, device, inputs)
        self._on_cpu = device.type == "cpu"
        shape_floats = (
            shape.dim * (4 + 2 * inputs)
            + shape.groups * (shape.queries + 2) * (3 * shape.head_dim + 1)
            + 2 * shape.hidden_dim
        )
        self._most_tokens = KEPT_BYTES // (4 * shape_floats)
        self._kept = lru_cache(maxsize=KEPT)(lambda B, L, mode: self._make(B, L))

    def __call__(self, B: int, L: int) -> Workspace:
        """Return a workspace with arbitrary contents. It is the caller's until the next call with the same size."""
        # On a GPU none are kept: memory made while a CUDA graph is captured belongs to that graph. And memory made in
        # inference mode is kept for use in inference mode only.
        small = self._on_cpu and B * L <= self._most_tokens
        return self._kept(B, L, torch.is_inference_mode_enabled()) if small else self._make(B, L)


def _length(x: torch.Tensor, out: torch.Tensor) -> None:
    torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32, out=out)
