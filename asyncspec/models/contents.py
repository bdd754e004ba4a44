"""Checks that the directory of a policy or a draft holds what its config.json describes, before anything starts.

What loads a directory calls the same checks, so an actor refuses no directory that passed them at the start, except for
values that are not finite: only who reads all values finds these. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from asyncspec.models import CheckpointError
from asyncspec.models.draft_shape import DraftShape
from asyncspec.models.headers import Tensor, compare, read_headers
from asyncspec.models.shape import PolicyShape

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_BLOCK = 1 << 22  # bytes that are compared at once
MTP_PREFIX = "mtp."


def policy_tensors(shape: PolicyShape) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a policy's file: name -> shape. A tied head is left out."""
    found = {EMBEDDING: (shape.vocab_size, shape.dim), "model.norm.weight": (shape.dim,)}
    for index in range(shape.n_layers):
        found |= _layer_tensors(shape, f"model.layers.{index}.")
    return found | ({} if shape.tied else {HEAD: (shape.vocab_size, shape.dim)})


def _layer_tensors(shape: PolicyShape, prefix: str) -> dict[str, tuple[int, ...]]:
    D, H, experts = shape.dim, shape.head_dim, shape.experts
    found: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (D,),
        "post_attention_layernorm.weight": (D,),
        "self_attn.q_proj.weight": (shape.n_heads * H, D),
        "self_attn.k_proj.weight": (shape.n_kv_heads * H, D),
        "self_attn.v_proj.weight": (shape.n_kv_heads * H, D),
        "self_attn.o_proj.weight": (D, shape.n_heads * H),
    }
    if shape.qkv_bias:
        found["self_attn.q_proj.bias"] = (shape.n_heads * H,)
        found |= {f"self_attn.{name}_proj.bias": (shape.n_kv_heads * H,) for name in "kv"}
    if shape.head_norms:
        found |= {"self_attn.q_norm.weight": (H,), "self_attn.k_norm.weight": (H,)}
    if experts is None:
        found |= _feed_forward_tensors("mlp.", D, shape.hidden_dim)
    else:
        found["mlp.gate.weight"] = (experts.count, D)
        for expert in range(experts.count):
            found |= _feed_forward_tensors(f"mlp.experts.{expert}.", D, experts.hidden_dim)
    return {prefix + name: size for name, size in found.items()}


def _feed_forward_tensors(prefix: str, dim: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (hidden, dim),
        f"{prefix}up_proj.weight": (hidden, dim),
        f"{prefix}down_proj.weight": (dim, hidden),
    }


def mtp_tensors(shape: PolicyShape) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a policy's MTP module: name -> shape."""
    D = shape.dim
    return _layer_tensors(shape, f"{MTP_PREFIX}layers.0.") | {
        "mtp.fc.weight": (D, 2 * D),
        "mtp.norm.weight": (D,),
        "mtp.pre_fc_norm_hidden.weight": (D,),
        "mtp.pre_fc_norm_embedding.weight": (D,),
    }


def eagle3_tensors(shape: DraftShape) -> dict[str, tuple[int, ...]]:
    """Return the tensors of an EAGLE-3 draft, without those of its vocabulary: name -> shape."""
    D, H = shape.dim, shape.head_dim
    return {
        "fc.weight": (D, 3 * D),
        "norm.weight": (D,),
        "lm_head.weight": (shape.draft_vocab_size, D),
        "midlayer.input_layernorm.weight": (D,),
        "midlayer.hidden_norm.weight": (D,),
        "midlayer.post_attention_layernorm.weight": (D,),
        "midlayer.self_attn.q_proj.weight": (shape.n_heads * H, 2 * D),
        "midlayer.self_attn.k_proj.weight": (shape.n_kv_heads * H, 2 * D),
        "midlayer.self_attn.v_proj.weight": (shape.n_kv_heads * H, 2 * D),
        "midlayer.self_attn.o_proj.weight": (D, shape.n_heads * H),
        **_feed_forward_tensors("midlayer.mlp.", D, shape.hidden_dim),
    }


def check_policy(directory: Path, backend: str = "torchtitan") -> PolicyShape:
    """Check a policy's directory, and return the policy's shape. The file may also hold the policy's MTP module.

    Args:
        backend: see `PolicyShape.from_hf`.

    Raises:
        CheckpointError: a file is missing or torn, a field is not supported, or the tensors do not fit config.json.
    """
    if backend == "transformers":
        from asyncspec.models import foreign

        return foreign.check(directory)
    shape, found = PolicyShape.from_hf(directory), read_headers(directory)
    # Old files hold the frequencies of RoPE, which config.json gives.
    ignored = {name for name in found if name.endswith("rotary_emb.inv_freq") or name.startswith(MTP_PREFIX)}
    if shape.tied and HEAD in found:
        ignored.add(HEAD)
        if EMBEDDING not in found:  # the two are one, under either name
            found[EMBEDDING] = found[HEAD]
        elif not _equal(directory, found[EMBEDDING], EMBEDDING, found[HEAD], HEAD):
            raise CheckpointError(
                f"{directory}: tie_word_embeddings=true, but {HEAD} differs from {EMBEDDING}; expected one of them; "
                f"tie_word_embeddings=false keeps both"
            )
    compare(directory, found, policy_tensors(shape), ignored)
    return shape


