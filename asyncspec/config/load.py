"""Compose a configuration from YAML and overrides; read and write it.

`load` merges the dataclass defaults, a YAML file and dotlist overrides, in this order. A key that does not exist, a
value of the wrong type or an impossible combination (check.py) raises `ConfigError`: one line that names the field, the
value, what was expected and the nearest valid choice.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import typing
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from asyncspec.config import topology
from asyncspec.config.check import check_files, check_values
from asyncspec.config.download import fetch, fetch_weights
from asyncspec.config.fields import hint, leaves, type_of, value_of
from asyncspec.config.paths import CONFIG_DIR, resolve_path
from asyncspec.config.schema import Config, default_of
from asyncspec.errors import ConfigError, first_line


def load(config: str = "tiny", overrides: typing.Sequence[str] = (), files: bool = True) -> Config:
    """Compose and check a configuration. What it names on a hub is downloaded, and the names get their commits.

    Args:
        config: path of a YAML file, or the name of one in the package's configs folder ("tiny").
        overrides: "a.b=value" strings, applied last, in order.
        files: whether to check and download the files that it names.

    Raises:
        ConfigError: the file or an override is wrong; one line that says what was expected.
    """
    path = _config_path(config)
    try:
        file_cfg = OmegaConf.load(path)
    except Exception as error:  # YAML raises many types
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        what = f"line {mark.line + 1}: {problem}" if mark is not None and problem else first_line(error)
        raise ConfigError(f"--config {config}: not readable as YAML: {what}") from None
    if not OmegaConf.is_dict(file_cfg) or any("\n" in str(key) for key in file_cfg):
        raise ConfigError(f"--config {config}: expected a mapping of fields at the top of the file")
    given = typing.cast(dict, OmegaConf.to_container(file_cfg))
    _refuse_dotted(given, path.name)
    file_cfg = OmegaConf.create(given := _without_empty(given))
    for key in leaves(given):
        _check_key(key, f"in {path.name}")
        _check_type(key, _inner(given, key))
    for item in overrides:
        if "=" not in item or item.startswith(("-", "=")):
            raise ConfigError(
                f"override {item!r}: expected field=value without spaces, for example trainer.optimizer.lr=1e-4"
            )
        _check_key(item.split("=", 1)[0], "in the overrides")
    merged: Any = OmegaConf.structured(Config)
    try:
        merged = OmegaConf.merge(merged, file_cfg)
        for item in overrides:
            _override(merged, *item.split("=", 1))
        result = typing.cast(Config, OmegaConf.to_object(merged))
        _apply_nodes(result, {*leaves(given), *(item.split("=", 1)[0] for item in overrides)})
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "?"
        raise ConfigError(f"{key}: {first_line(error)}; expected {_expected(key)}") from None
    check_values(result)
    if files:
        fetch(result)
        check_files(result)  # before gigabytes are downloaded
        fetch_weights(result)
    return result


def _apply_nodes(config: Config, given: typing.AbstractSet[str]) -> None:
    """Set the numbers of actors and ranks that deployment.nodes implies, unless a given number contradicts it.

    Args:
        given: the dotted names that the YAML file and the overrides set.
    """
    text = config.deployment.nodes
    if not text:
        return
    try:
        nodes = topology.parse(text)
    except ValueError as error:
        raise ConfigError(f"deployment.nodes={text!r}: {error}") from None
    totals, ranks = topology.total(nodes), max(1, config.logprob.ranks)
    if totals["logprob"] % ranks:
        raise ConfigError(
            f"deployment.nodes={text!r}: has {totals['logprob']} ranks of logprob actors; expected a multiple of "
            f"logprob.ranks={ranks}; "
            f"nearest valid choice: logprob.ranks={math.gcd(ranks, totals['logprob'])}"
        )
    totals["logprob"] //= ranks
    parallel = max(1, config.engine.tensor_parallel)
    divisor = math.gcd(parallel, *(node.get("generator", 0) for node in nodes))
    for index, node in enumerate(nodes):
        if (found := node.get("generator", 0)) % parallel:
            raise ConfigError(
                f"deployment.nodes={text!r}: generator:{found} on node {index}: expected a multiple of "
                f"engine.tensor_parallel={parallel}, since all ranks of a generator are on one node; "
                f"nearest valid choice: engine.tensor_parallel={divisor}"
            )
    totals["generator"] //= parallel
    for name, role in (
        ("trainer.ranks", "trainer"),
        ("deployment.logprobs", "logprob"),
        ("deployment.generators", "generator"),
    ):
        if name in given and value_of(config, name) != totals[role]:
            raise ConfigError(
                f"{name}={value_of(config, name)}: expected {totals[role]}, as deployment.nodes={text!r} has; or an "
                f"empty deployment.nodes"
            )
        section, field_name = name.split(".")
        setattr(getattr(config, section), field_name, totals[role])


def _override(merged, key: str, text: str) -> None:
    try:
        # A string field takes the text as it is; for all other fields YAML parses the text.
        value: Any = text
        if type_of(Config, key) is not str:
            value = typing.cast(dict, OmegaConf.to_container(OmegaConf.from_dotlist([f"v={text}"])))["v"]
        _check_type(key, value)
        OmegaConf.update(merged, key, value)
    except ConfigError:
        raise
    except (OmegaConfBaseException, YAMLError, ValueError):  # ValueError: Python parses at most 4300 digits
        raise ConfigError(f"{key}={text!r}: expected {_expected(key)}") from None


def _check_type(key: str, value: Any) -> None:
    """Refuse a boolean for a number and a number for a boolean: omegaconf would convert either to the other."""
    interpolated = isinstance(value, str) and value.startswith("${")
    if not interpolated and (type_of(Config, key) is bool) != isinstance(value, bool):
        raise ConfigError(f"{key}={value!r}: expected {_expected(key)}")


def _refuse_dotted(tree: dict, where: str) -> None:
    """Refuse a dotted name in a file: there a field stands in its section."""
    for key, value in tree.items():
        if "." in str(key):
            section, _, name = str(key).rpartition(".")
            raise ConfigError(
                f"{key} in {where}: expected the section {section} with {name} in it, or {key}=... after it"
            )
        if isinstance(value, dict):
            _refuse_dotted(value, where)


def _without_empty(tree: dict) -> dict:
    """Return a mapping without the sections that have nothing in them."""
    parts = {key: _without_empty(value) if isinstance(value, dict) else value for key, value in tree.items()}
    sections = {name.rpartition(".")[0].rpartition(".")[2] for name in leaves(dataclasses.asdict(Config()))}
    return {key: value for key, value in parts.items() if value not in (None, {}) or key not in sections}


def _inner(tree: dict, key: str) -> Any:
    for part in key.split("."):
        tree = tree[part]
    return tree


def to_yaml(config: Config) -> str:
    """Return the resolved configuration as YAML that `load` and `from_yaml` read back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def from_yaml(text: str) -> Config:
    """Return the configuration that `to_yaml` wrote. It is not checked again.

    Raises:
        ConfigError: the text is damaged, or another version of asyncspec wrote it.
    """
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(text))
        return typing.cast(Config, OmegaConf.to_object(merged))
    except Exception as error:  # YAML raises many types
        raise ConfigError(f"config.yaml: {first_line(error)}; expected a file of this version of asyncspec") from None


