"""Downloads what a configuration names on a Hugging Face hub, once, before anything reads it.

huggingface_hub does the work, with its own cache and environment variables: HF_HOME, HF_HUB_CACHE, HF_ENDPOINT,
HF_HUB_OFFLINE and HF_TOKEN. It is imported only if something is on a hub. Only the files in MODEL_FILES, the
safetensors that the model consists of, and the named data files are fetched: no code, and no pickles.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from asyncspec.config.fields import value_of
from asyncspec.config.hub import DATA_ENDINGS, DATA_FORM, SCHEME, HubName
from asyncspec.config.paths import resolve_path
from asyncspec.console import terminal
from asyncspec.errors import ConfigError, first_line

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MODEL_FILES = (
    "config.json",
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
QUIET_S = 1.0  # a shorter download shows no bar
LINE_EVERY_S = 5.0  # between two lines where there is no terminal for a bar
STOP_S = 2.0  # for an interrupted download to stop

# Sizes of a repository's files by path; None: they are not known, because the cache has been filled by something else.
Listing = Mapping[str, int] | None


def fetch(config: Any) -> None:
    """Download what a configuration names on a hub, except weights, and put the commits into its names, in place.

    Raises:
        ConfigError: there is no such repository, revision or file, or it cannot be fetched.
    """
    for field in _used(config):
        section, name = field.split(".")
        setattr(getattr(config, section), name, fetched(field + "=", value_of(config, field)))


def fetch_weights(config: Any) -> None:
    """Download the weights of the models that `fetch` has found.

    Raises:
        ConfigError: they cannot be fetched, or there are none in safetensors.
    """
    for field in _used(config):
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
    return {field: value_of(config, field) for field in _used(config) if _on_hub(value_of(config, field))}


def use_names(config: Any, names: Mapping[str, str]) -> None:
    """Put another configuration's `hub_names` in the place of a configuration's own, and download what is missing.

    Raises:
        ConfigError: see `fetch` and `fetch_weights`.
    """
    if changed := {field: text for field, text in names.items() if _on_hub(value_of(config, field))}:
        for field, text in changed.items():
            section, name = field.split(".")
            setattr(getattr(config, section), name, text)
        fetch_all(config)


def fetched(field: str, text: str) -> str:
    """Download what a text names on a hub, except weights. Return the name with its commit, or the text if it is a path
    or nothing.

    Args:
        field: what the user sets, for messages: "model.path=" or "--policy ".

    Raises:
        ConfigError: see `fetch`.
    """
    name = _on_hub(text)
    if name is None:
        if text.startswith(SCHEME):
            raise ConfigError(f"{field}{text!r}: expected {DATA_FORM}; a model is OWNER/NAME or OWNER/NAME@REVISION")
        return text
    if name.files and not name.files.lower().endswith(DATA_ENDINGS):
        raise ConfigError(f"{field}{text!r}: expected a file that ends in {', '.join(DATA_ENDINGS)}")
    return str(_Download(field, text, name).files())


def fetched_weights(field: str, text: str) -> None:
    """Download the weights of a model whose other files have been `fetched`. Do nothing for a path or a data file.

    Raises:
        ConfigError: see `fetch_weights`.
    """
    if (name := _on_hub(text)) is not None and not name.files:
        _Download(field, text, name).weights()


def _used(config: Any) -> list[str]:
    drafts = ["speculation.draft_path"] if config.speculation.draft_path and config.draft_directory else []
    return ["model.path", "model.reference_path", *drafts, "data.train_file", "data.eval_file"]


def _on_hub(text: str) -> HubName | None:
    """Parse a name on a hub; None if the text is anything else, or names something on this host."""
    name = HubName.parse(text)
    if name is None or name.pinned or text.startswith(SCHEME):
        return name
    try:
        return None if os.path.lexists(resolve_path(text)) else name
    except (OSError, ValueError):
        return None


class _Download:
    """Fetches files of one name."""

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
            if listing is None and not (name.folder / MODEL_FILES[0]).is_file():
                raise self._refused(self._missing())
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
            self._name = self._name._replace(revision=Path(self._snapshot([])).name)
        found = self._listed()
        if found is None:
            try:
                self._snapshot([])
            except ConfigError:
                if not self._name.folder.is_dir():
                    raise
            found = self._listed()
        return found

    def _listed(self) -> Listing:
        """Return the list of files in the cache. Each download keeps it there, even one of no file."""
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        name = self._name
        try:
            found = get_cached_repo_tree(name.repository, repo_type=name.kind, revision=name.revision)
        except CachedRepoTreeNotFoundError:
            return None
        return {file.path: file.size for file in found}

    def _get(self, wanted: Collection[str], listing: Listing) -> None:
        folder = self._name.folder
        missing = [path for path in wanted if not (folder / path).is_file()]
        if missing:
            self._snapshot(missing, sum((listing or {}).get(path, 0) for path in missing))

    def _snapshot(self, files: Collection[str], size: int = 0) -> str:
        """Call huggingface_hub, and show how far it has come if that takes long. Returns the snapshot's folder."""
        from huggingface_hub import snapshot_download

        counter = _Counter()
        outcome: list[str | BaseException] = []

        def call() -> None:
            try:
                outcome.append(
                    snapshot_download(
                        self._name.repository,
                        repo_type=self._name.kind,
                        revision=self._name.revision,
                        allow_patterns=[glob.escape(path) for path in files],
                        tqdm_class=counter.bar(),
                    )
                )
            except BaseException as error:
                outcome.append(error)

        # In a thread: an interrupt of the main thread must not wait for the files that are under way.
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        try:
            counter.show(thread, f"{self._name.repository}@{self._name.revision[:7]}", size)
        except BaseException:
            counter.stopped = True
            thread.join(STOP_S)
            raise
        if isinstance(outcome[0], BaseException):
            raise self._refused(self._why(outcome[0])) from None
        return outcome[0]

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(f"{self._field}{self._text!r}: {why}")

    def _missing(self) -> str:
        """Say that the cache does not hold the files, and nothing else can be asked."""
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            return (
                f"HF_HUB_OFFLINE is set, and the cache {constants.HF_HUB_CACHE} does not hold all of its files; "
                "expected a network, or HF_HOME of a cache that holds them" + self._no_directory()
            )
        return (
            f"{constants.ENDPOINT} cannot be reached, and the cache {constants.HF_HUB_CACHE} does not hold all of its "
            "files; expected a network, HF_ENDPOINT of a mirror, or a local path" + self._no_directory()
        )

    def _no_directory(self) -> str:
        return "" if self._name.files or self._name.pinned else f"; there is no directory {self._text} either"

    def _why(self, error: BaseException) -> str:
        """Say in a line what has gone wrong, and what to do."""
        import httpx
        from huggingface_hub import constants, errors

        name, hub = self._name, constants.ENDPOINT
        if isinstance(error, errors.GatedRepoError):
            page = f"{hub}/{'datasets/' if name.files else ''}{name.repository}"
            return f"is gated; expected you to accept its conditions on {page}, and to set HF_TOKEN"
        if isinstance(error, errors.RepositoryNotFoundError):
            what = "data set" if name.files else "model"
            if name.files or name.pinned:
                return f"{hub} has no {what} {name.repository}, or a private one; expected another name, or HF_TOKEN"
            return (
                "expected a Hugging Face directory, with config.json in it, or a model on a hub; there is no such "
                f"directory, and {hub} has no such model, or a private one, which needs HF_TOKEN"
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return f"{name.repository} has no revision {name.revision!r}; expected a branch, a tag or a commit"
        if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled | httpx.TransportError):
            return self._missing()
        if isinstance(error, errors.HfHubHTTPError):
            status = getattr(error.response, "status_code", None)
            token = "; is HF_TOKEN right?" if status in (401, 403) else "; try again later"
            return f"{hub} answers with status {status}{token}"
        if isinstance(error, OSError) and error.strerror:
            room = "room there" if error.errno == errno.ENOSPC else "a directory to write to"
            return f"the cache {constants.HF_HUB_CACHE}: {error.strerror}; expected {room}, or HF_HOME of another cache"
        return f"{type(error).__name__}: {first_line(error)}; expected a repository that can be downloaded"


