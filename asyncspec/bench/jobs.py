"""Whole jobs and draft trainings, each in a process of its own, for the benchmarks that measure them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from asyncspec.errors import UserError
from asyncspec.timing.metrics import read_rows


def job_dir(out: Path, variant: str, repetition: int) -> Path:
    """Return the directory of a variant's run."""
    return out / f"{variant.replace(',', '').replace(' ', '-')}-{repetition}"


def run_job(
    run_dir: Path,
    *arguments: str,
    beside: Callable[[subprocess.Popen], None] | None = None,
    expected: Sequence[int] = (0,),
    resume: bool = False,
) -> list[dict]:
    """Run `asyncspec train`; return the rows of its metrics.

    Args:
        beside: called with the process while it runs.
        expected: the exit codes to accept.
        resume: resume the run in that directory.

    Raises:
        UserError: the run ended with another exit code; the message quotes its last line.
    """
    _run(
        ["train", "--resume" if resume else "--run-dir", str(run_dir), *arguments],
        f"the run {run_dir}",
        beside,
        expected,
    )
    return read_rows(run_dir / "metrics.jsonl")


def run_again(out: Path, variant: str, repetition: int, *arguments: str) -> tuple[Path, list[dict]]:
    """Run a variant's job, with the repetition as its seed; return its directory and the rows of its metrics. What a
    sitting that was cut short has left there is removed.
    """
    directory = job_dir(out, variant, repetition)
    shutil.rmtree(directory, ignore_errors=True)
    return directory, run_job(directory, f"seed={repetition}", *arguments)


def train_draft(out: Path, *arguments: str) -> None:
    """Run `asyncspec draft train`.

    Raises:
        UserError: the training failed; the message quotes its last line.
    """
    _run(["draft", "train", "--out", str(out), *arguments], f"training the draft {out}")


def _run(arguments: list[str], what: str, beside=None, expected: Sequence[int] = (0,)) -> None:
    die_with = [sys.executable, "-m", "asyncspec.parent", str(os.getpid())]
    command = [*die_with, sys.executable, "-m", "asyncspec.cli", *arguments]
    # A file, not a pipe: a pipe could fill up, because nobody reads it while `beside` runs.
    with (
        tempfile.TemporaryFile("w+") as written,
        subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT) as process,
    ):
        try:
            if beside is not None:
                beside(process)
            process.wait()
        except BaseException:
            process.terminate()
            raise
        written.seek(0)
        output = written.read()
    if process.returncode not in expected:
        lines = [line for line in output.splitlines() if line.startswith(("failed:", "asyncspec:"))] or [""]
        raise UserError(f"{what} ended with code {process.returncode}: {lines[-1]}")
