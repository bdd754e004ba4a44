"""timeline.jsonl: every step as the trainer reported it, with the history of each group: what reports and what-if
answers are made of.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from asyncspec.files import replace_file
from asyncspec.wire.messages import StepDone

FILE = "timeline.jsonl"


class TimelineFile:
    def __init__(self, run_dir: Path, first_step: int = 0) -> None:
        """
        Args:
            first_step: what an earlier part of the run wrote of this step and later ones is void.
        """
        if (run_dir / FILE).exists():
            kept = [msgspec.json.encode(step) + b"\n" for step in read(run_dir) if step.step < first_step]
            replace_file(run_dir / FILE, b"".join(kept))
        self._file = open(run_dir / FILE, "ab", buffering=0)

    def write(self, step: StepDone) -> None:
        self._file.write(msgspec.json.encode(step) + b"\n")

    def close(self) -> None:
        self._file.close()


def read(run_dir: Path) -> Iterator[StepDone]:
    """The steps of a run, in order; a line cut short by a crash ends it.

    Raises:
        FileNotFoundError: the run has none.
    """
    decoder = msgspec.json.Decoder(StepDone)
    with open(run_dir / FILE, "rb") as lines:
        for line in lines:
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError:
                return
