"""Policies that transformers computes, for families that torchtitan does not have: `model.backend=transformers`.

A `ForeignPolicy` is called like torchtitan's models, with a packed row (attention.py). Inside, each response becomes a
sequence of its own, behind its prompt, and the sequences are padded at their right. Their attention is causal, so no
token sees the padding, and no mask is needed: each layer makes the one that its family wants.

    row         p p p p | a a a | b b
    sequences   p p p p a a a
                p p p p b b .

Parameters have the names of the checkpoint, behind `inner.`. No code that comes with a checkpoint is ever run.

Shape suffixes: B sequences, L tokens of the row, S tokens of the longest sequence, D model dimension.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from asyncspec.errors import first_line
from asyncspec.models import CheckpointError
from asyncspec.models.attention import Packing
from asyncspec.models.headers import compare, read_headers
from asyncspec.models.hf_files import carried, write_checkpoint
from asyncspec.models.parallel import local, release, share
from asyncspec.models.shape import ARCHITECTURES, PolicyShape

PREFIX = "inner."
HEAD_TOLERANCE = 1e-3  # of logits, relative to the largest


class ForeignPolicy(nn.Module):
    """A model of transformers in the place of a torchtitan model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @property
    def layers(self) -> dict[str, nn.Module]:
        """The decoder's layers, by their numbers."""
        count = self.inner.config.num_hidden_layers
        lists = (each for each in self.inner.base_model.modules() if isinstance(each, nn.ModuleList))
        return {str(index): layer for index, layer in enumerate(next(each for each in lists if len(each) == count))}

    @property
    def tok_embeddings(self) -> nn.Module:
        return self.inner.get_input_embeddings()

    @property
    def lm_head(self) -> nn.Module:
        return self.inner.get_output_embeddings()

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.inner.config.tie_word_embeddings

    def forward(self, tokens_BL: torch.Tensor, positions=None, packing: Packing | None = None, theirs: bool = False):
        """Return what the head makes of the trunk's output.

        Args:
            tokens_BL: int64 token ids; with a packing, one row.
            positions: not used; each sequence's are counted from 0.
            packing: None: whole sequences from position 0.
            theirs: whether transformers applies the head, in its own way.
        """
        if theirs:
            return self.inner(input_ids=tokens_BL, use_cache=False).logits
        if packing is None:
            return self.lm_head(self._trunk(tokens_BL))
        spread_BS, back_L = sequences(packing)
        hidden_BSD = self._trunk(tokens_BL[0][spread_BS])
        return self.lm_head(hidden_BSD.flatten(0, 1).index_select(0, back_L).unsqueeze(0))

    def apply_fsdp(self, mesh, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype) -> None:
        """Shard each layer, and what is left as a whole, with FSDP2. Collective.

        Args:
            mesh: the ranks, one or two dimensions.
            param_dtype: dtype that weights are cast to for computing; None: they are not cast.
            reduce_dtype: dtype in which gradients are added up.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        dtypes = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        for layer in self.layers.values():
            fully_shard(layer, mesh=mesh, mp_policy=dtypes)
        fully_shard(self, mesh=mesh, mp_policy=dtypes, reshard_after_forward=False)
        for module in (*self.layers.values(), self):
            module.set_gradient_divide_factor(1.0)  # the loss is a sum over all ranks' tokens, divided once

    def _trunk(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        # A cache would be kept for nothing, and mixes sequences up. Without a mask each layer makes its family's own.
        return self.inner.base_model(input_ids=tokens_BS, use_cache=False).last_hidden_state


def sequences(packing: Packing) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how a packed row becomes whole sequences.

    Returns:
        The index in the row of each sequence's tokens, int64 [B, S], where padding repeats the sequence's last token;
        and the index among these of each token of the row, int64 [L].
    """
    if "sequences" not in packing._kept:
        rows = []
        back_L = np.empty(packing.tokens, np.int64)
        pieces: list[tuple[np.ndarray, int, int]] = []  # indices in the row, sequence, first place in it
        for s in packing.segments:
            prompt = np.arange(s.start, s.responses)
            owns = [np.arange(start, start + n) for start, n in zip(s.starts, s.lengths) if n] or [prompt[:0]]
            for number, own in enumerate(owns):
                pieces.append((own, len(rows), s.prompt))
                if number == 0:  # a prompt's states are the same in all of its sequences
                    pieces.append((prompt, len(rows), 0))
                rows.append(np.concatenate([prompt, own]))
        longest = max(map(len, rows))
        spread = np.stack([np.pad(row, (0, longest - len(row)), mode="edge") for row in rows])
        for indices, number, first in pieces:
            back_L[indices] = number * longest + first + np.arange(len(indices))
        packing._kept["sequences"] = tuple(torch.from_numpy(each).to(packing.device) for each in (spread, back_L))
    return packing._kept["sequences"]