def _config_path(config: str) -> Path:
    shipped, given = CONFIG_DIR / f"{config}.yaml", resolve_path(config)
    # A bare name is a shipped configuration, even if the current directory has a file of that name.
    for candidate in (shipped, given) if os.path.basename(config) == config else (given,):
        if os.path.isfile(candidate):
            return candidate
    names = sorted(p.stem for p in CONFIG_DIR.glob("*.yaml"))
    raise ConfigError(
        f"--config {config}: no such file; expected a YAML file or one of {', '.join(names)}"
        + hint(Path(config).stem, names)
    )


def _check_key(key: str, where: str) -> None:
    known = leaves(dataclasses.asdict(Config()))
    if key in known:
        return
    inner = [name for name in known if name.startswith(key + ".")]
    if inner:
        raise ConfigError(f"{key} {where}: names a section, not a field; expected a field, for example {inner[0]}=...")
    near = nearest_field(key)
    if not near:
        raise ConfigError(f"{key} {where}: no such field; asyncspec train --help lists all fields")
    raise ConfigError(f"{key} {where}: no such field; nearest valid choice: {near} (default {default_of(near)!r})")


def nearest_field(key: str) -> str | None:
    """Return the dotted name of the field most similar to `key`; None if none is similar."""
    known = leaves(dataclasses.asdict(Config()))
    # The most frequent mistake is the right last name under the wrong section, so such a field is offered first.
    same_name = [name for name in known if name.split(".")[-1] == key.split(".")[-1]]
    return next(iter(same_name[:1] or difflib.get_close_matches(key, known, 1, 0.5)), None)


def _expected(key: str) -> str:
    try:
        return f"a value of type {type_of(Config, key).__name__}; nearest valid choice: {key}={default_of(key)}"
    except (KeyError, TypeError):
        return "a known field"
