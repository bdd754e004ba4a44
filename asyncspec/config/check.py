"""Refuse configurations that cannot run, before anything starts.

The bounds and choices of a single field are in its metadata (schema.py). This file checks combinations of fields, and
that the files exist which the fields name. The files check_*.py check the rest.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import shutil
from collections.abc import Callable
from itertools import chain
from typing import Any
from urllib.parse import urlsplit

from asyncspec.config import (
    check_environment,
    check_evaluation,
    check_learning,
    check_logging,
    check_models,
    eval_sets,
    vllm_options,
)
from asyncspec.config.fields import describe, refusal, value_of
from asyncspec.config.hub import DATA_FORM
from asyncspec.config.paths import data_files, resolve_path, sources
from asyncspec.config.schema import Config, default_of
from asyncspec.config.sections import REWARDS
from asyncspec.errors import ConfigError
from asyncspec.faults import parse as parse_faults
from asyncspec.models.chat import parse_variables
from asyncspec.timing.delays import parse as parse_delays
from asyncspec.wire.addresses import parse_ports

_ACTOR = re.compile(r"(controller|trainer|logprob\d*|generator\d+|draft_adapter)(_rank\d+)?(\.\d+)?")
CXX = "a C++ compiler on the PATH (g++, or the one CXX names)"


def check_values(config: Config) -> None:
    """Refuse values and combinations that cannot run, whatever the files are.

    Raises:
        ConfigError: one line that names the field, its value, what was expected and a valid choice.
    """
    for name, default, metadata in describe(Config):
        if refused := refusal(value_of(config, name), default, metadata, name.endswith("_s")):
            _need(config, False, name, *refused)
    for part in (_check_notations, _check_ranks, _check_engine, _check_rewards):
        part(config)
    parts = check_environment, check_learning, check_evaluation, check_logging
    for rule in chain(*(part.rules(config) for part in parts)):
        _need(config, *rule)


def check_files(config: Config) -> None:
    """Refuse models and data that do not exist, or do not fit the configuration.

    Raises:
        ConfigError: as for `check_values`.
    """
    for part in (_check_names, check_models.check_models, check_models.check_lengths):
        part(config)


def _need(config: Config, held: bool, name: str, expected: str, nearest: Any) -> None:
    if not held:
        raise ConfigError(
            f"{name}={value_of(config, name)!r}: expected {expected}; nearest valid choice: {name}={nearest}"
        )


def _check_notations(config: Config) -> None:
    """Check the fields whose text has its own notation."""
    for name, parse, example in (
        ("deployment.delays", parse_delays, "generate=0.01,train=0.1"),
        ("deployment.faults", parse_faults, "generator0:swap:2:kill"),
        ("deployment.ports", parse_ports, "29600-29699"),
        ("data.template_variables", parse_variables, "enable_thinking=false"),
        ("engine.vllm", vllm_options.parse, ""),
    ):
        text = value_of(config, name)
        try:
            parse(text)
        except ValueError as error:
            shown = f"; for example {example}" if example else ""
            raise ConfigError(f"{name}={text!r}: {error}{shown}") from None
    delays, faults = config.deployment.delays, config.deployment.faults
    _check_actors("deployment.delays", delays, [actor for actor, _, _ in parse_delays(delays) if actor])
    _check_actors("deployment.faults", faults, [actor for actor, _, _, _ in parse_faults(faults)])
    _need(config, bool(config.deployment.host), "deployment.host", "auto, or an address of this host", "auto")
    if config.drafting and config.speculation.draft_length != "auto":
        name, text = "speculation.draft_length", config.speculation.draft_length
        _need(config, re.fullmatch("-?[0-9]{1,9}", text) is not None, name, "auto or a whole number", "auto")
        expected = "at least 1 with a draft (speculation.method=none turns drafting off)"
        _need(config, int(text) >= 1, name, expected, 1)
        _need(config, int(text) <= 16, name, "at most 16", 16)


def _check_actors(name: str, text: str, actors: list[str]) -> None:
    """Check the names of actors in a field. How many actors there are, a launcher may decide later."""
    for actor in actors:
        if not _ACTOR.fullmatch(actor):
            near = difflib.get_close_matches(actor, ("controller", "trainer", "generator0", "logprob"), 1, 0.0)[0]
            raise ConfigError(f"{name}={text!r}: {actor!r}: expected the name of an actor; nearest: {near}")


def _check_ranks(config: Config) -> None:
    for who in ("trainer", "logprob"):
        ranks, parallel = value_of(config, f"{who}.ranks"), value_of(config, f"{who}.tensor_parallel")
        expected, nearest = f"a divisor of {who}.ranks={ranks}", math.gcd(ranks, parallel)
        _need(config, ranks % parallel == 0, f"{who}.tensor_parallel", expected, nearest)
    ranks, parallel, groups = config.trainer.ranks, config.trainer.tensor_parallel, config.rl.groups_per_step
    sharing, most = config.trainer.context_parallel, ranks // parallel
    expected = f"a divisor of {most} (trainer.ranks={ranks}, trainer.tensor_parallel={parallel})"
    _need(config, most % sharing == 0, "trainer.context_parallel", expected, math.gcd(most, sharing))
    in_16_bits = sharing == 1 or config.deployment.device != "cuda" or config.model.dtype == "bfloat16"
    _need(config, in_16_bits, "model.dtype", "bfloat16 with trainer.context_parallel on GPUs", "bfloat16")
    parallel *= sharing
    expected = f"at most {groups} data-parallel ranks, one for each of rl.groups_per_step"
    _need(config, ranks // parallel <= groups, "trainer.ranks", expected, groups * parallel)
    replicas, data = config.trainer.replicas, ranks // parallel
    expected = f"a divisor of {data}, the number of data-parallel ranks"
    _need(config, data % replicas == 0, "trainer.replicas", expected, math.gcd(replicas, data))
    for who, each in ("trainer", ranks // replicas), ("logprob", config.logprob.ranks):
        sharing = value_of(config, f"{who}.expert_parallel")
        expected = f"a divisor of {each}, the ranks that hold a copy of the policy ({who}.ranks="
        expected += f"{value_of(config, f'{who}.ranks')})"
        _need(config, each % sharing == 0, f"{who}.expert_parallel", expected, math.gcd(each, sharing))
    if config.trainer.compile and config.deployment.device != "cuda":  # on GPUs it generates no C++
        _need(config, cxx_compiler() is not None, "trainer.compile", CXX, "false")
    if config.draft_trainer == "trainer":
        plain = ranks == 1 and config.model.dtype == "float32"
        expected = (
            "another method, since mtp trains only with trainer.ranks=1 and model.dtype=float32; or draft.adapt=false"
        )
        _need(config, plain, "speculation.method", expected, "eagle3")


def _check_engine(config: Config) -> None:
    """Refuse what the chosen kind of engine cannot do."""
    kind, length = config.engine.kind, config.fixed_draft_length
    trainer = "mock" if kind == "mock" else "torch"
    why = "a mock trainer learns nothing" if trainer == "torch" else "a mock engine produces nothing to learn from"
    _need(config, config.trainer.kind == trainer, "trainer.kind", f"{trainer} with engine.kind={kind}: {why}", trainer)
    expected = f"false with engine.kind={kind}: only vllm compiles its policy"
    _need(config, kind == "vllm" or not config.engine.compile, "engine.compile", expected, "false")
    if config.engine.compile and config.deployment.device != "cuda":  # on GPUs vLLM's compiler generates no C++
        _need(config, cxx_compiler() is not None, "engine.compile", CXX, "false")
    expected = f"empty with engine.kind={kind}"
    _need(config, kind == "vllm" or not config.engine.vllm, "engine.vllm", expected, "''")
    expected = f"1 with engine.kind={kind}: only vllm divides a generator's policy"
    _need(config, kind == "vllm" or config.engine.tensor_parallel == 1, "engine.tensor_parallel", expected, 1)
    if kind == "vllm":
        methods = "eagle3, draft_model, ngram, suffix or none with engine.kind=vllm"
        _need(config, config.speculation.method != "mtp", "speculation.method", methods, "eagle3")
        expected = "a whole number with engine.kind=vllm: suffix decoding chooses the length itself, up to this one"
        chosen = config.speculation.method == "suffix" and length is None
        _need(config, not chosen, "speculation.draft_length", expected, 8)
        temperature, expected = config.sampling.temperature, "0.01 to 2 with engine.kind=vllm"
        _need(config, 0.01 <= temperature <= 2, "sampling.temperature", expected, min(2, max(0.01, temperature)))
    if kind == "sglang":
        _check_sglang(config)


def cxx_compiler() -> str | None:
    """Return the path of the C++ compiler that torch.compile would use, or None."""
    return next(filter(None, map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++")))), None)


def _check_rewards(config: Config) -> None:
    names = [name.strip() for name in config.data.reward.split(",")]
    for name in names:
        expected = f"{', '.join(REWARDS)}, or module:function"
        nearest = difflib.get_close_matches(name, REWARDS, 1, 0.0)[0]
        _need(config, ":" in name or name in REWARDS, "data.reward", expected, nearest)
    pattern, count = config.data.reward_pattern, len(names)
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"data.reward_pattern={pattern!r}: {error}; expected a regular expression") from None
    expected = "a regular expression, for data.reward=format"
    _need(config, "format" not in names or bool(pattern), "data.reward_pattern", expected, "'<think>.*</think>.*'")
    weights = _numbers(lambda: config.data.weights)
    held = not weights or (len(weights) == count and all(map(math.isfinite, weights)))
    expected = f"{count} finite number{'s' * (count > 1)}, one for each reward, or nothing"
    _need(config, held, "data.reward_weights", expected, ",".join(["1"] * count))


def _numbers(read: Callable[[], list[float]]) -> list[float]:
    try:
        return read()
    except ValueError:
        return [math.nan]


def _check_sources(config: Config) -> None:
    held_out = eval_sets.paths(config.data.eval_file)
    for name, text in (("data.train_file", config.data.train_file), ("data.eval_file", held_out)):
        for part in sources(text):
            expected = f"JSONL, Parquet or CSV, or {DATA_FORM}"
            if not part or not all(map(os.path.isfile, data_files(part))):
                among = "" if part == text else f" among the sources of {text!r}, which commas separate"
                raise ConfigError(f"{name}={part!r}: no such file{among}; expected {expected}")
            if "," in (path := str(data_files(part)[0].absolute())):
                raise ConfigError(f"{name}={part!r}: its path {path!r} has a comma, which separates sources; rename it")
    weights, count = _numbers(lambda: config.data.source_weights), len(sources(config.data.train_file))
    held = not weights or (len(weights) == count and all(0 < weight < math.inf for weight in weights))
    expected = f"{count} number{'s' * (count != 1)} above 0, one for each source of data.train_file, or nothing"
    _need(config, held, "data.train_weights", expected, ",".join(["1"] * count))


def _check_names(config: Config) -> None:
    """Refuse names of directories and files that do not exist."""
    for name, path in (
        ("model.path", config.model.path),
        ("model.reference_path", config.model.reference_path),
        ("speculation.draft_path", config.draft_directory),
    ):
        if path and not os.path.isfile(resolve_path(path) / "config.json"):
            shipped = f"; {name}={default_of(name)} is the shipped one" if default_of(name) else ""
            raise ConfigError(
                f"{name}={path!r}: expected a Hugging Face directory, with config.json in it, or a model on a hub, "
                f"OWNER/NAME; create it, or name another{shipped}"
            )
    expected = f"data.train_file as well: the built-in task {config.data.task} holds out its own prompts"
    _need(config, not config.data.eval_file or bool(config.data.train_file), "data.eval_file", expected, "")
    _check_sources(config)


def _check_sglang(config: Config) -> None:
    """Refuse what an SGLang server cannot do; each generator must have its own server."""
    urls, count, kind = config.server_urls, config.deployment.generators, "with engine.kind=sglang"
    _need(config, bool(urls), "engine.url", f"the address of each generator's server {kind}", "http://127.0.0.1:30000")
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
        _need(
            config,
            held,
            "engine.url",
            "http://HOST:PORT, or one of these for each generator, separated by commas",
            "http://127.0.0.1:30000",
        )
    _need(
        config,
        len(set(urls)) == len(urls),
        "engine.url",
        "a different server for each generator",
        ",".join(dict.fromkeys(urls)),
    )
    if len(urls) != count:
        raise ConfigError(
            f"engine.url={config.engine.url!r}: names {len(urls)} servers; expected {count}, one for each generator; "
            f"nearest valid choice: deployment.generators={len(urls)}"
        )
    _need(
        config,
        config.speculation.method in ("ngram", "none"),
        "speculation.method",
        f"ngram or none {kind}: its update from files would overwrite a draft with the policy",
        "none",
    )
    _need(
        config,
        config.fixed_draft_length is not None,
        "speculation.draft_length",
        f"a whole number {kind}: SGLang's draft length is fixed",
        1,
    )
    _need(
        config,
        config.speculation.method != "ngram" or config.fixed_draft_length == 1,
        "speculation.draft_length",
        f"1 {kind}: SGLang fills a longer n-gram draft with copies of token 0, which it then samples too often",
        1,
    )
    _need(
        config,
        config.engine.kv_at_swap == "recompute",
        "engine.kv_at_swap",
        f"recompute {kind}: if SGLang kept its KV cache, it could not say exactly which tokens are older than a swap",
        "recompute",
    )
    for name, whole in (("sampling.top_p", 1.0), ("sampling.top_k", 0)):
        _need(
            config,
            value_of(config, name) == whole,
            name,
            f"{whole} {kind}: SGLang returns logprobs of the whole distribution",
            whole,
        )
