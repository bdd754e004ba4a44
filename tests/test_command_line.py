"""The command line: its help, and wrong words and flags, each of which is one line."""

import subprocess
import sys
from importlib.metadata import version

import pytest

import asyncspec
from asyncspec.config import Config
from asyncspec.config.fields import describe


@pytest.mark.parametrize(
    "args,expected",
    [
        (["train", "steps=3", "--seed", "2", "polcy_lag=1"], "nearest valid choice: policy_lag"),
        (["bench", "engine", "--repeats", "2", "sed=1"], "sed in the overrides"),
        (["train", "--stesp", "3"], "--stesp: no such flag; nearest: --steps"),
        (["train", "--lr=1"], "--lr=1: no such flag; nearest: trainer.optimizer.lr=1"),
        (
            ["trian"],
            "'trian': expected one of train, host, draft, doctor, data, export, serve, plan, simulate, status, report, "
            "audit, bench, before any flag; nearest: train",
        ),
        (["bench", "async", "--repeats", "two"], "invalid int value: 'two'"),
        (["bench", "async", "--repeats", "0"], "--repeats 0: expected 1 or more"),
        (["bench", "async", "--out", "/proc/x"], "--out /proc/x: "),
        (
            ["bench", "async", "--only", "lag 2"],
            "--only 'lag 2': expected the beginning of a variant, for example 'lag 0'; nearest: lag",
        ),
    ],
)
def test_wrong_command_lines_give_one_clear_line(args, expected, capsys):
    from asyncspec.cli import main

    try:
        code = main(args)
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2 and expected in error and error.count("\n") == 1


def test_help_lists_flags_and_every_field_with_its_meaning():
    text = subprocess.run(
        [sys.executable, "-m", "asyncspec.cli", "train", "--help"], capture_output=True, text=True, check=True
    ).stdout
    for word in ("--config", "--policy-lag", "--steps", "--run-dir", "--seed"):
        assert word in text
    for name, default, metadata in describe(Config):
        assert metadata["help"] and f"{name}={default} {metadata['help']}" in " ".join(text.split())


def test_a_typo_ends_the_command_with_one_line():
    result = subprocess.run(
        [sys.executable, "-m", "asyncspec.cli", "train", "trainer.optimiser.lr=1"], capture_output=True, text=True
    )
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.count("\n") == 1 and "trainer.optimizer.lr" in result.stderr


def test_the_installed_version_is_the_one_that_the_command_prints():
    assert version("asyncspec") == asyncspec.__version__
