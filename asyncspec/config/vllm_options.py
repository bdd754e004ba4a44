"""engine.vllm: options of vLLM's engine that are handed on as they are. Imports no vLLM."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import yaml

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
OWN = (  # options that asyncspec needs as they are
    "skip_tokenizer_init",
    "generation_config",
    "override_generation_config",
    "logprobs_mode",
    "weight_transfer_config",
    "distributed_executor_backend",
    "per_request_spec_decode_metrics",
    "async_scheduling",
    "trust_remote_code",
    "pipeline_parallel_size",
    "data_parallel_size",
    "enable_sleep_mode",
    "enable_lora",
    "worker_cls",
    "scheduler_cls",
)


def parse(text: str) -> dict[str, Any]:
    """Return the options in a YAML mapping such as "{quantization: fp8, max_num_batched_tokens: 16384}".

    Raises:
        ValueError: it is no such mapping, or an option is set by asyncspec; the message says which.
    """
    if not text:
        return {}
    try:
        options = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"not readable as YAML: {str(getattr(error, 'problem', error)).splitlines()[0]}") from None
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise ValueError("expected a mapping in braces")
    for name in options:
        if name in GIVEN:
            raise ValueError(f"{name!r} follows from {GIVEN[name]}; set that")
        if name in OWN:
            raise ValueError(f"{name!r} is set by asyncspec")
    return options


def expert_parallel(config: Config) -> bool:
    """Whether each rank of a generator has some experts whole, instead of a part of each."""
    return bool(parse(config.engine.vllm).get("enable_expert_parallel"))


def known() -> list[str]:
    """Return the names of the installed vLLM's options, from its source, because importing it takes ten seconds; [] if
    it is not installed or its source has another form.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return []
    try:
        source = (Path(found.submodule_search_locations[0]) / "engine" / "arg_utils.py").read_text(encoding="utf-8")
    except OSError:
        return []
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"]
    fields = [node.target for each in classes for node in each.body if isinstance(node, ast.AnnAssign)]
    return [target.id for target in fields if isinstance(target, ast.Name) and not target.id.startswith("_")]
