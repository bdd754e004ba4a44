"""Refuses an engine.tensor_parallel by which vLLM cannot divide the policy, or the draft."""

from __future__ import annotations

from collections.abc import Iterator

from asyncspec.config import vllm_options
from asyncspec.config.schema import Config
from asyncspec.errors import ConfigError
from asyncspec.models.draft_shape import DraftShape
from asyncspec.models.shape import VOCABULARY_UNIT, PolicyShape

Shape = PolicyShape | DraftShape


def check(config: Config, whose: str, shape: Shape) -> None:
    """Check that the ranks of a generator divide a model evenly.

    Args:
        whose: "policy" or "draft".

    Raises:
        ConfigError: they do not.
    """
    parallel, whole_experts = config.engine.tensor_parallel, vllm_options.expert_parallel(config)
    if (expected := next(_wrong(whose, shape, parallel, whole_experts), "")) == "":
        return
    sizes = range(min(parallel, shape.n_heads), 0, -1)
    nearest = next(n for n in sizes if not any(_wrong(whose, shape, n, whole_experts)))
    raise ConfigError(
        f"engine.tensor_parallel={parallel}: expected {expected}; nearest valid choice: "
        f"engine.tensor_parallel={nearest}"
    )


def _wrong(whose: str, shape: Shape, parallel: int, whole_experts: bool) -> Iterator[str]:
    """Yield what would have to be true for this many ranks and is not."""
    if (experts := getattr(shape, "experts", None)) is not None:
        if whole_experts and experts.count % parallel:
            yield f"a divisor of the {whose}'s {experts.count} experts, which engine.vllm shares out"
        if not whole_experts and experts.hidden_dim % parallel:
            yield f"a divisor of {experts.hidden_dim}, the moe_intermediate_size of the {whose}"
    if shape.n_heads % parallel:
        yield f"a divisor of the {whose}'s {shape.n_heads} attention heads"
    # Ranks beyond the number of key-value heads hold copies of them.
    if shape.n_kv_heads % parallel and parallel % shape.n_kv_heads:
        yield f"a divisor or a multiple of the {whose}'s {shape.n_kv_heads} key-value heads"
    if shape.hidden_dim % parallel:
        yield f"a divisor of {shape.hidden_dim}, the {whose}'s intermediate_size"
    if (rounded := -(-shape.vocab_size // VOCABULARY_UNIT) * VOCABULARY_UNIT) % parallel:
        yield f"a divisor of {rounded}, the {whose}'s vocab_size rounded up to a multiple of {VOCABULARY_UNIT}"
