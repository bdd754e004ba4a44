"""The directory that a command writes to."""

from __future__ import annotations

import os
from pathlib import Path

from asyncspec.config import resolve_path
from asyncspec.errors import UserError


def output_directory(out: str) -> Path:
    """Make the directory of `--out`, if it is not there, and return it.

    Raises:
        UserError: it cannot be made or written to.
    """
    directory = resolve_path(out)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}; expected a directory to write to") from None
    if not os.access(directory, os.W_OK):
        raise UserError(f"--out {out}: expected a directory to write to")
    return directory
