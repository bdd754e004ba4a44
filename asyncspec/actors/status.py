"""The file status.json of a run: who is up, what is waited for, the lag, and when it will end. `asyncspec status` reads
it. The controller writes it every few seconds, so that it tells something also when nobody can be asked.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from asyncspec.actors.crew import Life
from asyncspec.files import replace_file
from asyncspec.ledger.status import FILE, Actor, Status

if TYPE_CHECKING:
    from asyncspec.actors.run import Run
    from asyncspec.actors.schedule import Schedule

EVERY_S = 2.0
MOST_NAMED = 20  # actors that are not ready; more are only counted


class StatusFile:
    """Writes status.json from time to time."""

    def __init__(self, run: Run, schedule: Schedule) -> None:
        self.run, self.schedule, self._file = run, schedule, Path(run.records.run_dir) / FILE
        self._written, self._began = 0.0, time.time()
        self.latest: Status | None = None

    def write(self, waits_for: Callable[[], str], last: bool = False) -> None:
        """Write the file, if that is due. A disk that is full loses it, and nothing else.

        Args:
            waits_for: returns what the run waits for, in words.
            last: whether the run has ended. Until then one that stops still goes on.
        """
        if not last and time.monotonic() - self._written < EVERY_S:
            return
        self._written = time.monotonic()
        self.latest = self.status(waits_for(), last)
        with suppress(OSError):
            replace_file(self._file, msgspec.json.encode(self.latest) + b"\n")

    def status(self, waits_for: str, last: bool) -> Status:
        """Return what the file says."""
        run, schedule, records = self.run, self.schedule, self.run.records
        present = run.crew.present
        odd = [member for member in present if member.life is not Life.READY]
        generating, generated = run.book.training()
        row, counters = records.metrics.last or {}, records.counters
        return Status(
            time=time.time(),
            began=self._began,
            ended=run.stop_reason if last else "",
            failure=run.failure,
            step=schedule.trained_steps,
            steps=run.config.steps,
            version=schedule.clock.version,
            lag=row.get("lag/max", 0.0),
            most_lag=run.config.policy_lag,
            step_s=row.get("time/step", 0.0),
            left_s=records.console.left_s(schedule.trained_steps),
            score=row.get("eval/score"),
            up=dict(Counter(member.role for member in present if member.life is Life.READY)),
            others=[
                Actor(member.name, member.role, member.life.value, run.crew.vigil.silence(member.name), member.error)
                for member in odd[:MOST_NAMED]
            ],
            more=max(0, len(odd) - MOST_NAMED),
            lost=lost_of(counters),
            restarts=int(counters.get("recovery/restarts", 0)),
            waiting=len(run.book.pending),
            generating=generating,
            generated=generated,
            waits_for=waits_for,
        )


def lost_of(counters: Mapping[str, float]) -> dict[str, int]:
    """Return how many actors of each role were lost, from the metrics that count them."""
    names = ((re.fullmatch(r"recovery/(\w+)s_lost", name), count) for name, count in counters.items())
    lost = {found[1]: int(count) for found, count in names if found}
    return lost | ({"draft_adapter": 1} if "draft/adapter_lost" in counters else {})
