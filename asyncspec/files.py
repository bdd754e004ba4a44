"""Files that are replaced as a whole: a reader sees the old file or the new one, never a part of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def replace_file(file: Path, content: str | bytes) -> None:
    """Write a file's new content under a temporary name beside it, then rename it."""
    partial = file.with_name(file.name + ".partial")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    partial.replace(file)


def write_json(file: Path, content: Any) -> None:
    """Replace a file by an object as indented JSON."""
    replace_file(file, json.dumps(content, indent=2) + "\n")
