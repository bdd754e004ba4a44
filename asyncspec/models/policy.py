"""The policy: torchtitan's Qwen3 (dense or a mixture of experts) or Llama 3, read from and written to Hugging Face
checkpoints. Qwen2 is Qwen3 without norms of queries and keys, and with biases.

One definition serves trainer, logprob and engine. Trainer and logprob run the model unchanged, over packed rows
(models/packed.py). The engine runs the same parameters over a slot KV cache (engine/decode.py).

Shape suffixes: B batch, L positions, D model dimension, V vocabulary, N heads, H head size, A auxiliary layers; E
experts, F hidden dimension of an expert.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from asyncspec.loading import compiling_later
from asyncspec.models import fill as filling
from asyncspec.models import foreign, lora
from asyncspec.models.attention import CausalAttention
from asyncspec.models.contents import check_policy
from asyncspec.models.experts import ExactExperts, ReplayRouter
from asyncspec.models.export import write_policy
from asyncspec.models.foreign import ForeignPolicy
from asyncspec.models.rope import rope_config
from asyncspec.models.shape import Lora, PolicyShape

with compiling_later():
    from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear
    from torchtitan.models.common.attention import GQAttention
    from torchtitan.models.common.config_utils import (
        make_ffn_config,
        make_gqa_config,
        make_moe_config,
        make_router_config,
    )
    from torchtitan.models.common.decoder import Decoder
    from torchtitan.models.common.moe import RoutedExperts
    from torchtitan.models.common.nn_modules import RMSNorm
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
    from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
    from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
    from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config
    from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
    from torchtitan.protocols.state_dict_adapter import StateDictAdapter


# torchtitan's block and model, and the function that says how ranks shard the model, see models/parallel.py.
_LLAMA = Llama3TransformerBlock, Llama3Model, partial(set_llama3_sharding_config, enable_sp=True)
_QWEN3 = Qwen3TransformerBlock, Qwen3Model, partial(set_qwen3_sharding_config, enable_sp=True, enable_ep=True)


# Fan-in initialization, with residual outputs scaled by depth: deep and narrow policies train from scratch too.
def _fan_in(t: torch.Tensor) -> None:
    nn.init.normal_(t, std=t.shape[-1] ** -0.5)


def build(shape: PolicyShape, positions: int = 0, adapters: Lora | None = None) -> Decoder:
    """Return a policy whose weights are not initialized.

    Args:
        positions: length of the RoPE table, which is the longest sequence that a pass may take; 0: the shape's.
        adapters: the adapters beside its matrices; all else is frozen then. None: it has none.
    """
    # On a CPU, torch warns when torchtitan's router asks for autocast to float32, which CPU autocast does not have.
    warnings.filterwarnings("ignore", message="In CPU autocast")
    weight = {"weight": _fan_in}
    block_class, model_class, divide = _LLAMA if shape.like_llama else _QWEN3
    block = block_class.Config(
        attention_norm=_norm(shape, shape.dim),
        ffn_norm=_norm(shape, shape.dim),
        attention=_attention(shape, 1),  # a table in each layer; `_share_rope` replaces all of them by one
        **_feed_forward(shape),
    )
    config = model_class.Config(
        vocab_size=shape.vocab_size,
        dim=shape.dim,
        norm=_norm(shape, shape.dim),
        enable_weight_tying=shape.tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=shape.vocab_size,
            embedding_dim=shape.dim,
            param_init=weight if not shape.tied else {"weight": lambda t: t},
        ),
        lm_head=Linear.Config(in_features=shape.dim, out_features=shape.vocab_size, param_init=weight),
        layers=[block] * shape.n_layers,
    )
    divide(config)
    if adapters is not None:
        config = lora.convert(config, adapters, dense=shape.experts is None)
    model = config.build()
    rope = first_rope(model)
    rope.config = replace(rope.config, max_seq_len=positions or shape.longest)
    rope.cache = rope._precompute_cache()
    _share_rope(model)
    return model


def first_rope(model: Decoder) -> CosSinRoPE | ComplexRoPE:
    """Return the RoPE of the first layer. Its table serves all layers."""
    return next(iter(model.layers.values())).attention.rope


def _share_rope(model: Decoder) -> None:
    """Have all layers use the first layer's RoPE table."""
    rope = first_rope(model)
    for layer in model.layers.values():
        layer.attention.rope.config, layer.attention.rope.cache = rope.config, rope.cache


def _norm(shape: PolicyShape, size: int) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=size, eps=shape.norm_eps, param_init={"weight": nn.init.ones_})


