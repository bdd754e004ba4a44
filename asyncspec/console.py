"""The terminal, as every command writes to it."""

from __future__ import annotations

from rich.console import Console


def terminal(**options) -> Console:
    """A console that prints what it is given: names and errors may hold brackets and colons, which are no markup and no
    emoji.
    """
    return Console(highlight=False, markup=False, emoji=False, **options)
