"""Whole runs whose console, disk or terminal goes away: they lose nothing, and say what happened."""

import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from runs import SCRIPT, SMALL, TORCHRUN, Running, alive, check_finished, descendants, rows

from asyncspec.errors import UserError
from asyncspec.launch.resume import configure
from asyncspec.ledger.audit import audit
from asyncspec.ledger.ledger import read

REWARD = """
import os, sys

def prints(prompt, response, answer):
    print("a reward prints this", "x" * 10_000)
    print("and this", file=sys.stderr)
    return float(os.environ["TMPDIR"] == os.environ["EXPECTED"] and "XDG_RUNTIME_DIR" not in os.environ)
"""


@pytest.mark.parametrize("launcher", ["monarch", "torchrun"])
@pytest.mark.slow
def test_a_run_goes_on_without_its_reader_its_log_and_room_for_sockets(tmp_path, launcher):
    """The console is a pipe to a program that ends, the generator's log is on a full disk, and TMPDIR is too long for
    sockets. The user's code sees the user's TMPDIR.
    """
    run_dir, steps = tmp_path / "run", 3
    (tmp_path / "mine.py").write_text(REWARD)
    (run_dir / "logs").mkdir(parents=True)
    (run_dir / "logs" / "generator0.log").symlink_to("/dev/full")
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        long = Path(short, "d" * 150)
        long.mkdir()
        environment = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}
        environment |= {"TMPDIR": str(long), "EXPECTED": str(long), "USER": "somebody"}
        environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{environment.get('PYTHONPATH', '')}"
        command = [*TORCHRUN, SCRIPT] if launcher == "torchrun" else [sys.executable, SCRIPT]
        options = ["--launcher", launcher, "--steps", str(steps), "data.reward=mine:prints", "eval.every=0"]
        run = subprocess.Popen(
            [*command, "--run-dir", str(run_dir), *SMALL, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=tmp_path,
            start_new_session=True,
        )
        everyone = descendants(run.pid)
        said = run.stdout.readline()
        run.stdout.close()
        assert run.wait(400) == 0, said
        # torch makes a cache for its compiler, and torchrun a directory for its logs.
        left = [name for name in os.listdir(long) if not name.startswith(("torchinductor_", "torchelastic_"))]
        assert left == []
    check_finished(run_dir, steps)
    assert all(row["reward/mean"] == 1 for row in rows(run_dir))
    assert (run_dir / "checkpoint" / "policy" / "model.safetensors").is_file()
    assert (run_dir / "checkpoints" / f"trainer-{steps:06}" / "manifest.json").is_file()
    assert json.loads((run_dir / "trace.json").read_text()) and not alive(everyone)


@pytest.mark.slow
def test_a_run_whose_terminal_is_closed_ends_with_its_checkpoint(tmp_path):
    run_dir = tmp_path / "run"
    pid, terminal = pty.fork()
    if not pid:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored
        os.execv(sys.executable, [sys.executable, SCRIPT, "--run-dir", str(run_dir), "--steps", "10000", *SMALL])
    shown = threading.Thread(target=_read, args=(terminal, run_dir), daemon=True)
    shown.start()
    shown.join(400)
    everyone = descendants(pid)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    trained = len(rows(run_dir))
    assert trained >= 2 and list(read(run_dir))[-1]["reason"] == "interrupted" and audit(str(run_dir)) == 0
    assert (run_dir / "checkpoints" / f"trainer-{trained:06}" / "manifest.json").is_file()
    assert not alive(everyone)


def _read(terminal, run_dir):
    """Read what a terminal shows until two steps are trained."""
    with suppress(OSError):
        while len(rows(run_dir)) < 2 and os.read(terminal, 1 << 16):
            pass


@pytest.mark.slow
def test_a_run_that_can_no_longer_be_recorded_ends_with_its_policy_and_names_the_file(tmp_path, capsys):
    run_dir = tmp_path / "run"
    run = Running.new(run_dir, "--steps", "10000", "deployment.restarts=0")
    run.wait_for_steps(2)
    (run_dir / "ledger.jsonl").rename(tmp_path / "ledger.jsonl")
    output = run.end(1)
    assert f"failed: {run_dir}/ledger.jsonl cannot be written: No such file or directory\n" in output, output
    assert f"to resume: asyncspec train --resume {run_dir}\n" in output and "Traceback" not in output
    assert (run_dir / "checkpoint" / "policy" / "model.safetensors").is_file()
    assert any((run_dir / "checkpoints").glob("trainer-*/manifest.json"))
    (tmp_path / "ledger.jsonl").rename(run_dir / "ledger.jsonl")
    capsys.readouterr()
    assert audit(str(run_dir)) == 0
    said = capsys.readouterr().out
    assert "unfinished: the run was cut short, its ledger has no end; " in said and "violated" not in said
    assert f"to continue: asyncspec train --resume {run_dir}\n" in said


@pytest.mark.parametrize(
    "last, finished",
    [
        ({"event": "ended", "reason": "finished", "failure": ""}, True),
        ({"event": "ended", "reason": "finished"}, True),
        ({"event": "ended", "reason": "finished", "failure": "trainer failed: no space"}, False),
        ({"event": "ended", "reason": "interrupted", "failure": ""}, False),
        ({"event": "ready"}, False),
    ],
)
def test_a_run_that_was_cut_short_after_its_last_step_can_be_resumed(tmp_path, last, finished):
    """Its policy may not be written yet."""
    from asyncspec.config import load, to_yaml

    (tmp_path / "config.yaml").write_text(to_yaml(load("tiny", ["steps=2"])))
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    (tmp_path / "ledger.jsonl").write_text(json.dumps(last) + "\n")
    if not finished:
        assert configure(str(tmp_path), None, []).steps == 2
        return
    with pytest.raises(UserError, match="2 steps are trained, and steps=2 adds none; expected more, steps=4 for"):
        configure(str(tmp_path), None, [])
    assert configure(str(tmp_path), None, ["steps=3"]).steps == 3


def test_a_damaged_ledger_is_named_before_a_run_resumes(tmp_path):
    from asyncspec.config import load, to_yaml

    (tmp_path / "config.yaml").write_text(to_yaml(load("tiny", ["steps=2"])))
    (tmp_path / "ledger.jsonl").write_text('{"event": "ready"}\nno event\n{"event": "ready"}\n')
    with pytest.raises(UserError, match=f"^--resume {tmp_path}: ledger.jsonl, line 2: not an event: 'no event'$"):
        configure(str(tmp_path), None, [])
