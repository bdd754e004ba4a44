"""The ledger, ledger.jsonl: one line for each event in a ticket's life, and for each fault of the run. Appended, never
changed.

A ticket is issued, and then trained, evaluated or dropped with a reason; in between it may be issued again because an
actor died with it. The line `resumed` says that the run went on from a checkpoint: what happened to tickets of that
version's step and later ones before that line is void, those tickets are issued anew. Lines of the run, not of a
ticket: lost, joined, resumed, finished.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from asyncspec.deadlines import LEDGER_S
from asyncspec.wire.messages import Ticket

FILE = "ledger.jsonl"
_OF_TICKET = ("ticket", "step")
_FIELDS = {
    "issued": _OF_TICKET,
    "trained": (*_OF_TICKET, "trained_in", "version_min", "version_max"),
    "evaluated": _OF_TICKET,
    "dropped": _OF_TICKET,
    "resumed": ("version",),
}  # whole numbers that an event is read for


class Ledger:
    def __init__(self, run_dir: Path) -> None:
        """Raises:
        OSError: another process goes on writing it.
        """
        self._file = open(run_dir / FILE, "a", buffering=1)
        _lock(self._file)
        _cut_torn_end(run_dir / FILE)

    def write(self, event: str, ticket: Ticket, **details) -> None:
        """An event in a ticket's life."""
        self.note(
            event,
            ticket=ticket.ticket_id,
            step=ticket.step,
            min_version=ticket.min_version,
            evaluation=ticket.evaluation,
            **details,
        )

    def note(self, event: str, **details) -> None:
        """An event of the run. Raises OSError where the disk is full."""
        self._file.write(json.dumps({"time": round(time.time(), 3), "event": event, **details}) + "\n")

    def sync(self) -> None:
        """Have what was written survive the machine, not just this process."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read(run_dir: Path) -> Iterator[dict]:
    """The events of a run; a last line that was cut short is left out.

    Raises:
        ValueError: another line is damaged, or lacks what its event must have; names it.
    """
    lines = (run_dir / FILE).read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
            if not isinstance(event, dict) or not isinstance(event.get("event"), str):
                raise ValueError
        except ValueError:
            if number < len(lines):
                raise ValueError(
                    f"{FILE}, line {number}: not an event: {line[:60].decode(errors='replace')!r}"
                ) from None
            return
        for field in _FIELDS.get(event["event"], ()):
            if type(event.get(field)) is not int:
                raise ValueError(
                    f"{FILE}, line {number}: {event['event']!r} with {field}={event.get(field)!r}: expected a whole "
                    f"number"
                )
        yield event


def written(run_dir: Path) -> bool:
    """Whether a process goes on writing it."""
    with open(run_dir / FILE) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def open_tickets(events: Iterable[dict]) -> dict[int, dict]:
    """The tickets that were issued and have no end yet: id -> the event that issued it."""
    found: dict[int, dict] = {}
    for event in events:
        if event["event"] == "issued":
            found[event["ticket"]] = event
        elif event["event"] in ("trained", "evaluated", "dropped"):
            found.pop(event["ticket"], None)
        elif event["event"] == "resumed":
            found = {ticket: issued for ticket, issued in found.items() if issued["step"] < event["version"]}
    return found


def undone(events: Iterable[dict], version: int) -> int:
    """How many tickets were trained by versions that going on from `version` unmakes."""
    steps: list[int] = []  # of the tickets that are trained
    for event in events:
        if event["event"] == "resumed":
            steps = [step for step in steps if step < event["version"]]
        elif event["event"] == "trained":
            steps.append(event["step"])
    return sum(step >= version for step in steps)


def _lock(file: IO) -> None:
    """Claim the ledger. A controller that has lost its launcher may need a moment to let go of it."""
    deadline = time.monotonic() + LEDGER_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError:
            if time.monotonic() > deadline:
                raise OSError(f"{FILE}: another process writes it still, after {LEDGER_S:.0f} s") from None
            time.sleep(0.05)


def _cut_torn_end(path: Path) -> None:
    with open(path, "rb+") as file:
        end = file.seek(0, os.SEEK_END)
        at = end
        while at > 0:  # back to the end of the last whole line
            file.seek(at - 1)
            if file.read(1) == b"\n":
                break
            at -= 1
        if at < end:
            file.truncate(at)
