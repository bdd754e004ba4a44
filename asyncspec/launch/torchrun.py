"""What torchrun tells a process through its environment, and what its workers tell each other."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path

from asyncspec.config import Config, work
from asyncspec.errors import UserError
from asyncspec.wire.addresses import own_address


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


def shutdown_s() -> float | None:
    """Return the seconds after a signal at which torchrun kills its workers; None without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    flags = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    flags.add_argument("--shutdown-timeout", "--shutdown_timeout", type=float)
    pid = os.getppid()
    while pid > 1:  # a script may stand between torchrun and this process
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
            given = flags.parse_known_args(command)[0].shutdown_timeout
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, argparse.ArgumentError):
            break
        if given is not None:
            return given
    told = os.environ.get("PET_SHUTDOWN_TIMEOUT") or os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or "30"
    return float(told) if told.isdecimal() else None


def warn(config: Config, tell: Callable[[str], None] = print) -> None:
    """Say in one line if torchrun would kill this run before its own deadline to stop."""
    limit, needed = shutdown_s(), work.stop_s(config)
    if limit is not None and limit < needed:
        tell(
            f"torchrun kills its workers {limit:.0f} s after it is interrupted, and this run may need {needed:.0f} s "
            f"to write its checkpoint; expected torchrun --shutdown-timeout {work.warning_s(config)}"
        )


def address(store, key: Callable[[str], str], rank: int, size: int) -> str:
    """Return the address at which the other workers reach this one; loopback if all are on one host. Collective.

    Many hosts resolve their own name to loopback, so the way to MASTER_ADDR does not show the first node how others
    reach it. The way to another node does: workers whose own way is loopback ask the others for their addresses.

    Args:
        store: the workers' store.
        key: callable(name) -> the name's key in the store.
        size: the number of workers.

    Raises:
        UserError: there is no way to another node.
    """
    if int(os.environ.get("GROUP_WORLD_SIZE", 1)) == 1:
        return "127.0.0.1"
    port = int(os.environ["MASTER_PORT"])
    own = own_address(os.environ["MASTER_ADDR"], port)
    store.set(key(f"address/{rank}"), own)
    if not ip_address(own).is_loopback:
        return own
    for other in reversed(range(size)):  # the last one is hardly ever on the first node
        there = store.get(key(f"address/{other}")).decode()
        if not ip_address(there).is_loopback:
            try:
                return own_address(there, port)
            except OSError as error:
                raise UserError(
                    f"deployment.host='auto': no way to the worker at {there}: {error.strerror}; expected nodes that "
                    "reach each other; nearest valid choice: deployment.host=ADDRESS on each node"
                ) from None
    return own
