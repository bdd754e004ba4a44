"""The policy: torchtitan's Qwen3, read from and written to Hugging Face checkpoints.

One definition serves trainer, logprob and engine. Trainer and logprob run it as it is, over whole (right-padded) sequences; the
engine runs the same parameters over a slot KV cache (engine/decode.py).

Shape suffixes: B batch, L positions, D model dimension, V vocabulary, N heads, H head size, A the three auxiliary layers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Mapping

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.module import Module

from asyncspec.models import CheckpointError


class CausalAttention(Module):
    """Causal attention over whole sequences starting at position 0; right padding needs no mask."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks=None, scale=None, enable_gqa=False):
        q_BNLH, k_BNLH, v_BNLH = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
        return F.scaled_dot_product_attention(
            q_BNLH, k_BNLH, v_BNLH, is_causal=True, scale=scale, enable_gqa=enable_gqa
        ).transpose(1, 2)


@dataclass(frozen=True)
class PolicyShape:
    """The architecture of a Qwen3 policy; field by field what a Hugging Face config.json says."""

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    max_positions: int
    rope_theta: float
    norm_eps: float
    tied: bool
    eos_token_id: int
    pad_token_id: int

    @classmethod
    def from_hf(cls, directory: Path) -> "PolicyShape":
        """Read config.json.

        Raises:
            CheckpointError: the file is missing, unreadable, or describes another architecture.
        """
        try:
            cfg = json.loads((directory / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{directory}/config.json: {error}") from None
        if cfg.get("model_type") != "qwen3":
            raise CheckpointError(f"{directory}/config.json: model_type={cfg.get('model_type')!r}: expected 'qwen3'")
        rope = cfg.get("rope_parameters") or cfg.get("rope_scaling") or {}
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            raise CheckpointError(f"{directory}/config.json: scaled RoPE {rope!r}: expected the default RoPE")
        eos = cfg.get("eos_token_id")
        try:
            return cls(
                vocab_size=cfg["vocab_size"], dim=cfg["hidden_size"], n_layers=cfg["num_hidden_layers"],
                n_heads=cfg["num_attention_heads"], n_kv_heads=cfg["num_key_value_heads"],
                head_dim=cfg.get("head_dim") or cfg["hidden_size"] // cfg["num_attention_heads"],
                hidden_dim=cfg["intermediate_size"], max_positions=cfg["max_position_embeddings"],
                rope_theta=float(cfg.get("rope_theta") or rope.get("rope_theta") or 1e6),
                norm_eps=cfg["rms_norm_eps"], tied=bool(cfg.get("tie_word_embeddings", False)),
                eos_token_id=eos[0] if isinstance(eos, list) else eos, pad_token_id=cfg.get("pad_token_id") or 0,
            )
        except KeyError as error:
            raise CheckpointError(f"{directory}/config.json: field {error} is missing") from None

    def to_hf(self) -> dict:
        return {
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": self.vocab_size,
            "hidden_size": self.dim, "num_hidden_layers": self.n_layers, "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads, "head_dim": self.head_dim, "intermediate_size": self.hidden_dim,
            "max_position_embeddings": self.max_positions, "rope_theta": self.rope_theta,
            "rms_norm_eps": self.norm_eps, "tie_word_embeddings": self.tied, "hidden_act": "silu",
            "attention_bias": False, "eos_token_id": self.eos_token_id, "pad_token_id": self.pad_token_id,
            "torch_dtype": "float32",
        }

    @property
    def aux_layers(self) -> tuple[int, int, int]:
        """Layers whose inputs feed the draft: an early, a middle and a late one (EAGLE-3, arXiv 2503.01840); three different
        ones also in a shallow policy, which needs three layers for it."""
        n = self.n_layers
        return (2, n // 2, n - 3) if n >= 7 else (n - 3, n - 2, n - 1)


def build(shape: PolicyShape, max_positions: int = 0) -> Qwen3Model:
    """An uninitialised policy.

    Args:
        max_positions: length of the RoPE table; 0 takes the shape's.
    """
    shape = replace(shape, max_positions=max_positions or shape.max_positions)

    def norm(size: int) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=size, eps=shape.norm_eps, param_init={"weight": nn.init.ones_})

    # Fan-in initialisation, residual outputs scaled by depth: also deep and narrow policies train from scratch.
    weight = {"weight": lambda t: nn.init.normal_(t, std=t.shape[-1] ** -0.5)}
    residual = {"weight": lambda t: nn.init.normal_(t, std=(2 * shape.n_layers * t.shape[-1]) ** -0.5)}
    # torchtitan gives w2 (residual output) and w3 one initialiser; their shapes tell them apart.
    w2w3 = {"weight": lambda t: (residual if t.shape[0] == shape.dim else weight)["weight"](t)}
    block = Qwen3TransformerBlock.Config(
        attention_norm=norm(shape.dim),
        ffn_norm=norm(shape.dim),
        attention=make_gqa_config(
            dim=shape.dim, n_heads=shape.n_heads, n_kv_heads=shape.n_kv_heads, head_dim=shape.head_dim,
            wqkv_param_init=weight, wo_param_init=residual, fuse_qkv=True, qk_norm=norm(shape.head_dim),
            inner_attention=CausalAttention.Config(),
            rope=CosSinRoPE.Config(dim=shape.head_dim, max_seq_len=shape.max_positions, theta=shape.rope_theta),
        ),
        feed_forward=make_ffn_config(
            dim=shape.dim, hidden_dim=shape.hidden_dim, w1_param_init=weight, w2w3_param_init=w2w3
        ),
    )
    config = Qwen3Model.Config(
        vocab_size=shape.vocab_size, dim=shape.dim, norm=norm(shape.dim), enable_weight_tying=shape.tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=shape.vocab_size, embedding_dim=shape.dim,
            param_init=weight if not shape.tied else {"weight": lambda t: t},
        ),
        lm_head=Linear.Config(in_features=shape.dim, out_features=shape.vocab_size, param_init=weight),
        layers=[block] * shape.n_layers,
    )
    set_qwen3_sharding_config(config, enable_sp=True, enable_ep=False)  # how several ranks would divide it, see parallel.py
    return config.build()


def hidden_states(
    model: Qwen3Model, tokens_BL: torch.Tensor, positions_BL: torch.Tensor | None = None, aux_layers=()
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The trunk's forward pass, with the inputs of `aux_layers` kept.

    Args:
        tokens_BL: int64 token ids.
        positions_BL: int64; None counts from 0.

    Returns:
        hidden_BLD after the final norm (give it to `model.lm_head`), and the inputs of the auxiliary layers
        concatenated on the last axis, [B, L, A*D], or None without `aux_layers`. Layer number n_layers, one past the last,
        stands for hidden_BLD itself.
    """
    h_BLD = model.tok_embeddings(tokens_BL)
    kept = []
    for index, layer in enumerate(model.layers.values()):
        if index in aux_layers:
            kept.append(h_BLD)
        h_BLD = layer(h_BLD, None, positions_BL)
    h_BLD = model.norm(h_BLD)
    if len(model.layers) in aux_layers:
        kept.append(h_BLD)
    return h_BLD, (torch.cat(kept, dim=-1) if kept else None)


def load(directory: Path, device: str = "cpu") -> tuple[Qwen3Model, PolicyShape]:
    """Build a policy on a device and fill it from a Hugging Face directory.

    Raises:
        CheckpointError: missing files, shards or tensors, wrong shapes, or values that are not finite.
    """
    shape = PolicyShape.from_hf(directory)
    model = build(shape)
    adapter = Qwen3StateDictAdapter(model.config, None)
    # The policy's own MTP module may lie in the same file, see models/mtp.py.
    state = adapter.from_hf({k: v for k, v in read_tensors(directory).items() if not k.startswith("mtp.")})
    if shape.tied:
        state["tok_embeddings.weight"] = state["lm_head.weight"]
    expected = model.state_dict()
    missing = sorted(set(expected) - set(state))
    if missing:
        raise CheckpointError(f"{directory}: tensor {missing[0]} is missing ({len(missing)} in all)")
    for name, tensor in expected.items():
        if state[name].shape != tensor.shape:
            raise CheckpointError(f"{directory}: tensor {name} has shape {tuple(state[name].shape)}, "
                                  f"config.json asks for {tuple(tensor.shape)}")
        if not state[name].isfinite().all():
            raise CheckpointError(f"{directory}: tensor {name} holds values that are not finite")
    model.load_state_dict({name: state[name].to(torch.float32) for name in expected})
    return model.to(device), shape


def lengthened(model: Qwen3Model, shape: PolicyShape, positions: int) -> Qwen3Model:
    """A copy of the model with a RoPE table for so many positions."""
    copy = build(shape, positions)
    copy.load_state_dict(model.state_dict())
    return copy.requires_grad_(False)


def skeleton(shape: PolicyShape) -> Qwen3Model:
    """A policy without values, on the meta device: for its names and shapes."""
    with torch.device("meta"):
        return build(shape)


def to_hf(model: Qwen3Model, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A policy's tensors, named as in `named_parameters`, as a Hugging Face checkpoint names and divides them.

    Args:
        model: a policy of this shape, `skeleton`'s for example; it is as before in the end.
    """
    own = {name: model.get_parameter(name) for name in tensors}
    try:
        _register(model, {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()})
        # Only the state has q, k and v apart.
        return Qwen3StateDictAdapter(model.config, None).to_hf(model.state_dict())
    finally:
        _register(model, own)


def _register(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        module, _, leaf = name.rpartition(".")
        model.get_submodule(module).register_parameter(leaf, parameter)


def save(model: Qwen3Model, shape: PolicyShape, directory: Path, tokenizer_from: Path | None = None, mtp=None) -> None:
    """Write a Hugging Face directory: config.json, model.safetensors, and the tokenizer's files.

    Args:
        mtp: the policy's `MTP` module, written with it.
    """
    adapter = Qwen3StateDictAdapter(model.config, None)
    state = adapter.to_hf({k: v.detach() for k, v in model.state_dict().items()})
    more = {} if mtp is None else {"num_nextn_predict_layers": 1}
    write_checkpoint(directory, shape.to_hf() | more, state | ({} if mtp is None else mtp.state_hf()))
    if tokenizer_from is not None:
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            if (tokenizer_from / name).is_file():
                (directory / name).write_bytes((tokenizer_from / name).read_bytes())


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of model.safetensors, or of the shards that model.safetensors.index.json lists."""
    index = directory / "model.safetensors.index.json"
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        try:
            tensors.update(load_file(directory / name))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{directory / name}: {error}") from None
    return tensors


def write_checkpoint(directory: Path, config: dict, tensors: dict[str, torch.Tensor]) -> None:
    """config.json and model.safetensors, each replaced as a whole: a reader never sees half a file."""
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / "model.safetensors.partial"
    save_file({k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}, partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # safetensors leaves it readable by its owner alone
    partial.replace(directory / "model.safetensors")
    write_json(directory / "config.json", config)


def write_json(file: Path, content: dict) -> None:
    """Replace a file as a whole."""
    partial = file.with_name(file.name + ".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(file)
