"""Refuses policies, references and drafts that do not fit the configuration, or each other."""

from __future__ import annotations

import math

from asyncspec.config import check_division
from asyncspec.config.fields import value_of
from asyncspec.config.paths import resolve_path
from asyncspec.config.schema import Config, default_of
from asyncspec.errors import ConfigError, first_line
from asyncspec.models import CheckpointError
from asyncspec.models.draft_shape import DraftShape
from asyncspec.models.headers import read_json
from asyncspec.models.shape import ARCHITECTURES, MTP_ARCHITECTURES, PolicyShape

# The speculation.method that each architecture in a draft's config.json serves.
_DRAFTS = {
    "LlamaForCausalLMEagle3": "eagle3",
    **dict.fromkeys(MTP_ARCHITECTURES.values(), "mtp"),
    **dict.fromkeys(ARCHITECTURES.values(), "draft_model"),
}


def check_models(config: Config) -> None:
    """Check that the policy has a supported architecture and divides among the ranks as configured."""
    policy = _read_json("model.path", config.model.path)
    shape = _shape("model.path", config.model.path, config.model.backend)
    if not (resolve_path(config.model.path) / "tokenizer.json").is_file():
        raise ConfigError(
            f"model.path={config.model.path!r}: there is no tokenizer.json; expected a Hugging Face directory with one"
        )
    heads = shape.n_kv_heads
    for name in ("trainer.tensor_parallel", "logprob.tensor_parallel"):
        parallel = value_of(config, name)
        # Under tensor parallelism, torchtitan's mixture of experts needs a number of samples that the ranks divide.
        if parallel > 1 and shape.experts is not None:
            raise ConfigError(
                f"{name}={parallel}: expected 1 with a mixture-of-experts policy; nearest valid choice: {name}=1"
            )
        if heads % parallel:
            raise ConfigError(
                f"{name}={parallel}: expected a divisor of the policy's {heads} key-value heads; nearest valid choice: "
                f"{name}={math.gcd(heads, parallel)}"
            )
    for name in ("trainer.expert_parallel", "logprob.expert_parallel"):
        parallel, count = value_of(config, name), 1 if shape.experts is None else shape.experts.count
        if count % parallel:
            expected = f"a divisor of the policy's {count} experts" if shape.experts else "1: the policy has no experts"
            raise ConfigError(
                f"{name}={parallel}: expected {expected}; nearest valid choice: {name}={math.gcd(count, parallel)}"
            )
    if config.rl.routing_replay and (shape.experts is None or config.engine.kind != "torch"):
        if shape.experts is None:
            why, nearest = "the policy has no experts; expected False", "rl.routing_replay=false"
        else:
            why = f"engine.kind={config.engine.kind} does not tell its experts; expected the embedded engine with it"
            nearest = "engine.kind=torch, or rl.routing_replay=false"
        raise ConfigError(f"rl.routing_replay=True: {why}; nearest valid choice: {nearest}")
    check_division.check(config, "policy", shape)
    _check_backend(config)
    _check_adapters(config, shape)
    if config.engine.kind in ("vllm", "sglang") and policy.get("num_nextn_predict_layers"):
        raise ConfigError(
            f"model.path={config.model.path!r}: also contains an MTP module; expected a policy without one with "
            f"engine.kind={config.engine.kind}; nearest valid choice: engine.kind=torch"
        )
    _check_reference(config, shape)
    _check_draft(config, policy, shape)


def _check_backend(config: Config) -> None:
    """Check that nothing is asked of transformers that only torchtitan's models do."""
    if config.model.backend != "transformers":
        return
    lookups = ("none", "ngram", "suffix")
    for name, value, fits, expected, nearest in (
        ("engine.kind", config.engine.kind, config.engine.kind in ("vllm", "sglang"), "vllm or sglang", "vllm"),
        (
            "speculation.method",
            config.speculation.method,
            config.speculation.method in lookups,
            "none, ngram or suffix",
            "ngram",
        ),
        ("trainer.tensor_parallel", config.trainer.tensor_parallel, config.trainer.tensor_parallel == 1, "1", "1"),
        ("logprob.tensor_parallel", config.logprob.tensor_parallel, config.logprob.tensor_parallel == 1, "1", "1"),
        ("trainer.context_parallel", config.trainer.context_parallel, config.trainer.context_parallel == 1, "1", "1"),
        ("trainer.compile", config.trainer.compile, not config.trainer.compile, "false", "false"),
        ("model.lora.rank", config.model.lora.rank, not config.model.lora.rank, "0", "0"),
    ):
        if not fits:
            raise ConfigError(
                f"{name}={value!r}: expected {expected} with model.backend=transformers; nearest valid choice: "
                f"{name}={nearest}"
            )


