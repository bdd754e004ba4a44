"""Paths that a configuration names: shipped files, shipped configurations and a run's results."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

PACKAGE_DIR = Path(__file__).resolve().parents[1]
CONFIG_DIR = PACKAGE_DIR / "configs"


def resolve_path(path: str) -> Path:
    """Return the path that a text of the user names, in the configuration or on the command line.

    "asset:NAME" is a file or folder that ships in the package; "~" is the user's home directory.
    """
    if path.startswith("asset:"):
        return PACKAGE_DIR / "assets" / path.removeprefix("asset:")
    return Path(os.path.expanduser(path))


def default_run_dir() -> str:
    """Return a path under runs/ that is named by date and time."""
    return os.path.join("runs", datetime.datetime.now().strftime("%Y%m%d-%H%M%S"))