class _Counter:
    """Counts the bytes that huggingface_hub has written, and shows them."""

    def __init__(self) -> None:
        self.stopped, self._done = False, 0.0

    def bar(self) -> type:
        """Return a class of progress bars that show nothing themselves."""
        from huggingface_hub.utils import tqdm

        counter = self

        class Bar(tqdm):
            def __init__(self, *args: Any, **options: Any) -> None:
                self._counts = str(options.get("desc", "")).startswith("Reconstructing")  # bytes on the disk
                super().__init__(*args, **options | {"disable": True})

            def update(self, n: float | None = 1) -> None:
                if counter.stopped:
                    raise RuntimeError("interrupted")
                if self._counts:
                    counter._done += n or 0

        return Bar

    def show(self, thread: threading.Thread, name: str, size: int) -> None:
        """Wait for the thread. Show a bar, or without a terminal a line every few seconds."""
        thread.join(QUIET_S)
        if not thread.is_alive():
            return
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        console, told = terminal(stderr=True), time.monotonic()
        columns = (TextColumn(f"downloading {name}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
            bar = bars.add_task("", total=size or None)
            while thread.is_alive():
                thread.join(0.2)
                bars.update(bar, completed=self._done)
                if not console.is_terminal and time.monotonic() - told > LINE_EVERY_S:
                    told = time.monotonic()
                    console.print(
                        f"downloading {name}: {self._done / 1e6:,.0f} of {size / 1e6:,.0f} MB", soft_wrap=True
                    )


def _shards(index: Path) -> set[str]:
    """Return the names of the files that an index names; none if there is no index that can be read."""
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return {name for name in found if isinstance(name, str) and name.endswith(".safetensors")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()
