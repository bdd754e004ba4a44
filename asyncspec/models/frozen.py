"""The frozen weights of a policy whose adapters are trained: what a reader keeps of them, and what an export reads.

config.json, safetensors --block by block--> frozen weights + adapters of a version = a policy for an engine or a file
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from asyncspec.models import fill as filling
from asyncspec.models import lora
from asyncspec.models.policy import adapter, skeleton
from asyncspec.models.shape import Lora, PolicyShape


class Base:
    """The frozen weights of a policy whose adapters are trained, for a reader that needs whole weights: it keeps them,
    in host memory, and makes each version anew.
    """

    def __init__(
        self,
        directory: Path,
        of: Lora,
        dtype: torch.dtype,
        keep: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """
        Args:
            dtype: of the weights.
            keep: callable(name, whole tensor) -> a copy of this rank's part of it; None: the whole.

        Raises:
            CheckpointError: a file cannot be read.
        """
        shape = PolicyShape.from_hf(directory)
        whole, self._of, self._keep = skeleton(shape, 1), of, keep
        self.adapters = lora.trained(skeleton(shape, 1, of))  # names and shapes
        self._frozen: dict[str, torch.Tensor] = {}
        for block, _ in filling.blocks(whole, adapter(whole.config), directory, shape):
            for name, tensor in block.items():
                kept = tensor.detach() if keep is None else keep(name, tensor.detach())
                self._frozen[name] = kept.to(dtype, copy=keep is None)

    def merged(self, adapters: Mapping[str, torch.Tensor]) -> lora.Merged:
        """Return the policy's weights with a version's adapters, or this rank's parts of them; names as in
        `named_parameters`.
        """
        return lora.Merged(self._frozen, adapters, self._of, self._keep)


def merged(directory: Path, adapters: Mapping[str, torch.Tensor], of: Lora) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the policy of a directory with adapters added, block by block, as `parts` for `policy.save`.

    Args:
        adapters: named as in `lora.trained`.

    Raises:
        CheckpointError: a file cannot be read.
    """
    shape = PolicyShape.from_hf(directory)
    whole = skeleton(shape, 1)
    for block, _ in filling.blocks(whole, adapter(whole.config), directory, shape):
        yield lora.merged({name: tensor.float() for name, tensor in block.items()}, adapters, of)
