"""The ledger, ledger.jsonl: one line for each event in a ticket's life, and for each fault of the run. Lines are only
appended, never changed.

A ticket is issued, and then trained, evaluated or dropped with a reason. In between its group is generated, and it may
be reissued because an actor died while it had the ticket. The lines `generated` and `trained` have a checksum of the
group's tokens, of which of them the policy sampled, and of their versions: of what left the generator, and of what the
trainer took. The line `resumed` says that the run resumed from a checkpoint, and names its version: all
earlier events of tickets for that step and later ones are void, and these tickets are issued again. Some lines are
about the run, not about a ticket: lost, joined, resumed, ended.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from asyncspec import lock
from asyncspec.deadlines import LEDGER_S
from asyncspec.files import LineFiles
from asyncspec.wire.messages import Ticket

FILE = "ledger.jsonl"
_OF_TICKET = ("ticket", "step")
_FIELDS = {
    "issued": _OF_TICKET,
    "generated": (*_OF_TICKET, "checksum"),
    "trained": (*_OF_TICKET, "trained_in", "version_min", "version_max"),
    "evaluated": _OF_TICKET,
    "dropped": _OF_TICKET,
    "resumed": ("version",),
}  # event -> its fields that must be whole numbers


class Ledger:
    """The writing end of a run's ledger. A lock ensures that only one process writes it."""

    def __init__(self, files: LineFiles) -> None:
        """
        Args:
            files: the run's files.

        Raises:
            OSError: it cannot be opened, or another process still writes it.
        """
        self._file = files.open(FILE)
        self._lock = _locked(files.folder / FILE)
        _cut_torn_end(files.folder / FILE)

    def write(self, event: str, ticket: Ticket, **details) -> None:
        """Write an event in a ticket's life."""
        self.note(
            event,
            ticket=ticket.ticket_id,
            step=ticket.step,
            min_version=ticket.min_version,
            evaluation=ticket.evaluation,
            **details,
        )

    def note(self, event: str, **details) -> None:
        """Write an event of the run."""
        self._file.write(json.dumps({"time": round(time.time(), 3), "event": event, **details}) + "\n")

    def sync(self) -> None:
        """Flush the lines to the disk, and check that the file is still there."""
        self._file.sync()

    def close(self) -> None:
        self._file.close()
        self._lock.release()


def read(run_dir: Path) -> Iterator[dict]:
    """Yield the events of a run. An incomplete last line is left out.

    Raises:
        ValueError: another line is damaged, or lacks a field of its event; the message names the line.
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
    """Whether a process is writing the ledger now."""
    return lock.held(run_dir / FILE)


def torn(run_dir: Path) -> bool:
    """Whether the last line is incomplete, because the process that wrote it died or had no room on the disk."""
    text = (run_dir / FILE).read_bytes()
    return bool(text) and not text.endswith(b"\n")


def ended(events: Sequence[dict]) -> bool:
    """Whether the run was ended by its controller, and not cut short."""
    return bool(events) and events[-1]["event"] == "ended"


def finished(events: Sequence[dict]) -> bool:
    """Whether the run was ended because all its steps were trained, and without a failure."""
    return ended(events) and events[-1].get("reason") == "finished" and not events[-1].get("failure")


def open_tickets(events: Iterable[dict]) -> dict[int, dict]:
    """Return the tickets that were issued and have no end yet: ticket id -> the event that issued it."""
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
    """Return the number of trained tickets that resuming from `version` makes void."""
    steps: list[int] = []  # the step of each trained ticket
    for event in events:
        if event["event"] == "resumed":
            steps = [step for step in steps if step < event["version"]]
        elif event["event"] == "trained":
            steps.append(event["step"])
    return sum(step >= version for step in steps)


def _locked(file: Path) -> lock.Lock:
    """Lock the ledger. A controller whose launcher has died may need a moment to release its lock."""
    deadline = time.monotonic() + LEDGER_S
    while True:
        try:
            return lock.Lock(file)
        except lock.Taken:
            if time.monotonic() > deadline:
                raise OSError(f"{FILE}: another process is still writing it after {LEDGER_S:.0f} s") from None
            time.sleep(0.05)


def _cut_torn_end(path: Path) -> None:
    """Remove an incomplete last line, left by a writer that died."""
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
