"""engine.vllm: options of vLLM's engine that are handed on as they are. Imports no vLLM."""

from __future__ import annotations

from typing import Any

import yaml

from asyncspec.config.fields import closest
from asyncspec.config.schema import Config

GIVEN = {  # options that follow from other fields, and these
    "model": "model.path",
    "dtype": "model.dtype",
    "seed": "seed",
    "tensor_parallel_size": "engine.tensor_parallel",
    "max_num_seqs": "engine.slots",
    "max_model_len": "engine.max_prompt_tokens and sampling.max_response_tokens",
    "enforce_eager": "engine.compile",
    "gpu_memory_utilization": "engine.gpu_memory_utilization",
    "speculative_config": "speculation.method",
    "spec_method": "speculation.method",
    "spec_model": "speculation.draft_path",
    "spec_tokens": "speculation.draft_length",
}
PASSED = (  # options that change how vLLM computes and schedules, and neither what it samples nor who takes part
    "quantization",
    "quantization_config",
    "allow_deprecated_quantization",
    "kv_cache_dtype",
    "kv_cache_dtype_skip_layers",
    "hf_overrides",
    "attention_backend",
    "attention_config",
    "disable_cascade_attn",
    "linear_backend",
    "moe_backend",
    "all2all_backend",
    "enable_expert_parallel",
    "kernel_config",
    "enable_flashinfer_autotune",
    "compilation_config",
    "cudagraph_capture_sizes",
    "max_cudagraph_capture_size",
    "optimization_level",
    "performance_mode",
    "use_fp64_gumbel",
    "max_num_batched_tokens",
    "max_num_scheduled_tokens",
    "long_prefill_token_threshold",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "prefix_caching_hash_algo",
    "block_size",
    "num_gpu_blocks_override",
    "kv_cache_memory_bytes",
    "safetensors_load_strategy",
)
NOT_ON_CPUS = {  # options that vLLM 0.32 cannot have on a CPU -> what it does
    "enable_expert_parallel": "crashes",
    "enable_chunked_prefill": "discards samples",
}


def parse(text: str) -> dict[str, Any]:
    """Return the options in a YAML mapping such as "{quantization: fp8, max_num_batched_tokens: 16384}".

    Raises:
        ValueError: it is no such mapping, or an option is not passed on; the message says which.
    """
    if not text:
        return {}
    form = "expected a mapping in braces, for example {quantization: fp8}"
    try:
        options = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:  # its constructors raise the others
        problem = str(getattr(error, "problem", "") or error).splitlines()[0]
        raise ValueError(f"not readable as YAML: {problem}; {form}") from None
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise ValueError(form)
    for name in options:
        if name in GIVEN:
            raise ValueError(f"{name!r} follows from {GIVEN[name]}; set that instead")
        if name not in PASSED:
            raise ValueError(f"{name!r} is not passed on; expected " + _nearest(name))
    if not isinstance(options.get("hf_overrides", {}), dict):
        raise ValueError("hf_overrides: expected a mapping, for example {hf_overrides: {rope_theta: 1e6}}")
    return options


def _nearest(name: str) -> str:
    """Return the option whose name is most similar to `name`, or all of them in one line."""
    return closest(name, PASSED) or f"one of {', '.join(PASSED)}"


def not_on_cpus(config: Config) -> str:
    """Return what is wrong with the options on a CPU, in one line; "" if nothing is."""
    options = parse(config.engine.vllm)
    wrong = next((name for name in NOT_ON_CPUS if options.get(name)), "")
    if not wrong:
        return ""
    rest = ", ".join(f"{name}: {value}" for name, value in options.items() if name != wrong)
    return (
        f"engine.vllm={config.engine.vllm!r}: with {wrong} vLLM 0.32 {NOT_ON_CPUS[wrong]} on a CPU; expected a GPU, or "
        f"options without it; nearest valid choice: engine.vllm='{f'{{{rest}}}' if rest else ''}'"
    )


def expert_parallel(config: Config) -> bool:
    """Whether each rank of a generator has some experts whole, instead of a part of each."""
    return bool(parse(config.engine.vllm).get("enable_expert_parallel"))
