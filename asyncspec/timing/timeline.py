"""timeline.jsonl: every step as the trainer reported it, with each group's history. Reports and what-if answers are
computed from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from asyncspec.files import LineFiles, replace_file
from asyncspec.wire.messages import StepDone

FILE = "timeline.jsonl"


class TimelineFile:
    """Writer of timeline.jsonl."""

    def __init__(self, files: LineFiles, first_step: int = 0) -> None:
        """Open the file.

        Args:
            files: the run's files.
            first_step: the step that the run starts or resumes with. This step and later ones, which an earlier part
                of the run wrote, are removed.
        """
        if (files.folder / FILE).exists():
            kept = [msgspec.json.encode(step) + b"\n" for step in read(files.folder) if step.step < first_step]
            replace_file(files.folder / FILE, b"".join(kept))
        self._file = files.open(FILE)

    def write(self, step: StepDone) -> None:
        self._file.write(msgspec.json.encode(msgspec.structs.replace(step, shown=[])) + b"\n")

    def close(self) -> None:
        self._file.close()


def read(run_dir: Path) -> Iterator[StepDone]:
    """Yield the steps of a run in order, up to a line that a crash cut short.

    Raises:
        FileNotFoundError: the run has no timeline.
    """
    decoder = msgspec.json.Decoder(StepDone)
    with open(run_dir / FILE, "rb") as lines:
        for line in lines:
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError:
                return
