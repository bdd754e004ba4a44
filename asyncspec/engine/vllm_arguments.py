"""The arguments with which vLLM's engine is made, from a configuration. Import it after `vllm_process.prepare`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from vllm.config import WeightTransferConfig
from vllm.engine.arg_utils import EngineArgs

from asyncspec.config import Config, vllm_options, work
from asyncspec.drafts.draft import Draft
from asyncspec.engine import vllm_transfer
from asyncspec.errors import ConfigError
from asyncspec.models.policy import PolicyShape

# Positions in a KV cache block: the fewest that vLLM's CPU attention allows, so that short prompts are shared too.
CPU_BLOCK = 32
BATCHED_TOKENS = 8192  # the most tokens of a step, unless one sequence is longer; the rest waits for the next step


class Given(NamedTuple):
    """What the arguments follow from."""

    config: Config
    shape: PolicyShape
    draft: Draft | None
    paths: Mapping[str, Path]  # directories of "policy" and "draft" that vLLM reads
    factors: Mapping[str, int]  # by which the heads of "policy" and "draft" are widened
    ranks: int
    cpu: bool

    @property
    def positions(self) -> int:
        """The most positions of a sequence, with its proposals."""
        config = self.config
        return config.engine.max_prompt_tokens + config.sampling.max_response_tokens + config.longest_draft + 1


def make(given: Given) -> EngineArgs:
    """Return the engine's arguments."""
    config = given.config
    options = {
        "max_num_batched_tokens": max(
            BATCHED_TOKENS, given.positions, config.engine.slots * (config.longest_draft + 1)
        ),
        "enable_prefix_caching": True,
        **_of_device(given),
        **_of_ranks(given),
        **vllm_options.parse(config.engine.vllm),
    }
    if config.model.dtype == "bfloat16":  # logits in float32, as the trainer and the logprob actors compute them
        options["hf_overrides"] = {"head_dtype": "float32"} | dict(options.get("hf_overrides") or {})
    return EngineArgs(
        model=str(given.paths["policy"]),
        skip_tokenizer_init=True,
        generation_config="vllm",
        max_model_len=given.positions,
        max_num_seqs=config.engine.slots,
        async_scheduling=None,  # as vLLM does by itself: with drafts and without, on GPUs
        enforce_eager=not config.engine.compile,
        speculative_config=_speculative(given),
        per_request_spec_decode_metrics="detailed" if config.drafting else "none",
        logprobs_mode="processed_logprobs",
        weight_transfer_config=WeightTransferConfig(backend=vllm_transfer.NAME),
        disable_log_stats=True,
        seed=config.seed,
        dtype=config.model.dtype,
        **options,
    )


def _speculative(given: Given) -> dict[str, Any] | None:
    config, k = given.config, given.config.longest_draft
    if not config.drafting:
        return None
    options: dict[str, Any] = {"method": config.speculation.method, "num_speculative_tokens": k}
    if config.fixed_draft_length is None:
        options["num_speculative_tokens_per_batch_size"] = [(1, config.engine.slots, k)]
    if given.draft is not None:
        options |= {"model": str(given.paths["draft"]), "draft_sample_method": "probabilistic"}
    elif config.speculation.method == "ngram":
        options |= {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
    return options


def _of_device(given: Given) -> dict[str, Any]:
    if not given.cpu:
        return {"gpu_memory_utilization": given.config.engine.gpu_memory_utilization}
    return {
        "block_size": CPU_BLOCK,
        "kv_cache_memory_bytes": _kv_cache_bytes(given),
        # When it prefills a prompt in chunks, vLLM 0.32 discards samples and rewinds the random generator, which it
        # cannot do on CPUs.
        "enable_chunked_prefill": False,
    }


def _of_ranks(given: Given) -> dict[str, Any]:
    if given.ranks == 1:
        return {}
    # Ranks start at different times. A rank that dies closes its connections, so the others need no deadline.
    timeout_s = int(work.start_s(given.config))
    return {
        "tensor_parallel_size": given.ranks,
        "distributed_executor_backend": "external_launcher",
        # vLLM's own all-reduce takes rank r to compute on GPU r of the host.
        "disable_custom_all_reduce": True,
        "distributed_timeout_seconds": timeout_s,
        "cpu_distributed_timeout_seconds": timeout_s,
    }


def _kv_cache_bytes(given: Given) -> int:
    """Return the bytes that `slots` sequences take on a rank in float32, with one block more each for proposals.
    bfloat16 needs half of that.
    """

    def layer_bytes(shape, kind: str) -> int:
        return 2 * max(1, shape.n_kv_heads // given.ranks) * shape.head_dim * given.factors[kind] * 4

    a_position = given.shape.n_layers * layer_bytes(given.shape, "policy")
    if given.draft is not None:
        a_position += getattr(given.draft.shape, "n_layers", 1) * layer_bytes(given.draft.shape, "draft")
    return a_position * CPU_BLOCK * (2 + given.config.engine.slots * (2 + given.positions // CPU_BLOCK))


@contextmanager
def blamed(config: Config) -> Iterator[None]:
    """Name engine.vllm, if it is set, in what vLLM raises about its arguments.

    Raises:
        ConfigError: vLLM refuses engine.vllm.
    """
    try:
        yield
    except (ValueError, TypeError, NotImplementedError) as error:
        if not config.engine.vllm:
            raise
        raise ConfigError(
            f"engine.vllm={config.engine.vllm!r}: vLLM refuses it: {_reason(error)}; expected other values, as vLLM's "
            "engine arguments describe them"
        ) from error


def _reason(error: Exception) -> str:
    """Return why vLLM refuses its arguments, in one line. Its configuration classes give the reason in the second."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    found = lines[0] if len(lines) == 1 or " validation error" not in lines[0] else " ".join(lines[1:3])
    return found.partition(" [type=")[0].replace("Value error, ", "")[:300].rstrip(".")