def build(shape: PolicyShape) -> ForeignPolicy:
    """Return a policy whose parameters are on the meta device. Its buffers, such as RoPE's frequencies, have their
    values.

    Raises:
        CheckpointError: transformers has no such model of text, or only with code from the checkpoint.
    """
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        config = CONFIG_MAPPING[shape.model_type].from_dict(json.loads(shape.config_json))
        with _parameters_on_meta():
            inner = AutoModelForCausalLM.from_config(config, trust_remote_code=False, dtype=torch.float32)
    except Exception as error:  # of many types
        raise CheckpointError(
            f"model_type={shape.model_type!r}: transformers refuses it: {first_line(error)}"
        ) from None
    inner.eval()  # no dropout: the policy that is trained is the one that is sampled
    inner.tie_weights()
    return ForeignPolicy(inner)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Have modules that are made in this context register parameters without values; buffers keep theirs."""
    register = nn.Module.register_parameter

    def without_values(self, name, parameter):
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(self, name, parameter)

    nn.Module.register_parameter = without_values
    try:
        yield
    finally:
        nn.Module.register_parameter = register


@torch.no_grad()
def fill(model: ForeignPolicy, directory: Path, device: str) -> None:
    """Give a policy from `build`, sharded or not, memory on a device, and fill it from a directory, in place.

    Raises:
        CheckpointError: a file cannot be read, or a value is not finite.
    """
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    model.to_empty(device=device)
    for module, held in buffers:  # `to_empty` has lost their values
        module._buffers.update({name: None if each is None else each.to(device) for name, each in held.items()})
    if model.tied:
        model.lm_head.weight = model.tok_embeddings.weight
    headers, parameters = read_headers(directory), dict(model.named_parameters())
    for name, parameter in parameters.items():
        held = name.removeprefix(PREFIX)
        file = directory / headers[held].file
        try:
            with safe_open(file, "pt") as opened:
                part = opened.get_tensor(held)[share(parameter)]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: {error}") from None
        if part.numel() and not all(end.isfinite() for end in torch.aminmax(part)):
            raise CheckpointError(f"{directory}: tensor {held} holds values that are not finite")
        local(parameter).copy_(part)


def check(directory: Path) -> PolicyShape:
    """Check that a directory holds a policy that transformers computes, and return its shape.

    Raises:
        CheckpointError: a file is missing or torn, transformers refuses the model, or the tensors do not have the names
            and shapes of its parameters.
    """
    shape, found = PolicyShape.from_hf(directory, "transformers"), read_headers(directory)
    model = build(shape)
    expected = {name.removeprefix(PREFIX): tuple(each.shape) for name, each in model.named_parameters()}
    ignored = {name for name in found if name.endswith("rotary_emb.inv_freq")}
    if model.tied:
        ignored |= {"lm_head.weight"} & set(found)
    if missing := sorted(set(expected) - set(found)):
        own = shape.model_type in ARCHITECTURES
        raise CheckpointError(
            f"{directory}: tensor {missing[0]} is missing ({len(missing)} in all): files of model_type="
            f"{shape.model_type!r} have other names than its model in transformers, or the files are incomplete; "
            "expected the same names" + ("; nearest valid choice: model.backend=torchtitan" if own else "")
        )
    compare(directory, found, expected, ignored)
    return shape


@torch.no_grad()
def check_head(model: ForeignPolicy, device: str) -> None:
    """Check that the logits of transformers are the product of trunk and head, as they are computed here. Collective if
    the policy is sharded.

    Raises:
        CheckpointError: they are not: the family scales or caps its logits.
    """
    tokens_BL = torch.arange(8, device=device).unsqueeze(0) % model.inner.config.vocab_size
    ours, theirs = model(tokens_BL), model(tokens_BL, theirs=True)
    release(model)
    apart, largest = float((ours - theirs).abs().max()), float(theirs.abs().max())
    if not apart <= HEAD_TOLERANCE * max(1.0, largest) * (1 if ours.dtype is torch.float32 else 100):
        raise CheckpointError(
            f"model_type={model.inner.config.model_type!r}: its logits are not the product of trunk and head (they "
            f"differ by {apart:.2g}); expected a family that neither scales nor caps them"
        )


def to_hf(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with the names of the checkpoint."""
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def save(
    shape: PolicyShape,
    directory: Path,
    source: Path | None,
    dtype: torch.dtype,
    parts: Iterable[Mapping[str, torch.Tensor]],
) -> None:
    """Write a Hugging Face directory; arguments and errors are those of `policy.save`."""
    expected = {
        name.removeprefix(PREFIX): torch.empty(each.shape, dtype=dtype, device="meta")
        for name, each in build(shape).named_parameters()
    }
    fields = carried(source, shape.to_hf(), str(dtype).removeprefix("torch."))
    write_checkpoint(directory, fields, expected, source, (to_hf(part) for part in parts))
