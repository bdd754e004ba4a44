"""Fills a policy that has no values yet from the files of a Hugging Face directory, block by block.

    file, mapped, in its dtype --adapter--> one block, whole --copy and cast--> this rank's part of each parameter

A block is one layer, or one tensor outside the layers. Its pages are given back before the next block is read. So a
rank needs memory for its own part, and for the parts of one block that it copies. Ranks do not talk to each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor

from asyncspec.models import CheckpointError
from asyncspec.models.contents import EMBEDDING, HEAD, policy_tensors
from asyncspec.models.headers import Tensor, read_headers
from asyncspec.models.parallel import local, share
from asyncspec.models.shape import PolicyShape


@torch.no_grad()
def fill(model, whole, adapter, directory: Path, shape: PolicyShape) -> None:
    """Fill a policy's parameters, in place.

    Args:
        model: the policy, whole or sharded, with memory for its parameters.
        whole: the same policy on the meta device, not sharded. Its layers are used up.
        adapter: torchtitan's adapter of this policy.
        directory: a directory that `check_policy` has passed.

    Raises:
        CheckpointError: a file cannot be read, or a value is not finite.
    """
    parameters = dict(model.named_parameters())
    for block, tensors in blocks(whole, adapter, directory, shape):
        for name, tensor in block.items():
            part = tensor[share(parameters[name])]
            if part.numel() and not all(end.isfinite() for end in torch.aminmax(part)):
                raise CheckpointError(f"{directory}: tensor {_not_finite(tensors)} holds values that are not finite")
            local(parameters[name]).copy_(part)


def blocks(
    whole, adapter, directory: Path, shape: PolicyShape
) -> Iterator[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """Yield each block of a policy in a directory: its parameters by their names in the model, and the tensors of the
    file that they were made of. Arguments and errors are those of `fill`.
    """
    headers = read_headers(directory)
    for names in _blocks(shape):
        tensors = _mapped(directory, headers, names)
        yield _converted(whole, adapter, tensors, shape), tensors


def _blocks(shape: PolicyShape) -> Iterator[list[str]]:
    """Yield the names of each block's tensors in the file."""

    def block(name: str) -> str:
        layer = re.match(r"model\.layers\.\d+\.", name)
        return layer[0] if layer else name

    for _, names in groupby(policy_tensors(shape), block):
        yield list(names)


def _mapped(directory: Path, headers: Mapping[str, Tensor], names: list[str]) -> dict[str, torch.Tensor]:
    """Return tensors whose values are read when they are used."""
    found = {}
    for name in names:
        held = name if name in headers else HEAD  # a tied policy's one matrix may have either name
        file = directory / headers[held].file
        try:
            with safe_open(file, "pt") as opened:
                found[name] = opened.get_tensor(held)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: {error}") from None
    return found


def _converted(whole, adapter, tensors: dict[str, torch.Tensor], shape: PolicyShape) -> dict[str, torch.Tensor]:
    """Return a block's parameters by their names in the model."""
    given = dict(tensors)
    if shape.tied:  # the adapter of a tied policy asks for the embedding
        given.setdefault(EMBEDDING, torch.empty(shape.vocab_size, shape.dim, device="meta"))
    state = {name: tensor for name, tensor in adapter.from_hf(given).items() if not tensor.is_meta}
    layer = re.match(r"layers\.(\d+)\.", next(iter(state)))
    if layer is None:
        return {name: tensor for name, tensor in state.items() if not (shape.tied and name == HEAD)}
    block = whole.layers[layer[1]]
    del whole.layers[layer[1]]
    block.load_state_dict({name.removeprefix(layer[0]): tensor for name, tensor in state.items()}, assign=True)
    return {layer[0] + name: parameter for name, parameter in block.named_parameters()}


def _not_finite(tensors: Mapping[str, torch.Tensor]) -> str:
    return next(name for name, tensor in tensors.items() if not tensor.isfinite().all())


@torch.no_grad()
def allocate(model, rope, device: str) -> None:
    """Give a policy on the meta device memory, with values in its buffers only.

    Args:
        rope: the RoPE of the first layer; the other layers are to take its table from it.
    """
    ropes = [layer.attention.rope for layer in model.layers.values()]
    table = rope.cache
    for each in ropes:  # no layer needs memory for a table of its own
        each.cache = None
    model.to_empty(device=device)
    if model.enable_weight_tying and model.tok_embeddings.weight is not model.lm_head.weight:
        model.tok_embeddings.weight = model.lm_head.weight
    rope.cache = table
    for module in model.modules():
        if not any(buffer is not None for buffer in module._buffers.values()):
            continue
        before = dict(module._buffers)
        module._init_self_buffers(buffer_device=torch.device(device))
        for name, buffer in before.items():
            if isinstance(buffer, DTensor):  # every rank holds it whole
                module._buffers[name] = DTensor.from_local(
                    module._buffers[name], buffer.device_mesh, buffer.placements, run_check=False
                )