def _residual(shape: PolicyShape, t: torch.Tensor) -> None:
    nn.init.normal_(t, std=(2 * shape.n_layers * t.shape[-1]) ** -0.5)


def _attention(shape: PolicyShape, positions: int) -> GQAttention.Config:
    attention = make_gqa_config(
        dim=shape.dim,
        n_heads=shape.n_heads,
        n_kv_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
        wqkv_param_init={"weight": _fan_in, **({"bias": nn.init.zeros_} if shape.qkv_bias else {})},
        wo_param_init={"weight": partial(_residual, shape)},
        fuse_qkv=True,
        qk_norm=_norm(shape, shape.head_dim) if shape.head_norms else None,
        inner_attention=CausalAttention.Config(),
        # In Llama, torchtitan rotates neighbors and Hugging Face's files halves; its adapter permutes the weights.
        rope=rope_config(shape.like_llama, shape.head_dim, positions, shape.rope_theta, shape.rope_scaling),
    )
    attention.qkv_linear.wqkv.bias = shape.qkv_bias
    return attention


def _feed_forward(shape: PolicyShape) -> dict:
    """Return the configuration of a block's feed-forward part, as a keyword argument for the block's configuration."""
    weight, residual, experts = {"weight": _fan_in}, partial(_residual, shape), shape.experts
    if experts is None:
        # torchtitan takes one initializer for w2 (the residual output) and w3; their shapes tell them apart.
        w2w3 = {"weight": lambda t: (residual if t.shape[0] == shape.dim else _fan_in)(t)}
        return {
            "feed_forward": make_ffn_config(
                dim=shape.dim, hidden_dim=shape.hidden_dim, w1_param_init=weight, w2w3_param_init=w2w3
            )
        }
    return {
        "moe": make_moe_config(
            num_experts=experts.count,
            load_balance_coeff=None,  # a bias for load balance would not be in the policy that others load
            router=ReplayRouter.like(
                make_router_config(
                    dim=shape.dim,
                    num_experts=experts.count,
                    gate_param_init=weight,
                    top_k=experts.per_token,
                    score_func="softmax",
                    route_norm=experts.normed,
                )
            ),
            routed_experts=RoutedExperts.Config(
                inner_experts=ExactExperts.Config(
                    dim=shape.dim,
                    hidden_dim=experts.hidden_dim,
                    num_experts=experts.count,
                    param_init={"w1_EFD": _fan_in, "w2_EDF": residual, "w3_EFD": _fan_in},
                ),
                token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=experts.count, top_k=experts.per_token),
            ),
        )
    }


def adapter(config: Decoder.Config) -> StateDictAdapter:
    """Return torchtitan's adapter between a policy's tensor names and layouts and those of Hugging Face files."""
    if isinstance(config, Llama3Model.Config):
        return Llama3StateDictAdapter(config, None)
    found = Qwen3StateDictAdapter(config, None)
    for name in "qkv":  # Qwen2's, which torchtitan has no adapter for
        theirs, ours = f"self_attn.{name}_proj.bias", f"attention.qkv_linear.w{name}.bias"
        found.from_hf_map["model.layers.{}." + theirs] = "layers.{}." + ours
    return found


def hidden_states(model: Decoder, tokens_BL: torch.Tensor, positions_BL: torch.Tensor | None = None) -> torch.Tensor:
    """Run the trunk's forward pass.

    Args:
        tokens_BL: int64 token ids.
        positions_BL: int64; None: counted from 0.

    Returns:
        hidden_BLD after the final norm, the input of `model.lm_head`.
    """
    h_BLD = model.tok_embeddings(tokens_BL)
    for layer in model.layers.values():
        h_BLD = layer(h_BLD, None, positions_BL)
    return model.norm(h_BLD)


@contextmanager
def inputs_of(model: Decoder, layers) -> Iterator[dict[int, torch.Tensor]]:
    """Give the inputs of some layers, whole, after a pass in this context. The layer n_layers is the head.

    A sharded policy must be called as a whole, so that its ranks gather the weights of each layer. So hooks catch the
    inputs on the way.
    """
    inputs: dict[int, torch.Tensor] = {}
    modules = [*model.layers.values(), model.lm_head] if layers else []
    hooks = [
        modules[layer].register_forward_pre_hook(lambda _, given, layer=layer: inputs.update({layer: whole(given[0])}))
        for layer in layers
    ]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


