"""Downloads what a configuration names on a Hugging Face hub, once, before anything reads it.

huggingface_hub does the work, with its own cache and environment variables: HF_HOME, HF_HUB_CACHE, HF_ENDPOINT,
HF_HUB_OFFLINE and HF_TOKEN. It is imported only if something is on a hub. Only the files in MODEL_FILES, the
safetensors that the model consists of, and the named data files are fetched: no code, and no pickles.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections import deque
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from asyncspec.config import eval_sets
from asyncspec.config.fields import value_of
from asyncspec.config.hub import DATA_ENDINGS, DATA_FORM, SCHEME, HubName
from asyncspec.config.paths import resolve_path, sources
from asyncspec.config.transfer import Counter, interruptible
from asyncspec.errors import ConfigError, first_line

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
MODEL_FILES = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    INDEX,
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "NOTICE",
)
DATA = ("data.train_file", "data.eval_file")  # the fields that name data
THREADS = 8  # files that are fetched at once, as in huggingface_hub

# Sizes of a repository's files by path; None: they are not known, because the cache has been filled by something else.
Listing = Mapping[str, int] | None


def fetch(config: Any) -> None:
    """Download what a configuration names on a hub, except weights, and put the commits into its names, in place.

    Raises:
        ConfigError: there is no such repository, revision or file, or it cannot be fetched.
    """
    for field in _models(config):
        _put(config, field, fetched_model(field + "=", value_of(config, field)))
    for field in DATA:
        text, fetched = value_of(config, field), partial(fetched_data, field + "=")
        _put(config, field, eval_sets.mapped(text, fetched) if field == "data.eval_file" else fetched(text))


def fetch_weights(config: Any) -> None:
    """Download the weights of the models that `fetch` has found.

    Raises:
        ConfigError: they cannot be fetched, or there are none in safetensors.
    """
    for field in _models(config):
        if field != "model.reference_path" or config.rl.kl_coef > 0:
            fetched_weights(field + "=", value_of(config, field))


def fetch_all(config: Any) -> None:
    """Download all that a configuration names on a hub, and put the commits into its names, in place.

    Raises:
        ConfigError: see `fetch` and `fetch_weights`.
    """
    fetch(config)
    fetch_weights(config)


def hub_names(config: Any) -> dict[str, str]:
    """Return field -> name, for the fields that name something on a hub."""
    models = {field: value_of(config, field) for field in _models(config)}
    data = {field: value_of(config, field) for field in DATA}
    return {field: text for field, text in models.items() if _model(text)} | {
        field: text for field, text in data.items() if SCHEME in text
    }


def use_names(config: Any, names: Mapping[str, str]) -> None:
    """Put the `hub_names` of another process's configuration in the place of this one's, and download what is missing.

    Raises:
        ConfigError: see `fetch` and `fetch_weights`.
    """
    for field, text in names.items():
        _put(config, field, text)
    if names:
        fetch_all(config)


def fetched_model(field: str, text: str) -> str:
    """Download a model that a text names on a hub, except weights. Return the name with its commit, or the text if it
    is a path or nothing.

    Args:
        field: what the user sets, for messages: "model.path=" or "--policy ".

    Raises:
        ConfigError: see `fetch`.
    """
    name = _model(text)
    return text if name is None else str(_Download(field, text, name).files())


def fetched_weights(field: str, text: str) -> None:
    """Download the weights of a model whose other files have been `fetched`. Do nothing for a path.

    Raises:
        ConfigError: see `fetch_weights`.
    """
    if (name := _model(text)) is not None:
        _Download(field, text, name).weights()


def fetched_data(field: str, text: str) -> str:
    """Download the data files that a text names on a hub. Args, return and errors are those of `fetched_model`."""
    return ",".join(_fetched(field, part) for part in sources(text))


def _fetched(field: str, text: str) -> str:
    if not text.startswith(SCHEME):
        return text
    name = HubName.parse(text)
    if name is None:
        raise ConfigError(f"{field}{text!r}: expected {DATA_FORM}")
    if not name.files.lower().endswith(DATA_ENDINGS):
        raise ConfigError(f"{field}{text!r}: expected a file that ends in {', '.join(DATA_ENDINGS)}")
    return str(_Download(field, text, name).files())


def _models(config: Any) -> list[str]:
    drafts = ["speculation.draft_path"] if config.speculation.draft_path and config.draft_directory else []
    return ["model.path", "model.reference_path", *drafts]


def _put(config: Any, field: str, text: str) -> None:
    section, name = field.split(".")
    setattr(getattr(config, section), name, text)


def _model(text: str) -> HubName | None:
    """Parse the name of a model on a hub; None if the text is anything else, or a path on this host."""
    name = HubName.parse(text)
    if name is None or name.files:
        return None
    return name if name.pinned or not os.path.lexists(resolve_path(text)) else None


class _Download:
    """Fetches files of one name. Call `files` first."""

    def __init__(self, field: str, text: str, name: HubName) -> None:
        self._field, self._text, self._name = field, text, name

    def files(self) -> HubName:
        """Fetch all but weights. Returns the name with its commit."""
        listing = self._list()
        name = self._name
        if name.files:
            wanted = [path for path in listing or () if name.matches(path)]
            if listing is not None and not wanted:
                there = sorted(path for path in listing if path.lower().endswith(DATA_ENDINGS))
                raise self._refused(f"has no such file; it has {', '.join(there[:5]) or 'no data files'}"[:300])
            if listing is None and (name.wild or not (name.folder / name.files).is_file()):
                raise self._refused(self._missing())
        else:
            wanted = [path for path in MODEL_FILES if path in (listing or ())]
            if listing is None and not (name.folder / CONFIG).is_file():
                raise self._refused(self._missing())
            if listing is not None and CONFIG not in wanted:
                raise self._refused(f"has no {CONFIG}; expected a model in the layout of transformers")
        self._get(wanted, listing)
        return name

    def weights(self) -> None:
        """Fetch the shards that the index names, or model.safetensors. The name has its commit."""
        listing = self._list()
        if listing is None:  # what reads the directory finds what is missing
            return
        shards = _shards(self._name.folder / INDEX) & set(listing)
        wanted = sorted(shards) or [path for path in (SINGLE,) if path in listing]
        if not wanted:
            others = sorted(path for path in listing if path.endswith((".bin", ".gguf", ".pt", ".pth")))
            raise self._refused(
                "has no model.safetensors"
                + (f", only {others[0]}" if others else "")
                + "; expected safetensors; transformers' save_pretrained writes them"
            )
        self._get(wanted, listing)

    def _list(self) -> Listing:
        """Find the commit, and what the repository has."""
        if not self._name.pinned:
            self._name = self._name._replace(revision=self._snapshot().name)
        found = self._listed()
        if found is None:
            try:
                self._snapshot()
            except ConfigError:
                if not self._name.folder.is_dir():
                    raise
            found = self._listed()
        return found

    def _listed(self) -> Listing:
        """Return the list of files that the cache has; None if it has none for this commit."""
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        name = self._name
        try:
            found = get_cached_repo_tree(name.repository, repo_type=name.kind, revision=name.revision)
        except CachedRepoTreeNotFoundError:
            return None
        return {file.path: file.size for file in found}

    def _get(self, wanted: Collection[str], listing: Listing) -> None:
        """Download those of the files that the cache lacks, and show how far that is if it takes long."""
        from huggingface_hub import hf_hub_download

        name, counter = self._name, Counter()
        missing = deque(path for path in wanted if not (name.folder / path).is_file())
        size = sum((listing or {}).get(path, 0) for path in missing)
        failed: list[BaseException] = []

        def work() -> None:
            try:
                while missing:
                    path = missing.popleft()
                    hf_hub_download(
                        name.repository, path, repo_type=name.kind, revision=name.revision, tqdm_class=counter.bar()
                    )
            except IndexError:  # another thread has taken the last one
                pass
            except BaseException as error:
                failed.append(error)

        # The threads of snapshot_download would keep an interrupted process from ending until the files are there.
        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(THREADS, len(missing)))]
        try:
            with interruptible() as check:
                for thread in threads:
                    thread.start()

                def working() -> bool:
                    check()
                    return any(thread.is_alive() for thread in threads) and not failed

                counter.show(working, name.repository, size)
        finally:
            counter.stopped = True
            missing.clear()
        if failed:
            raise self._refused(self._why(failed[0])) from None

    def _snapshot(self) -> Path:
        """Ask for the commit and the list of files, which the cache keeps. Returns the snapshot's folder."""
        from huggingface_hub import snapshot_download

        name = self._name
        try:
            found = snapshot_download(
                name.repository,
                repo_type=name.kind,
                revision=name.revision,
                allow_patterns=[],
                tqdm_class=Counter().bar(),
            )
        except Exception as error:
            raise self._refused(self._why(error)) from None
        return Path(found)

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(f"{self._field}{self._text!r}: {why}")

    def _missing(self) -> str:
        """Say that the cache does not hold the files, and that the hub cannot be asked."""
        from huggingface_hub import constants

        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} cannot be reached"
        why += f", while the cache {constants.HF_HUB_CACHE} lacks files of it"
        return self._neither(why) or f"{why}; expected a network, or HF_HOME of a cache that has them"

    def _neither(self, why: str) -> str:
        """Say that a text is the name neither of a directory nor of a model; "" if it can be no directory."""
        if self._name.files or self._name.pinned:
            return ""
        return (
            "expected a Hugging Face directory, with config.json in it, or a model on a hub; there is no such "
            f"directory, and {why}"
        )

    def _why(self, error: BaseException) -> str:
        """Say in a line what has gone wrong, and what to do."""
        from huggingface_hub import constants, errors

        name, hub, cause = self._name, constants.ENDPOINT, error.__cause__
        if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(cause, errors.HfHubHTTPError):
            return self._why(cause)
        if isinstance(error, errors.GatedRepoError):
            page = f"{hub}/{'datasets/' if name.files else ''}{name.repository}"
            return f"is gated; expected you to accept its conditions on {page}, and to set HF_TOKEN"
        if isinstance(error, errors.RepositoryNotFoundError):
            what = f"data set {name.repository}" if name.files else "such model"
            why = f"{hub} has no {what}, or a private one, which needs HF_TOKEN"
            return self._neither(why) or why
        if isinstance(error, errors.RevisionNotFoundError):
            return f"{name.repository} has no revision {name.revision!r}; expected a branch, a tag or a commit"
        if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
            return self._missing()
        if isinstance(error, errors.HfHubHTTPError):
            status = getattr(error.response, "status_code", None)
            token = "; is HF_TOKEN right?" if status in (401, 403) else "; try again later"
            return f"{hub} answers with status {status}{token}"
        if isinstance(error, OSError) and error.strerror:
            room = "room there" if error.errno == errno.ENOSPC else "a directory to write to"
            return f"the cache {constants.HF_HUB_CACHE}: {error.strerror}; expected {room}, or HF_HOME of another cache"
        return f"{type(error).__name__}: {first_line(error)}; expected a download from {hub}; it goes on if tried again"


def _shards(index: Path) -> set[str]:
    """Return the names of the files that an index names; none if there is no index that can be read."""
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return {name for name in found if isinstance(name, str) and name.endswith(".safetensors")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()
