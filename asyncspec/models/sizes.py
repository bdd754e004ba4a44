"""Sizes of policies and drafts, from the fields of their config.json alone. Imports no torch."""

from __future__ import annotations

from asyncspec.models.shape import Lora


def parameters(policy: dict) -> int:
    """Number of parameters of a policy, from its config.json; with experts, those of all experts."""
    D, H = policy["hidden_size"], policy.get("head_dim") or policy["hidden_size"] // policy["num_attention_heads"]
    heads, kv_heads, V = policy["num_attention_heads"], policy["num_key_value_heads"], policy["vocab_size"]
    experts = policy.get("num_experts") or policy.get("num_local_experts", 0)
    width = policy["moe_intermediate_size"] * experts if experts else policy["intermediate_size"]
    kind = str(policy.get("model_type", ""))
    of_heads = 2 * H if kind.startswith("qwen3") else H * (heads + 2 * kv_heads) if kind == "qwen2" else 0
    layer = D * H * (heads + 2 * kv_heads) + heads * H * D + 3 * D * width + D * experts + 2 * D + of_heads
    return policy["num_hidden_layers"] * layer + D + V * D * (1 if policy.get("tie_word_embeddings") else 2)


def adapter_parameters(policy: dict, lora: Lora) -> int:
    """Number of parameters of a policy's adapters, from its config.json. Experts have none."""
    D, H = policy["hidden_size"], policy.get("head_dim") or policy["hidden_size"] // policy["num_attention_heads"]
    heads, kv_heads = policy["num_attention_heads"], policy["num_key_value_heads"]
    sides = 0
    if lora.targets != "mlp":
        sides += D + H * (heads + 2 * kv_heads) + heads * H + D
    if lora.targets != "attention" and not (policy.get("num_experts") or policy.get("num_local_experts", 0)):
        sides += 3 * (D + policy["intermediate_size"])
    return policy["num_hidden_layers"] * lora.rank * sides


def active_parameters(policy: dict) -> int:
    """Number of parameters that a token meets: of the experts only those that it picks, and no embedding."""
    experts = policy.get("num_experts") or policy.get("num_local_experts", 0)
    met = policy | {"vocab_size": 0}
    if experts:
        met |= {"num_experts": policy["num_experts_per_tok"], "num_local_experts": 0}
    return parameters(met) + policy["vocab_size"] * policy["hidden_size"]


def kv_bytes_per_token(policy: dict, element: int) -> int:
    """Bytes of the keys and values of one position.

    Args:
        element: bytes of one number.
    """
    H = policy.get("head_dim") or policy["hidden_size"] // policy["num_attention_heads"]
    return 2 * policy["num_hidden_layers"] * policy["num_key_value_heads"] * H * element


def eagle3_parameters(draft: dict) -> int:
    """Number of parameters of an EAGLE-3 draft, from its config.json."""
    D, H, heads, kv_heads = (
        draft[name] for name in ("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads")
    )
    attention = 2 * D * H * (heads + 2 * kv_heads) + heads * H * D
    return (
        3 * D * D
        + attention
        + 3 * D * draft["intermediate_size"]
        + 4 * D
        + D * (draft.get("draft_vocab_size") or draft["vocab_size"])
    )


def draft_parameters(method: str, draft: dict) -> int:
    """Number of parameters of a draft, from its config.json; for MTP without the head, which is the policy's."""
    if method == "eagle3":
        return eagle3_parameters(draft)
    if method == "mtp":
        D = draft["hidden_size"]
        return parameters(draft | {"num_hidden_layers": 1, "vocab_size": 0}) + 2 * D * D + 2 * D
    return parameters(draft)