def features(inputs: Mapping[int, torch.Tensor], aux_layers) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return what a draft takes: the inputs of the auxiliary layers, concatenated, and the embeddings; or None."""
    if not aux_layers:
        return None, None
    return torch.cat([inputs[layer] for layer in sorted({*aux_layers})], dim=-1), inputs[0]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that ranks may divide as a whole. Collective if they do."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def load(
    directory: Path,
    device: str = "cpu",
    positions: int = 0,
    dtype: torch.dtype = torch.float32,
    adapters: Lora | None = None,
) -> tuple[Decoder, PolicyShape]:
    """Build a policy on a device and fill it from a Hugging Face directory. Its adapters change nothing yet.

    Args:
        positions, adapters: see `build`.
        dtype: dtype of the parameters.

    Raises:
        CheckpointError: what `check_policy` finds, or values that are not finite.
    """
    shape = check_policy(directory)
    model = cast(skeleton(shape, positions, adapters), dtype)
    fill(model, directory, device)
    return model, shape


def fill(model: Decoder | ForeignPolicy, directory: Path, device: str, seed: int = 0) -> None:
    """Give a `skeleton`, sharded or not, memory on a device, and fill it from a Hugging Face directory, in place.

    Args:
        seed: of the adapters, if it has any.

    Raises:
        CheckpointError: a file cannot be read, or a value is not finite.
    """
    if isinstance(model, ForeignPolicy):
        foreign.fill(model, directory, device)
        return
    filling.allocate(model, first_rope(model), device)
    _share_rope(model)
    shape = PolicyShape.from_hf(directory)
    filling.fill(model, skeleton(shape, 1), adapter(model.config), directory, shape)
    lora.reset(model, seed)


def lengthened(model: Decoder, shape: PolicyShape, positions: int) -> Decoder:
    """Return a copy of the model with a RoPE table for this many positions."""
    copy = build(shape, positions)
    copy.load_state_dict(model.state_dict())
    return copy.requires_grad_(False)


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a model's parameters to another dtype, in place. Its RoPE tables keep theirs, as in a trainer that computes
    in `dtype`.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def skeleton(shape: PolicyShape, positions: int = 0, adapters: Lora | None = None) -> Decoder | ForeignPolicy:
    """Return a policy without values, on the meta device: for its names and shapes, or for `fill`.

    Args:
        positions, adapters: see `build`.

    Raises:
        CheckpointError: transformers is to compute it, and refuses it.
    """
    if shape.config_json:
        return foreign.build(shape)
    with torch.device("meta"):
        return build(shape, positions, adapters)


def to_hf(model: Decoder | ForeignPolicy, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a policy's tensors with the names and layout of a Hugging Face checkpoint.

    Args:
        model: a policy of this shape, for example from `skeleton`; unchanged afterwards.
        tensors: named as in `named_parameters`: all of them, or with a skeleton some.
    """
    if isinstance(model, ForeignPolicy):
        return foreign.to_hf(tensors)
    own = {name: model.get_parameter(name) for name in tensors}
    try:
        _register(model, {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()})
        # Only the state dict has q, k and v as separate tensors.
        state: dict[str, torch.Tensor] = {}
        for block in dict.fromkeys(re.match(r"(layers\.\d+|\w+)\.", name)[1] for name in tensors):
            state |= model.get_submodule(block).state_dict(prefix=f"{block}.")
        return adapter(model.config).to_hf({name: tensor for name, tensor in state.items() if not tensor.is_meta})
    finally:
        _register(model, own)


def _register(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        module, _, leaf = name.rpartition(".")
        model.get_submodule(module).register_parameter(leaf, parameter)


def save(
    model: Decoder | None,
    shape: PolicyShape,
    directory: Path,
    source: Path | None = None,
    mtp=None,
    dtype: torch.dtype = torch.float32,
    parts: Iterable[Mapping[str, torch.Tensor]] | None = None,
) -> None:
    """Write a Hugging Face directory with the policy's weights. Needs memory for one part of them at a time.

    Args:
        source: a directory whose other files are copied, for example the tokenizer's. If it holds a policy of the same
            shape, its fields of config.json and its further tensors are carried over too, so the result is the
            directory that came in, with new weights.
        mtp: the policy's `MTP` module, written to the same file.
        dtype: dtype of the weights that are written.
        parts: the weights in parts, named as in `named_parameters`; None: the model's.

    Raises:
        OSError: a file cannot be written. Weights that are there are unchanged.
    """
    if parts is None:
        parts = ({name: parameter} for name, parameter in model.named_parameters())
    if shape.config_json:
        return foreign.save(shape, directory, source, dtype, parts)
    whole = skeleton(shape, 1)
    write_policy(lambda part: to_hf(whole, part), shape, directory, source, mtp, dtype, parts)
