"""What one of several ranks that divide a policy with vLLM keeps of arriving weights.

A version waits in a rank until all ranks have received it, and the next one may arrive meanwhile. So a rank keeps the
parts of the matrices that its vLLM reads, and no more. When the version is loaded, each block of the policy is put into
whole tensors again, one block at a time. What another rank reads is not a number there: if vLLM read it, no logprob
would be finite.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch

from asyncspec.models.shape import VOCABULARY_UNIT, PolicyShape

# The dimension along which vLLM divides a matrix, by the name of its module. All other tensors are whole in each rank.
_DIVIDED = {"wqkv": 0, "wo": 1, "w1": 0, "w3": 0, "w2": 1, "tok_embeddings": 0, "lm_head": 0}
_EXPERTS = {"w1_EFD": 1, "w3_EFD": 1, "w2_EDF": 2}  # of all experts of a layer; the first dimension counts experts


class Shares:
    """The parts of a policy's tensors, named as in `named_parameters`, that one rank reads."""

    def __init__(self, shape: PolicyShape, rank: int, size: int, whole_experts: bool = False) -> None:
        """
        Args:
            size: number of ranks.
            whole_experts: whether each rank has some experts whole (vLLM's expert parallelism), instead of a part of
                each.
        """
        self.shape, self.rank, self.size, self.whole_experts = shape, rank, size, whole_experts

    def keep(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's part of a whole tensor."""
        return tensor[self._where(name, tensor.shape)].clone()

    def blocks(
        self, tensors: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor]
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the tensors of one block of the policy after the other, in whole tensors.

        Args:
            tensors: whole ones, or what `keep` returned.
            whole: tensors of the same names with the whole shapes.
        """
        names: dict[str, list[str]] = {}
        for name in tensors:
            names.setdefault(re.match(r"(layers\.\d+|\w+)\.", name)[1], []).append(name)
        for block in names.values():
            yield {name: self._whole(name, tensors[name], whole[name].shape) for name in block}

    def _whole(self, name: str, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        if tensor.shape == shape:
            return tensor
        filled = torch.full(shape, torch.nan, dtype=tensor.dtype, device=tensor.device)
        filled[self._where(name, shape)] = tensor
        return filled

    def _where(self, name: str, shape: torch.Size) -> tuple[slice, ...]:
        *_, module, last = name.split(".")
        dim = _DIVIDED.get(module)
        if last in _EXPERTS:
            dim = 0 if self.whole_experts else _EXPERTS[last]
        if dim is None or self.size == 1:
            return ()
        length = shape[dim]
        if module in ("tok_embeddings", "lm_head"):
            rows = -(-length // VOCABULARY_UNIT) * VOCABULARY_UNIT // self.size
            first, end = self.rank * rows, (self.rank + 1) * rows
        elif module == "wqkv":  # each key-value head beside its queries
            heads = self.shape.n_kv_heads
            head, held = self.rank * heads // self.size, max(1, heads // self.size)
            first, end = head * length // heads, (head + held) * length // heads
        else:
            first, end = self.rank * length // self.size, (self.rank + 1) * length // self.size
        return (slice(None),) * dim + (slice(min(first, length), min(end, length)),)
