"""Paths that a configuration names: shipped files, shipped configurations and a run's results."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

from asyncspec.config import eval_sets, hub

PACKAGE_DIR = Path(__file__).resolve().parents[1]
CONFIG_DIR = PACKAGE_DIR / "configs"
# The fields that name files or directories which exist before the run.
PATHS = (
    "model.path",
    "model.reference_path",
    "speculation.draft_path",
    "data.train_file",
    "data.eval_file",
    "engine.weights_dir",
)


def resolve_path(path: str) -> Path:
    """Return the path that a text of the user names, in the configuration or on the command line.

    "asset:NAME" is a file or folder that ships in the package; "~" is the user's home directory. A name on a hub, with
    a commit, is the folder or file in huggingface_hub's cache; this does not use the network.
    """
    if path.startswith("asset:"):
        return PACKAGE_DIR / "assets" / path.removeprefix("asset:")
    if (name := hub.pinned(path)) is not None:
        return name.folder / name.files
    return Path(os.path.expanduser(path))


def sources(text: str) -> list[str]:
    """Return the paths and names of data files in a text of the user, where commas separate them."""
    return [part.strip() for part in text.split(",")] if text else []


def data_files(text: str) -> list[Path]:
    """Return the data files that a text of the user names. A name on a hub with wildcards stands for several."""
    named = ((part, hub.pinned(part)) for part in sources(text))
    return [file for part, name in named for file in ([resolve_path(part)] if name is None else name.held())]


def make_paths_absolute(config: Any) -> None:
    """Make the paths that a configuration names absolute, in place. An empty path, "asset:NAME" and a name on a
    hub stay as they are.
    """
    for name in PATHS:
        section, field = name.split(".")
        text = getattr(getattr(config, section), field)
        if name == "data.eval_file":
            absolute = eval_sets.mapped(text, _absolute)
        else:
            parts = sources(text) if section == "data" else [text] if text else []
            absolute = ",".join(map(_absolute, parts))
        setattr(getattr(config, section), field, absolute)


def _absolute(path: str) -> str:
    if path.startswith(("asset:", hub.SCHEME)) or hub.pinned(path) is not None:
        return path
    return str(resolve_path(path).absolute())  # ".." may follow a link


def default_run_dir() -> str:
    """Return a path under runs/ that is named by date and time."""
    return os.path.join("runs", datetime.datetime.now().strftime("%Y%m%d-%H%M%S"))
