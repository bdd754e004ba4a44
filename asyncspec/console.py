"""The terminal console that every command writes to."""

from __future__ import annotations

from rich.console import Console


def terminal(**options) -> Console:
    """Return a console that prints text unchanged: brackets and colons in names and errors are not markup or emoji."""
    return Console(highlight=False, markup=False, emoji=False, **options)
