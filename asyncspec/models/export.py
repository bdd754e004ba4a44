"""Writes a policy as a Hugging Face directory, part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch

from asyncspec.models.contents import EMBEDDING, HEAD, policy_tensors
from asyncspec.models.hf_files import carried, further_tensors, write_checkpoint
from asyncspec.models.shape import PolicyShape

Tensors = Mapping[str, torch.Tensor]


def write_policy(
    to_hf: Callable[[Tensors], Tensors],
    shape: PolicyShape,
    directory: Path,
    source: Path | None,
    mtp,
    dtype: torch.dtype,
    parts: Iterable[Tensors],
) -> None:
    """Write what `policy.save` says.

    Args:
        to_hf: returns the file's names and layouts of some of the policy's parameters.
    """
    with torch.device("meta"):
        tensors = {name: torch.empty(size, dtype=dtype) for name, size in policy_tensors(shape).items()}
    module = {} if mtp is None else {name: tensor.to(dtype) for name, tensor in mtp.state_hf().items()}
    same = source if source is not None and PolicyShape.from_hf(source) == shape else None
    further = {} if same is None else further_tensors(same, {*tensors, *module})
    head = further.pop(HEAD, None)  # of a tied policy, written out
    if head is not None:
        tensors[HEAD] = tensors[EMBEDDING]

    def values() -> Iterator[Tensors]:
        for part in parts:
            found = to_hf(part)
            yield found
            if head is not None and EMBEDDING in found:
                yield {HEAD: found[EMBEDDING]}
        yield module | further

    fields = carried(same, shape.to_hf(), str(dtype).removeprefix("torch."))
    more = {} if mtp is None else {"num_nextn_predict_layers": 1}
    write_checkpoint(directory, fields | more, tensors | module | further, source, values())
