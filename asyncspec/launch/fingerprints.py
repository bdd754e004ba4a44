"""Notices when a file that a run reads has changed before the run is resumed.

What a resumed run does follows from its seed and its files. With other prompts the order of prompts is another one, and
the ledger's tickets do not name the prompts that they trained. So the start writes a digest of each such file into the
run's directory, and resuming compares them.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from asyncspec.config import Config, data_files, eval_sets, resolve_path
from asyncspec.config.fields import value_of
from asyncspec.errors import ConfigError
from asyncspec.files import write_json
from asyncspec.models.chat import FILES as CHAT_FILES
from asyncspec.models.headers import tensor_files
from asyncspec.rl.own import ADVANTAGE, LOSS

FILE = "inputs.json"
_SAMPLES, _SAMPLE = 64, 1 << 16  # places of a file with weights that are read, and the bytes at each


def write(config: Config) -> None:
    """Write the digests of the files that a run reads into its directory, unless they are there.

    Raises:
        ConfigError: a file cannot be read.
    """
    if not (file := Path(config.run_dir) / FILE).exists():
        write_json(file, digests(config))


def compare(config: Config, tell: Callable[[str], None] = print) -> None:
    """Check that the files that a run reads are those that it was started with, wherever they are now.

    Args:
        tell: called with one line if the file of a reward, loss or advantage has changed: perhaps it was repaired.

    Raises:
        ConfigError: another file has changed, or cannot be read.
    """
    file = Path(config.run_dir) / FILE
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the run was cut short before it wrote them
        return
    for name, digest in digests(config).items():
        if before.get(name, digest) == digest:
            continue
        field = name.partition("/")[0]
        what = f"{field}={value_of(config, field)!r}" + ("" if field == name else f": {name.partition('/')[2]}")
        if field == "data.reward" or field in (ADVANTAGE, LOSS):
            used = "the next rewards come from" if field == "data.reward" else "the next steps use"
            tell(f"{what}: its file has changed since the run was started; {used} the new one")
        else:
            raise ConfigError(
                f"--resume {config.run_dir}: {what} has changed since the run was started; expected the same content: "
                f"restore it, or start a new run with model.path={config.run_dir}/checkpoint/policy"
            )


def digests(config: Config) -> dict[str, str]:
    """Return field, or field/file -> the digest of what a run reads there. The policy's weights are among it only
    if they are frozen: otherwise a resumed run reads them from its checkpoint.

    Raises:
        ConfigError: a file cannot be read.
    """
    policy = resolve_path(config.model.path)
    files = {f"model.path/{name}": policy / name for name in ("config.json", "tokenizer.json")}
    for number, name in enumerate(config.data.reward.split(",")):
        if (source := _source(name.strip())) is not None:
            files[f"data.reward/{name.strip()}" if number else "data.reward"] = source
    for field in (ADVANTAGE, LOSS):
        name = value_of(config, field)
        if ":" in name and (source := _source(name)) is not None:
            files[field] = source
    for name in CHAT_FILES:
        if config.data.train_file and (policy / name).is_file():
            files[f"model.path/{name}"] = policy / name
    try:
        digested = {name: _digest(file) for name, file in files.items()}
        data = {"data.train_file": config.data.train_file, "data.eval_file": eval_sets.paths(config.data.eval_file)}
        for name, text in data.items():
            # One digest for all files, in their order: another number of files has another one.
            digested[name] = " ".join(_digest(file) for file in data_files(text))
        models = {"model.path": config.model.path} if config.lora is not None else {}
        if config.rl.kl_coef > 0:
            own = config.model.reference_path
            models["model.reference_path" if own else "model.path"] = own or config.model.path
        for name, path in models.items():
            directory = resolve_path(path)
            weights = [_digest(directory / file, sampled=True) for file in tensor_files(directory)]
            digested[name] = hashlib.sha256("".join(weights).encode()).hexdigest()
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}; expected a file that can be read") from None
    return digested


def _source(reward: str) -> Path | None:
    """Return the file of the reward function's module, without importing anything; None if it cannot be found."""
    spec, places = None, [*sys.path, os.getcwd()]  # as load_reward looks
    for part in reward.partition(":")[0].split("."):
        spec = importlib.machinery.PathFinder.find_spec(part, places)
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(spec.origin) if spec is not None and spec.origin and Path(spec.origin).is_file() else None


def _digest(file: Path, sampled: bool = False) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits.

    Args:
        sampled: read evenly spaced samples only, which is enough to notice that weights were trained.
    """
    size = file.stat().st_size
    with open(file, "rb") as stream:
        if not sampled or size <= _SAMPLES * _SAMPLE:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        found = hashlib.sha256(str(size).encode())
        for index in range(_SAMPLES):
            stream.seek(index * (size - _SAMPLE) // (_SAMPLES - 1))
            found.update(stream.read(_SAMPLE))
        return found.hexdigest()