def _check_adapters(config: Config, shape: PolicyShape) -> None:
    if (lora := config.lora) is None:
        if not config.checkpoint.export_merged:
            raise ConfigError(
                "checkpoint.export_merged=False: there are no adapters to export alone (model.lora.rank=0); expected "
                "True; nearest valid choice: checkpoint.export_merged=true"
            )
        return
    if config.trainer.kind == "mock":
        raise ConfigError(
            f"model.lora.rank={lora.rank}: expected 0 with trainer.kind=mock; nearest valid choice: model.lora.rank=0"
        )
    heads = shape.dim if lora.targets == "mlp" else shape.head_dim * shape.n_heads
    least = min(shape.dim, heads, shape.dim if shape.experts or lora.targets == "attention" else shape.hidden_dim)
    if lora.rank > least:
        raise ConfigError(
            f"model.lora.rank={lora.rank}: expected at most {least}, the shorter side of the policy's matrices; "
            f"nearest valid choice: model.lora.rank={least}"
        )
    if lora.targets == "mlp" and shape.experts is not None:
        raise ConfigError(
            "model.lora.target_modules='mlp': the experts of a mixture have no adapters; expected attention or "
            "all-linear; nearest valid choice: model.lora.target_modules=attention"
        )
    if not config.checkpoint.export_merged and config.draft_trainer == "trainer":
        raise ConfigError(
            "checkpoint.export_merged=False: the policy's MTP module, which speculation.method=mtp trains, is written "
            "with the policy only; expected True; nearest valid choice: checkpoint.export_merged=true"
        )


def _check_reference(config: Config, policy: PolicyShape) -> None:
    if config.model.reference_path and config.rl.kl_coef > 0:
        shape = _shape("model.reference_path", config.model.reference_path, config.model.backend)
        found = shape.vocab_size
        if found != policy.vocab_size:
            raise ConfigError(
                f"model.reference_path={config.model.reference_path!r}: has vocab_size={found}; expected "
                f"{policy.vocab_size}, as in model.path; nearest valid choice: model.reference_path=, which "
                "takes the policy of model.path"
            )
        needed = config.engine.max_prompt_tokens + config.sampling.max_response_tokens
        if (positions := shape.longest) < needed:
            raise ConfigError(
                f"model.reference_path={config.model.reference_path!r}: has {positions} positions; expected at least "
                f"{needed}, for prompt and response; nearest valid choice: sampling.max_response_tokens="
                f"{max(1, positions - config.engine.max_prompt_tokens)}"
            )


def _shape(name: str, path: str, backend: str) -> PolicyShape:
    """Return the shape of a policy that a field names."""
    try:
        return PolicyShape.from_hf(resolve_path(path), backend)
    except CheckpointError as error:
        shipped = f"; {name}={default_of(name)} is the shipped one" if default_of(name) else ""
        raise ConfigError(f"{name}={path!r}: {first_line(error)}{shipped}") from None


def _check_draft(config: Config, policy: dict, shape: PolicyShape) -> None:
    """Check that the draft fits the method and was made for this policy."""
    method, directory = config.speculation.method, config.draft_directory
    if not directory:
        return
    draft = _read_json("speculation.draft_path", directory)
    architectures = draft.get("architectures")
    found = architectures[0] if isinstance(architectures, list) and architectures else architectures or "?"
    fits = _DRAFTS.get(str(found), "?")
    # The checkpoint of a policy may contain its MTP module.
    if method != fits and (method, fits) != ("mtp", "draft_model"):
        nearest = (
            f"speculation.method={fits}"
            if fits != "?"
            else f"speculation.draft_path={default_of('speculation.draft_path')}"
        )
        raise ConfigError(
            f"speculation.draft_path={directory!r}: contains a {found}; expected a draft for "
            f"speculation.method={method}; nearest valid choice: {nearest}"
        )
    keys = {"draft_model": ("vocab_size",), "mtp": ("model_type", "vocab_size", "hidden_size")}
    for key in keys.get(method, ("vocab_size", "hidden_size")):
        if draft.get(key) != policy.get(key):
            raise ConfigError(
                f"speculation.draft_path={directory!r}: made for {key}={draft.get(key)}; expected {policy.get(key)}, "
                f"as in model.path; speculation.method=ngram needs no draft"
            )
    if method == "mtp":
        return
    try:
        path = resolve_path(directory)
        own = DraftShape.from_hf(path, shape) if method == "eagle3" else PolicyShape.from_hf(path)
    except CheckpointError as error:
        raise ConfigError(
            f"speculation.draft_path={directory!r}: {first_line(error)}; speculation.method=ngram needs no draft"
        ) from None
    check_division.check(config, "draft", own)


def _read_json(name: str, path: str) -> dict:
    try:
        return read_json(resolve_path(path) / "config.json")
    except CheckpointError as error:
        raise ConfigError(f"{name}={path!r}: {first_line(error)}") from None


def check_lengths(config: Config) -> None:
    """Check that prompt, response and proposed tokens fit the policy's max_position_embeddings."""
    positions = _shape("model.path", config.model.path, config.model.backend).longest
    drafted = 1 + config.longest_draft if config.drafting else 0
    room = positions - config.engine.max_prompt_tokens - drafted
    if room < 1:
        rest = positions - drafted - config.sampling.max_response_tokens
        nearest = rest if rest > 0 else (positions - drafted) // 2
        raise ConfigError(
            f"engine.max_prompt_tokens={config.engine.max_prompt_tokens}: leaves no room for a response; expected "
            f"less, since the policy has {positions} positions; nearest valid choice: "
            f"engine.max_prompt_tokens={nearest}"
        )
    if config.sampling.max_response_tokens > room:
        raise ConfigError(
            f"sampling.max_response_tokens={config.sampling.max_response_tokens}: expected at most {room}, since the "
            f"policy has {positions} positions and prompts take up to {config.engine.max_prompt_tokens}; nearest valid "
            f"choice: sampling.max_response_tokens={room}"
        )
