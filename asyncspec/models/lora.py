"""Low-rank adapters (LoRA, arXiv 2106.09685): small matrices that are trained in the place of a policy's own.

    y = W x + alpha / rank * B A x          W [O, I] is frozen; A [rank, I] and B [O, rank] are trained

torchtitan puts A and B beside each matrix W, whose name stays. Trainer and logprob compute with the two apart. Only A
and B travel: an engine gets W + alpha / rank * B A, which is made anew of the frozen W for every version, since
subtracting an adapter again would not give W back.

Shape suffixes: I inputs, O outputs of a matrix, R the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from asyncspec.loading import compiling_later
from asyncspec.models.parallel import local, share
from asyncspec.models.shape import Lora

with compiling_later():
    from torchtitan.components.lora import LoRAConverter

A, B = ".lora_a.weight", ".lora_b.weight"  # what a matrix's name ends with instead of .weight
# torchtitan's names of the matrices that `Lora.targets` says.
_MODULES = {"attention": ("wqkv", "wo"), "mlp": ("w1", "w2", "w3")}


def convert(config, lora: Lora, dense: bool):
    """Return torchtitan's configuration of a policy with adapters. All else in the policy is frozen.

    Args:
        dense: whether the policy has feed-forward networks; the experts of a mixture get no adapters.
    """
    targets = [part for part in _MODULES if lora.targets in (part, "all-linear") and (part != "mlp" or dense)]
    modules = [name for part in targets for name in _MODULES[part]]
    return LoRAConverter(LoRAConverter.Config(rank=lora.rank, alpha=lora.alpha, target_modules=modules)).convert(config)


def trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of a policy that are trained and published: its adapters, or all if it has none."""
    parameters = dict(model.named_parameters())
    return {name: each for name, each in parameters.items() if name.endswith((A, B))} or parameters


@torch.no_grad()
def reset(model: torch.nn.Module, seed: int) -> None:
    """Give adapters the values that training begins with: A uniform like the weights of a linear layer, B zeros. They
    do not depend on how ranks divide the policy.
    """
    for number, (name, parameter) in enumerate(trained(model).items()):
        if name.endswith(B):
            local(parameter).zero_()
        elif name.endswith(A):
            whole = torch.empty(parameter.shape)
            most = parameter.shape[1] ** -0.5
            whole.uniform_(-most, most, generator=torch.Generator().manual_seed((seed << 20) + number))
            local(parameter).copy_(whole[share(parameter)])


@contextmanager
def disabled(model: torch.nn.Module) -> Iterator[None]:
    """Have a policy compute without its adapters in this context."""
    adapted = [module for module in model.modules() if hasattr(module, "_lora_scaling")]
    scales = [module._lora_scaling for module in adapted]
    try:
        for module in adapted:
            module._lora_scaling = 0.0
        yield
    finally:
        for module, scale in zip(adapted, scales):
            module._lora_scaling = scale


def product(name: str, adapters: Mapping[str, torch.Tensor], lora: Lora) -> torch.Tensor | None:
    """Return what the adapters add to a matrix, float32 [O, I]; None if it has no adapters.

    Args:
        name: of the matrix.
        adapters: named as in `trained`.
    """
    stem = name.removesuffix(".weight")
    if (b_OR := adapters.get(stem + B)) is None:
        return None
    return (b_OR.float() @ adapters[stem + A].float()).mul_(lora.alpha / lora.rank)


def merged(tensors: Mapping[str, torch.Tensor], adapters: Mapping[str, torch.Tensor], lora: Lora):
    """Return frozen tensors with their adapters added, in the frozen tensors' dtypes."""
    found = {}
    for name, tensor in tensors.items():
        added_OI = product(name, adapters, lora)
        found[name] = tensor if added_OI is None else added_OI.add_(tensor).to(tensor.dtype)
    return found


class Merged(Mapping):
    """A version of a policy for an engine: each tensor is merged when it is asked for."""

    def __init__(
        self,
        base: Mapping[str, torch.Tensor],
        adapters: Mapping[str, torch.Tensor],
        lora: Lora,
        keep: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """
        Args:
            base: the frozen tensors, or this rank's parts of them.
            keep: callable(name, tensor) -> this rank's part of a whole tensor; None: the whole.
        """
        self._base, self._adapters, self._lora, self._keep = base, adapters, lora, keep

    def __getitem__(self, name: str) -> torch.Tensor:
        frozen, added_OI = self._base[name], product(name, self._adapters, self._lora)
        if added_OI is None:
            return frozen
        if self._keep is not None:
            added_OI = self._keep(name, added_OI)
        # The adapters of a version that came over NCCL are on a GPU: so is what is made of them.
        return added_OI.add_(frozen.to(added_OI.device)).to(frozen.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


def matrices(adapters: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield each matrix that has adapters: its name, A [R, I] and B [O, R]."""
    for name, a_RI in adapters.items():
        if name.endswith(A):
            stem = name.removesuffix(A)
            yield f"{stem}.weight", a_RI, adapters[stem + B]