def check_eagle3(
    directory: Path, policy: PolicyShape, policy_directory: Path | None = None, tell: Callable[[str], object] = str
) -> DraftShape:
    """Check the directory of an EAGLE-3 draft, and return the draft's shape.

    Args:
        policy: shape of the policy that it drafts for.
        policy_directory: the policy's directory. The draft's file may hold a copy of the policy's embedding.
        tell: called with one line if that copy differs from the policy's.

    Raises:
        CheckpointError: a file is missing or torn, a field is not supported, the tensors do not fit config.json, or
            the draft was made for another policy.
    """
    shape, found = DraftShape.from_hf(directory, policy), read_headers(directory)
    expected, whole = eagle3_tensors(shape), ("d2t",)
    ignored = {"t2d", *(name for name in found if name.endswith("rotary_emb.inv_freq"))}
    if shape.draft_vocab_size != shape.vocab_size:
        expected["d2t"] = (shape.draft_vocab_size,)
        _check_draft_vocabulary(directory, found, shape)
    else:
        ignored.add("d2t")
    if (own := found.get("embed_tokens.weight")) is not None:
        ignored.add("embed_tokens.weight")
        if policy_directory is not None:
            headers = read_headers(policy_directory)
            name = EMBEDDING if EMBEDDING in headers else HEAD
            if own.shape != headers[name].shape:
                raise CheckpointError(
                    f"{directory}: tensor embed_tokens.weight has shape {list(own.shape)}, the policy's embedding "
                    f"{list(headers[name].shape)}; expected a draft of this policy"
                )
            if not _equal(directory, own, "embed_tokens.weight", headers[name], name, policy_directory):
                tell(
                    f"warning: {directory}: embed_tokens.weight differs from the policy's embedding, which the draft "
                    "uses here"
                )
    compare(directory, found, expected, ignored, whole)
    return shape


def _check_draft_vocabulary(directory: Path, found: dict[str, Tensor], shape: DraftShape) -> None:
    """Check that d2t names different tokens of the policy: token i of the draft is the policy's token i + d2t[i]."""
    import numpy as np
    from safetensors import safe_open

    own = found.get("d2t")
    if own is None or own.shape != (shape.draft_vocab_size,):
        raise CheckpointError(
            f"{directory}: tensor d2t is missing or does not fit draft_vocab_size={shape.draft_vocab_size}"
        )
    with safe_open(directory / own.file, "np") as file:
        tokens = np.asarray(file.get_tensor("d2t")).astype(np.int64) + np.arange(shape.draft_vocab_size)
    if not (0 <= tokens.min() and tokens.max() < shape.vocab_size and len(np.unique(tokens)) == len(tokens)):
        raise CheckpointError(
            f"{directory}: tensor d2t does not name {len(tokens)} different tokens of the policy's {shape.vocab_size}"
        )


def check_mtp(directory: Path, policy: PolicyShape) -> None:
    """Check that a directory holds an MTP module for a policy. It may hold the policy too.

    Raises:
        CheckpointError: a file is missing or torn, or the tensors do not fit the policy's shape.
    """
    found = read_headers(directory)
    ignored = {name for name in found if not name.startswith(MTP_PREFIX)}
    compare(directory, found, mtp_tensors(replace(policy, n_layers=1)), ignored)


def check_draft(
    method: str,
    directory: Path,
    policy: PolicyShape,
    policy_directory: Path | None = None,
    tell: Callable[[str], object] = str,
) -> None:
    """Check the directory of a draft of any method. The arguments are those of `check_eagle3`.

    Raises:
        CheckpointError: the files cannot be used, or the draft was made for another policy.
    """
    if method == "eagle3":
        check_eagle3(directory, policy, policy_directory, tell)
    elif method == "mtp":
        check_mtp(directory, policy)
    elif (own := check_policy(directory)).vocab_size != policy.vocab_size:
        raise CheckpointError(
            f"{directory}/config.json: vocab_size={own.vocab_size}: expected the policy's {policy.vocab_size}"
        )


def _equal(
    directory: Path, first: Tensor, first_name: str, second: Tensor, second_name: str, of_second: Path | None = None
) -> bool:
    """Whether two tensors have the same values, once rounded to the coarser of their dtypes; read block by block.

    Args:
        of_second: directory of the second tensor, if it is another one.
    """
    from safetensors import safe_open

    if first.shape != second.shape:
        return False
    rows = max(1, _BLOCK // max(1, 4 * first.shape[-1]))
    with (
        safe_open(directory / first.file, "pt") as a,
        safe_open((of_second or directory) / second.file, "pt") as b,
    ):
        one, other = a.get_slice(first_name), b.get_slice(second_name)
        for at in range(0, first.shape[0], rows):
            mine, theirs = one[at : at + rows], other[at : at + rows]
            coarser = min((mine, theirs), key=lambda block: block.element_size()).dtype
            if not bool((mine.to(coarser) == theirs.to(coarser)).all()):
                return False
        return True
