"""The results of a run's evaluations: evaluations.jsonl, one line with the eval/ fields for each complete one."""

from __future__ import annotations

import json
from pathlib import Path

from asyncspec.files import LineFiles, replace_file
from asyncspec.timing.metrics import read_rows

FILE = "evaluations.jsonl"
OLDEST, NEWEST = "eval/policy_version", "eval/policy_version_max"
Fields = dict[str, float | int | None]
NONE: Fields = {"eval/score": None, "eval/solved": None, OLDEST: -1, NEWEST: -1}  # before the first evaluation


class EvaluationFile:
    """The results on disk. Those that a rewind has undone are removed: newer versions sampled in them."""

    def __init__(self, files: LineFiles, first_step: int) -> None:
        """
        Args:
            first_step: the version that the run starts or resumes from.

        Raises:
            OSError: the file cannot be written.
        """
        self.found = read(files.folder)
        if kept := [fields for fields in self.found if fields[NEWEST] <= first_step]:
            replace_file(files.folder / FILE, "".join(json.dumps(fields) + "\n" for fields in kept))
        else:
            (files.folder / FILE).unlink(missing_ok=True)
        self.found = kept
        self._file = files.open(FILE)

    def write(self, fields: Fields) -> None:
        self.found.append(fields)
        self._file.write(json.dumps(fields) + "\n")

    def close(self) -> None:
        self._file.close()


def read(run_dir: Path) -> list[dict]:
    """Return the complete evaluations of a run, in the order in which they ended."""
    path = run_dir / FILE
    rows = read_rows(path) if path.exists() else []
    return [row for row in rows if type(row.get(OLDEST)) is int and type(row.get(NEWEST)) is int]
