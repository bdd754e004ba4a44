"""Refuses values and combinations of values that cannot run, before anything starts."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from asyncspec.config import LONGEST_DRAFT, Config, ConfigError, default_of, first_line, resolve_path
from asyncspec.deadlines import COLLECTIVE_S
from asyncspec.faults import parse as parse_faults
from asyncspec.fields import closest, leaves, value_of
from asyncspec.models import CheckpointError
from asyncspec.models.shape import ARCHITECTURES, MTP_ARCHITECTURES, PolicyShape
from asyncspec.timing.delays import parse as parse_delays

# What a directory's architecture can draft as.
_DRAFTS = {
    "LlamaForCausalLMEagle3": "eagle3",
    **dict.fromkeys(MTP_ARCHITECTURES.values(), "mtp"),
    **dict.fromkeys(ARCHITECTURES.values(), "draft_model"),
}

# More than any run needs. Beyond it a number is a slip, which would be waited for without end or ask for more memory
# than there is.
_MOST = {
    "seed": 2**32 - 1,
    "draft.bytes_per_step": 10**12,
    "draft.window": 10**9,
    "mock.weights": 10**9,
    "trainer.tokens_per_pass": 10**9,
}
_MOST_COUNTED, _MOST_SECONDS, _MOST_MEASURED = 10**6, 1e7, 1e9


def check(config: Config) -> None:
    """Refuse values and combinations that cannot run, naming field, value, expectation and a valid choice."""

    def need(condition: bool, name: str, expected: str, nearest: Any) -> None:
        if not condition:
            raise ConfigError(
                f"{name}={value_of(config, name)!r}: expected {expected}; nearest valid choice: {name}={nearest}"
            )

    def choice(name: str, choices: tuple[str, ...]) -> None:
        value = value_of(config, name)
        need(value in choices, name, "one of " + ", ".join(choices), closest(str(value), choices) or default_of(name))

    def at_least(name: str, low: float) -> None:
        need(value_of(config, name) >= low, name, f"at least {low}", low)

    for name in leaves(dataclasses.asdict(config)):
        value = value_of(config, name)
        need(not isinstance(value, float) or math.isfinite(value), name, "a finite number", default_of(name))
        if type(value) in (int, float):
            most = _MOST.get(
                name,
                _MOST_COUNTED if isinstance(value, int) else _MOST_SECONDS if name.endswith("_s") else _MOST_MEASURED,
            )
            need(value <= most, name, f"at most {most}", most)
    for name in (
        "steps",
        "rl.groups_per_step",
        "deployment.generators",
        "deployment.logprobs",
        "engine.slots",
        "engine.max_prompt_tokens",
        "engine.threads",
        "trainer.threads",
        "trainer.tokens_per_pass",
        "trainer.ranks",
        "trainer.tensor_parallel",
        "logprob.threads",
        "logprob.ranks",
        "logprob.tensor_parallel",
        "draft.groups_per_step",
        "draft.publish_every",
        "draft.unroll",
        "draft.bytes_per_step",
        "sampling.max_response_tokens",
        "data.train_prompts",
        "checkpoint.keep",
    ):
        at_least(name, 1)
    for name in (
        "policy_lag",
        "seed",
        "draft.top_tokens",
        "draft.window",
        "data.eval_prompts",
        "trainer.optimizer.warmup_steps",
        "trainer.optimizer.weight_decay",
        "checkpoint.every",
        "deployment.replacements",
        "deployment.restarts",
        "deployment.standby",
    ):
        at_least(name, 0)
    for name in (
        "rl.clip_low",
        "rl.clip_high",
        "trainer.optimizer.eps",
        "trainer.optimizer.max_grad_norm",
        "draft.lr",
        "data.reward_timeout_s",
        "deployment.start_timeout_s",
        "deployment.stall_timeout_s",
        "deployment.turn_timeout_s",
        "deployment.stop_timeout_s",
    ):
        need(value_of(config, name) > 0, name, "more than 0", default_of(name))
    for name in ("trainer.optimizer.beta1", "trainer.optimizer.beta2"):
        need(0 <= value_of(config, name) < 1, name, "at least 0 and below 1", default_of(name))
    need(config.rl.clip_low < 1, "rl.clip_low", "below 1", default_of("rl.clip_low"))
    need(config.sampling.temperature >= 1e-3, "sampling.temperature", "at least 0.001 (rollouts are sampled)", 1.0)
    need(0 < config.sampling.top_p <= 1, "sampling.top_p", "more than 0 and at most 1", 1.0)
    at_least("sampling.top_k", 0)
    # the one compiler that writes no C++
    by_vllm_for_gpus = config.engine.kind == "vllm" and config.deployment.device == "cuda"
    need(
        not config.engine.compile or by_vllm_for_gpus or cxx_compiler() is not None,
        "engine.compile",
        "a C++ compiler on the PATH (g++, or the one CXX names)",
        "false",
    )
    try:
        parse_delays(config.deployment.delays)
    except ValueError as error:
        raise ConfigError(
            f"deployment.delays={config.deployment.delays!r}: {error}; expected for example generate=0.01,train=0.1"
        ) from None
    try:
        parse_faults(config.deployment.faults)
    except ValueError as error:
        raise ConfigError(
            f"deployment.faults={config.deployment.faults!r}: {error}; expected for example generator0:swap:2:kill"
        ) from None
    choice("engine.kind", ("torch", "vllm", "sglang", "mock"))
    choice("trainer.kind", ("torch", "mock"))
    kind = "mock" if config.engine.kind == "mock" else "torch"
    need(
        config.trainer.kind == kind,
        "trainer.kind",
        f"{kind} with engine.kind={config.engine.kind}: what one sends the other must be able to learn from",
        kind,
    )
    for name in ("time_scale", "token_s", "tokens_median", "tokens_sigma", "acceptance"):
        need(value_of(config, f"mock.{name}") > 0, f"mock.{name}", "more than 0", default_of(f"mock.{name}"))
    for name in ("gpus", "tokens_max", "token_unit", "weights"):
        at_least(f"mock.{name}", 1)
    for name in ("row_s", "draft_share", "draft_length", "logprob_s", "train_s", "prepare_s"):
        at_least(f"mock.{name}", 0)
    choice("model.dtype", ("float32", "bfloat16"))
    for who in ("trainer", "logprob"):
        ranks, parallel = value_of(config, f"{who}.ranks"), value_of(config, f"{who}.tensor_parallel")
        need(
            ranks % parallel == 0,
            f"{who}.tensor_parallel",
            f"a divisor of {who}.ranks={ranks}",
            math.gcd(ranks, parallel),
        )
    ranks, parallel = config.trainer.ranks, config.trainer.tensor_parallel
    need(
        ranks // parallel <= config.rl.groups_per_step,
        "trainer.ranks",
        f"at most {config.rl.groups_per_step} ranks that read different groups, as rl.groups_per_step",
        config.rl.groups_per_step * parallel,
    )
    plain = ranks == 1 and config.model.dtype == "float32"
    need(
        plain or config.draft_trainer != "trainer",
        "speculation.method",
        "another than mtp, which one rank in float32 trains with the policy; or draft.adapt=false",
        "eagle3",
    )
    choice("engine.kv_at_swap", ("keep", "recompute"))
    choice("speculation.method", ("eagle3", "mtp", "draft_model", "ngram", "suffix", "none"))
    choice("rl.advantage", ("group", "mean"))
    choice("rl.correction", ("truncated", "none"))
    choice("data.task", ("sums",))
    choice("deployment.device", ("auto", "cpu", "cuda"))
    need(bool(config.deployment.host), "deployment.host", "auto, or an address of this host", "auto")
    if config.drafting and config.speculation.draft_length != "auto":
        length = config.speculation.draft_length
        need(
            re.fullmatch("-?[0-9]{1,9}", length) is not None,
            "speculation.draft_length",
            "auto or a whole number",
            "auto",
        )
        need(
            int(length) >= 1,
            "speculation.draft_length",
            "at least 1 with a draft (speculation.method=none turns drafting off)",
            1,
        )
        need(int(length) <= 16, "speculation.draft_length", "at most 16", 16)
    need(
        0 < config.engine.gpu_memory_utilization <= 1,
        "engine.gpu_memory_utilization",
        "more than 0 and at most 1",
        default_of("engine.gpu_memory_utilization"),
    )
    if config.engine.kind == "vllm":
        need(
            config.speculation.method != "mtp",
            "speculation.method",
            "eagle3, draft_model, ngram, suffix or none with engine.kind=vllm",
            "eagle3",
        )
        need(
            not config.drafting or config.speculation.draft_length != "auto",
            "speculation.draft_length",
            "a whole number with engine.kind=vllm: its k is fixed",
            3,
        )
        need(config.sampling.temperature >= 0.01, "sampling.temperature", "at least 0.01 with engine.kind=vllm", 0.01)
    if config.engine.kind == "sglang":
        _check_sglang(config, need)
    need(config.rl.group_size >= 2, "rl.group_size", "at least 2: advantages compare rollouts of one prompt", 2)
    at_least("rl.kl_coef", 0)
    need(
        0 <= config.data.reward_failures <= 1, "data.reward_failures", "from 0 to 1", default_of("data.reward_failures")
    )
    at_least("deployment.silent_timeout_s", 1)
    patience = min(config.deployment.turn_timeout_s, COLLECTIVE_S)
    need(
        config.data.reward_timeout_s < patience,
        "data.reward_timeout_s",
        f"less than {patience:g}, deployment.turn_timeout_s or what a broadcast may take: a generator waits for each "
        f"reward",
        min(10.0, patience / 2),
    )
    at_least("eval.every", 0)
    at_least("eval.samples", 1)
    for name in ("trainer.optimizer.lr", "draft.lr"):
        need(0 < value_of(config, name) <= 1, name, "more than 0 and at most 1", default_of(name))
    need(config.rl.correction_cap >= 1, "rl.correction_cap", "at least 1", 1.0)
    for name, path in (
        ("model.path", config.model.path),
        ("model.reference_path", config.model.reference_path),
        ("speculation.draft_path", config.draft_directory),
    ):
        if path and not (resolve_path(path) / "config.json").is_file():
            raise ConfigError(
                f"{name}={path!r}: expected a Hugging Face directory, with config.json in it; put it there, or name "
                f"another" + (f"; {name}={default_of(name)} is the shipped one" if default_of(name) else "")
            )
    _check_models(config)
    _check_lengths(config)
    need(
        not config.data.eval_file or bool(config.data.train_file),
        "data.eval_file",
        f"data.train_file beside it: the task {config.data.task} holds out prompts of its own",
        "",
    )
    for name, path in (("data.train_file", config.data.train_file), ("data.eval_file", config.data.eval_file)):
        if path and not Path(path).is_file():
            raise ConfigError(f"{name}={path!r}: no such file; expected JSONL with prompt and answer on each line")


def _check_sglang(config: Config, need: Callable[[bool, str, str, Any], None]) -> None:
    """What an SGLang server can do for us, and where each generator has its own."""
    urls, count, kind = config.server_urls, config.deployment.generators, "with engine.kind=sglang"
    need(bool(urls), "engine.url", f"where each generator's server is {kind}", "http://127.0.0.1:30000")
    for url in urls:
        try:
            parts = urlsplit(url)
            held = (
                parts.scheme == "http"
                and bool(parts.hostname)
                and parts.port is not None
                and not parts.path.strip("/")
                and not parts.query
            )
        except ValueError:
            held = False
        need(
            held, "engine.url", "http://HOST:PORT, for several generators with commas between", "http://127.0.0.1:30000"
        )
    need(
        len(set(urls)) == len(urls),
        "engine.url",
        "a server of its own for each generator",
        ",".join(dict.fromkeys(urls)),
    )
    if len(urls) != count:
        raise ConfigError(
            f"engine.url={config.engine.url!r}: names {len(urls)} servers; expected {count}, one for each generator; "
            f"nearest valid choice: "
            f"deployment.generators={len(urls)}"
        )
    need(
        config.speculation.method in ("ngram", "none"),
        "speculation.method",
        f"ngram or none {kind}: it would load a policy's weights into a draft as well",
        "none",
    )
    need(
        not config.drafting or config.speculation.draft_length != "auto",
        "speculation.draft_length",
        f"a whole number {kind}: its k is fixed",
        3,
    )
    need(
        config.engine.kv_at_swap == "recompute",
        "engine.kv_at_swap",
        f"recompute {kind}: where it keeps the KV cache it does not say exactly which tokens are older than a swap",
        "recompute",
    )
    for name, whole in (("sampling.top_p", 1.0), ("sampling.top_k", 0)):
        need(
            value_of(config, name) == whole, name, f"{whole} {kind}: its logprobs are of the whole distribution", whole
        )


def cxx_compiler() -> str | None:
    """The C++ compiler that torch.compile would use."""
    return next(filter(None, map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++")))), None)


def _check_models(config: Config) -> None:
    """The policy must be one we know, and the draft what the method takes, made for this policy."""
    policy = _read_json("model.path", config.model.path)
    try:
        shape = PolicyShape.from_hf(resolve_path(config.model.path))
    except CheckpointError as error:
        raise ConfigError(
            f"model.path={config.model.path!r}: {first_line(error)}; "
            f"model.path={default_of('model.path')} is the shipped one"
        ) from None
    if not (resolve_path(config.model.path) / "tokenizer.json").is_file():
        raise ConfigError(
            f"model.path={config.model.path!r}: has no tokenizer.json; expected a Hugging Face directory with one"
        )
    if config.engine.kind == "torch" and config.engine.compile and shape.experts is not None:
        raise ConfigError(
            "engine.compile=True: expected a policy without experts; nearest valid choice: engine.compile=false"
        )
    heads = shape.n_kv_heads
    for name in ("trainer.tensor_parallel", "logprob.tensor_parallel"):
        parallel = value_of(config, name)
        # torchtitan's mixture then asks for passes over as many samples as divide by it
        if parallel > 1 and shape.experts is not None:
            raise ConfigError(f"{name}={parallel}: expected 1 with a policy of experts; nearest valid choice: {name}=1")
        if heads % parallel:
            raise ConfigError(
                f"{name}={parallel}: expected a divisor of the policy's {heads} heads of keys and values; nearest "
                f"valid choice: "
                f"{name}={math.gcd(heads, parallel)}"
            )
    if config.engine.kind in ("vllm", "sglang") and policy.get("num_nextn_predict_layers"):
        raise ConfigError(
            f"model.path={config.model.path!r}: holds an MTP module too; expected a policy without one with "
            f"engine.kind={config.engine.kind}; nearest valid choice: engine.kind=torch"
        )
    if config.model.reference_path and config.rl.kl_coef > 0:
        found = _read_json("model.reference_path", config.model.reference_path).get("vocab_size")
        if found != shape.vocab_size:
            raise ConfigError(
                f"model.reference_path={config.model.reference_path!r}: made for vocab_size={found}; expected "
                f"{shape.vocab_size}, as the "
                "policy of model.path has; nearest valid choice: model.reference_path=, which is that policy"
            )
    method, directory = config.speculation.method, config.draft_directory
    if not directory:
        return
    draft = _read_json("speculation.draft_path", directory)
    found = (draft.get("architectures") or ["?"])[0]
    fits = _DRAFTS.get(str(found), "?")
    # A policy's own checkpoint may hold its MTP module.
    if method != fits and (method, fits) != ("mtp", "draft_model"):
        nearest = (
            f"speculation.method={fits}"
            if fits != "?"
            else f"speculation.draft_path={default_of('speculation.draft_path')}"
        )
        raise ConfigError(
            f"speculation.draft_path={directory!r}: holds a {found}, which speculation.method={method} does not take; "
            f"nearest valid choice: {nearest}"
        )
    for key in {"draft_model": ("vocab_size",), "mtp": ("model_type", "vocab_size", "hidden_size")}.get(
        method, ("vocab_size", "hidden_size")
    ):
        if draft.get(key) != policy.get(key):
            raise ConfigError(
                f"speculation.draft_path={directory!r}: made for {key}={draft.get(key)}; expected {policy.get(key)}, "
                f"as the policy of model.path has; speculation.method=ngram needs no draft"
            )


def _read_json(name: str, path: str) -> dict:
    file = resolve_path(path) / "config.json"
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}={path!r}: {file}: {first_line(error)}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{name}={path!r}: {file}: expected an object")
    return content


def _check_lengths(config: Config) -> None:
    """Prompt, response and proposals must fit the positions the policy knows."""
    positions = _read_json("model.path", config.model.path).get("max_position_embeddings")
    if not isinstance(positions, int):
        raise ConfigError(
            f"model.path={config.model.path!r}: config.json has no max_position_embeddings; expected a number"
        )
    length = config.speculation.draft_length
    drafted = 0 if not config.drafting else 1 + (LONGEST_DRAFT if length == "auto" else int(length))
    room = positions - config.engine.max_prompt_tokens - drafted
    if room < 1:
        rest = positions - drafted - config.sampling.max_response_tokens
        nearest = rest if rest > 0 else (positions - drafted) // 2
        raise ConfigError(
            f"engine.max_prompt_tokens={config.engine.max_prompt_tokens}: leaves no room for a response: the policy "
            f"has {positions} positions; nearest valid choice: engine.max_prompt_tokens={nearest}"
        )
    if config.sampling.max_response_tokens > room:
        raise ConfigError(
            f"sampling.max_response_tokens={config.sampling.max_response_tokens}: expected at most {room}: the "
            f"policy has {positions} positions, prompts take up to {config.engine.max_prompt_tokens}; nearest valid "
            f"choice: sampling.max_response_tokens={room}"
        )
