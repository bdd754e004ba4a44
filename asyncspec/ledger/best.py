"""The best version of a run: its checkpoint is kept, with what it scored.

    RUN/best/best.json            version, score, the bounds of its interval, the set, the checkpoint's folder
    RUN/best/trainer-000040/      the checkpoint, hard links to the files of RUN/checkpoints/trainer-000040
    RUN/best/policy/              the same weights as a Hugging Face directory, written when the run ends

Only an evaluation counts in which one version sampled everything, so the score belongs to exactly the weights that are
kept. Of equal scores the earlier version is kept. A checkpoint that is written in the background may be complete before
the evaluation or after it: a version is kept when both are. `best.json` is replaced last, so it always names a whole
checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from asyncspec.errors import first_line
from asyncspec.files import write_json
from asyncspec.ledger import checkpoint

FOLDER, FILE, POLICY = "best", "best.json", "policy"


class Best:
    """Keeps the checkpoint of the version with the best score."""

    def __init__(self, run_dir: Path, eval_set: str, tell: Callable[[str], None]) -> None:
        """
        Args:
            eval_set: the set whose score counts; "": all held-out prompts.
            tell: called with one line when a version is kept, or cannot be.
        """
        self.run_dir, self.eval_set, self._tell = run_dir, eval_set, tell
        self._score = f"eval/{eval_set}/score" if eval_set else "eval/score"
        self._kept = read(run_dir)
        self._waiting: dict[str, Any] | None = None  # the record of a better version without a checkpoint so far
        self._settled = -1  # the newest version whose checkpoint was completed or given up

    def evaluated(self, evaluation: Mapping[str, Any]) -> None:
        """Note the eval/ fields of a complete evaluation."""
        version, score = evaluation["eval/policy_version"], evaluation.get(self._score)
        better = [known["score"] for known in (self._kept, self._waiting) if known is not None]
        if score is None or any(score <= each for each in better):
            return
        if version != (newest := evaluation["eval/policy_version_max"]):
            self._tell(f"version {version} scored best, but versions up to {newest} sampled too; it is not kept")
            return
        self._waiting = {
            "version": version,
            "score": score,
            "score_low": evaluation.get(f"{self._score}_low"),
            "score_high": evaluation.get(f"{self._score}_high"),
            "set": self.eval_set,
            "checkpoint": checkpoint.where(self.run_dir, "trainer", version).name,
        }
        self._settle()

    def settled(self, version: int) -> None:
        """Note that the trainer has completed the checkpoint of a version, or given it up."""
        self._settled = max(self._settled, version)
        self._settle()

    def resume(self, evaluations: Iterable[Mapping[str, Any]]) -> None:
        """Note the evaluations of an earlier part of the run, as far as their checkpoints are there."""
        for evaluation in evaluations:
            if checkpoint.where(self.run_dir, "trainer", evaluation["eval/policy_version"]).is_dir():
                self.evaluated(evaluation)

    def awaits(self, version: int) -> bool:
        """Whether a version scored best, and its checkpoint is still to come."""
        return self._waiting is not None and self._waiting["version"] == version

    def _settle(self) -> None:
        """Keep the better version if its checkpoint is there. One that never comes is not waited for: checkpoints are
        written one at a time, in the order of their versions.
        """
        if (record := self._waiting) is None:
            return
        version, there = record["version"], (self.run_dir / checkpoint.FOLDER / record["checkpoint"]).is_dir()
        if not there and self._settled < version:
            return
        self._waiting = None
        if not there:
            self._tell(f"version {version} scored best, but has no checkpoint; it is not kept")
            return
        try:
            self._keep(record)
        except OSError as error:
            self._tell(f"version {version} scored best, but cannot be kept: {error.strerror or first_line(error)}")
            return
        self._kept = record
        self._tell(f"version {version} scored best so far: kept in {self.run_dir / FOLDER}")

    def _keep(self, record: dict[str, Any]) -> None:
        folder, name = self.run_dir / FOLDER, record["checkpoint"]
        partial = folder / f"{name}{checkpoint.PARTIAL}"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(self.run_dir / checkpoint.FOLDER / name, partial, copy_function=_link)
        shutil.rmtree(folder / POLICY, ignore_errors=True)  # of the version before
        shutil.rmtree(folder / name, ignore_errors=True)  # of the same version, before a rewind
        partial.rename(folder / name)
        write_json(folder / FILE, record)
        for other in folder.glob("trainer-*"):
            if other.name != name:
                shutil.rmtree(other, ignore_errors=True)


def read(run_dir: Path) -> dict[str, Any] | None:
    """Return the record of the best version that a run keeps; None if it keeps none."""
    try:
        found = json.loads((run_dir / FOLDER / FILE).read_text(encoding="utf-8"))
        return found if (run_dir / FOLDER / found["checkpoint"]).is_dir() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _link(source: str, target: str) -> None:
    """Link a file, or copy it where that is not possible."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
