"""What one pass of a trainer or a logprob actor holds, in bytes: activations, logits, and weights that are gathered.

What a pass keeps was counted from the tensors that torch saves, on CPUs and on a GPU.
"""

from __future__ import annotations

from asyncspec.config import Config
from asyncspec.models import HEAD_ROWS
from asyncspec.models.sizes import parameters

FLOAT = 4


def bytes_of(config: Config) -> int:
    """Bytes of a number in `model.dtype`, in which weights travel and passes compute."""
    return FLOAT if config.model.dtype == "float32" else 2


def layer_parameters(policy: dict, tensor_parallel: int = 1, expert_parallel: int = 1) -> float:
    """Number of parameters of one layer, as far as ranks divide them before FSDP does."""
    layer = parameters(policy | {"num_hidden_layers": 1, "vocab_size": 0}) - policy["hidden_size"]
    count = policy.get("num_experts") or policy.get("num_local_experts", 0)
    experts = 3 * policy["hidden_size"] * policy["moe_intermediate_size"] * count if count else 0
    return (layer - experts) / tensor_parallel + experts / max(tensor_parallel, expert_parallel)


def whole_in_a_pass(config: Config, policy: dict) -> float:
    """Bytes of weights and gradients that a trainer rank's pass holds whole at most, in the head or in a layer. A rank
    alone, in float32, has all its weights whole, and only the gradient of its head twice.
    """
    trainer, element, frozen = config.trainer, bytes_of(config), config.lora is not None
    embedding = policy["vocab_size"] * policy["hidden_size"] / trainer.tensor_parallel
    if trainer.ranks == 1 and element == FLOAT:
        return 0.0 if frozen else FLOAT * embedding
    layer = layer_parameters(policy, trainer.tensor_parallel, trainer.expert_parallel)
    tied = bool(policy.get("tie_word_embeddings"))
    # The head: its weights, its gradient, and what is sent to add it up, all in float32. A layer: its weights, those of
    # the next one, and its gradient, which is added up in float32. A tied embedding stays beside it.
    if frozen:
        return max(element * embedding, 2 * element * layer + tied * element * embedding)
    return max(3 * FLOAT * embedding, (3 * element + FLOAT) * layer + tied * 2 * FLOAT * embedding)


def activations(policy: dict, element: int, tokens: float, recompute: bool = False, cpu: bool = False) -> float:
    """Bytes that a packed pass keeps for its backward pass, without the head.

    Args:
        element: bytes of one number.
        tokens: tokens of the pass.
        recompute: whether each layer keeps its input alone; then one layer's numbers exist at once.
        cpu: whether it computes on a CPU, where norms and products of 16 bits keep more.
    """
    D, H = policy["hidden_size"], policy.get("head_dim") or policy["hidden_size"] // policy["num_attention_heads"]
    queries, keys = H * policy["num_attention_heads"], H * policy["num_key_value_heads"]
    mixture = policy.get("num_experts") or policy.get("num_local_experts")
    width = policy["moe_intermediate_size"] * policy["num_experts_per_tok"] if mixture else policy["intermediate_size"]
    layers, rest = policy["num_hidden_layers"], 0.0
    of_token = element * (4 * D + 3 * queries + 3 * keys + 3 * width)
    if cpu:
        normed = str(policy.get("model_type", "")).startswith("qwen3")  # queries and keys
        picked = 2 * policy["num_experts_per_tok"] * D if mixture else 0
        if element == FLOAT:
            of_token = FLOAT * ((6 * D + 4 * width + 2 * H + picked) + (5 if normed else 3) * queries)
            of_token += FLOAT * (6 if normed else 4) * keys
        else:
            of_token = 20 * D + 8 * width + 8 * H + 2 * picked + (14 if normed else 6) * queries
            of_token += (16 if normed else 8) * keys
        rest = tokens * D * (12 if element == FLOAT else 10)
    layer = tokens * of_token
    return (layers * element * tokens * D + layer if recompute else layers * layer) + rest


def head(
    policy: dict, element: int, parts: int, trained: bool = True, entropy: bool = False, tokens: float = HEAD_ROWS
) -> float:
    """Bytes of the logits that exist at once and, if the head is trained, of its gradient before it is added up.

    Args:
        element: bytes of a number of the weights.
        parts: the number of ranks that divide the vocabulary.
        entropy: whether entropies are computed too.
        tokens: of the pass; at most HEAD_ROWS exist at once.
    """
    V = policy["vocab_size"] / parts
    logits = min(HEAD_ROWS, tokens) * V * ((2 + entropy) * FLOAT + (element if element < FLOAT else 0))
    return logits + FLOAT * V * policy["hidden_size"] * trained
