"""What torchrun tells a process through its environment."""

from __future__ import annotations

import os

from asyncspec.errors import UserError


def ranks() -> tuple[int, int]:
    """Return this process's rank and the number of ranks; (0, 1) without torchrun, or with one rank.

    Raises:
        UserError: the environment has some of torchrun's variables, but not all, or no numbers in them.
    """
    size = os.environ.get("WORLD_SIZE")
    if size in (None, "", "1"):
        return 0, 1
    for name in ("WORLD_SIZE", "RANK", "MASTER_PORT", "MASTER_ADDR"):
        text = os.environ.get(name)
        if not text or (name != "MASTER_ADDR" and not text.isdecimal()):
            raise UserError(
                f"the environment has WORLD_SIZE={size!r} and {name}={text!r}; expected all of what torchrun sets; "
                "nearest valid choice: unset WORLD_SIZE"
            )
    return int(os.environ["RANK"]), max(1, int(str(size)))
