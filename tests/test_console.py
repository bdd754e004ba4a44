"""Output for people is dropped where it cannot be written, and nothing else happens."""

import errno
import io
import os
import pty
import subprocess
import sys
import termios

import pytest

from asyncspec import console
from asyncspec.timing.exporters import TraceFile

# Prints more than a pipe holds, in all ways in which a program prints, then proves that it is still there.
PRINTS = """
import os, sys
from asyncspec.console import never_fail, terminal

never_fail()
out = terminal()
for number in range(3000):
    print("\\u2713 step", number)
    print("\\u2713 step", number, file=sys.stderr)
    out.print("\\u2713 step", number)
sys.stdout.buffer.write(b"bytes" * 100_000)
sys.stdout.flush()
os.close(os.open("done", os.O_CREAT | os.O_WRONLY))
"""


@pytest.mark.parametrize(
    "stdout, stderr, environment",
    [
        ("a pipe without a reader", "a pipe without a reader", {}),
        ("/dev/full", "/dev/full", {}),
        ("closed", "closed", {}),
        ("/dev/null", "/dev/full", {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
        ("/dev/full", "/dev/null", {"PYTHONIOENCODING": "ascii"}),
    ],
)
def test_output_that_cannot_be_written_ends_no_process(tmp_path, stdout, stderr, environment):
    read, write = os.pipe()
    os.close(read)
    to = {"a pipe without a reader": f">&{write}", "closed": ">&-"}
    redirected = f"1{to.get(stdout, f'>{stdout}')} 2{to.get(stderr, f'>{stderr}')}"
    done = subprocess.run(
        ["bash", "-c", f'exec "$0" -c "$1" {redirected} </dev/null', sys.executable, PRINTS],
        cwd=tmp_path,
        pass_fds=[write],
        env=os.environ | environment,
        timeout=60,
    )
    os.close(write)
    assert done.returncode == 0 and (tmp_path / "done").exists()


def test_characters_that_an_encoding_lacks_are_written_as_escapes(tmp_path):
    program = 'from asyncspec.console import never_fail; never_fail(); print("\\u2713 done")'
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONIOENCODING": "ascii"}, stdout=subprocess.PIPE
    )
    assert done.returncode == 0 and done.stdout == b"\\u2713 done\n"


def test_a_closed_standard_stream_gives_its_number_to_no_other_file(tmp_path):
    program = (
        "import sys; from asyncspec.console import never_fail; never_fail(); "
        "file = open('records', 'w'); print('for people'); sys.exit(file.fileno())"
    )
    command = ["bash", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, program]
    assert subprocess.run(command, cwd=tmp_path).returncode > 2 and (tmp_path / "records").read_text() == ""


def test_a_reader_that_stops_to_read_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(console, "PATIENCE_S", 0.01)
    read, write = os.pipe()
    stream = io.TextIOWrapper(io.BufferedWriter(console._Dropping(write)), line_buffering=True)
    for number in range(3000):  # far more than the pipe holds
        print(f"line {number} {'x' * 100}", file=stream)
    said = os.read(read, 1 << 20).decode()
    assert said.startswith("line 0 x") and "line 2999" not in said
    print("it reads again", file=stream)
    assert os.read(read, 1 << 20).decode().endswith("it reads again\n")
    assert os.get_blocking(write)  # other processes share the mode of this one
    os.close(read)
    print("it is gone", file=stream)


def test_a_terminal_that_is_halted_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(console, "PATIENCE_S", 0.01)
    ours, theirs = pty.openpty()
    stream = io.TextIOWrapper(io.BufferedWriter(console._Dropping(theirs)), line_buffering=True)
    assert stream.isatty() and stream.fileno() == theirs
    termios.tcflow(theirs, termios.TCOOFF)  # as Ctrl-S does
    print("nobody sees this", file=stream)
    termios.tcflow(theirs, termios.TCOON)
    print("it is on again", file=stream)
    assert os.read(ours, 1 << 16) == b"it is on again\r\n"
    os.close(ours)  # the terminal is closed
    print("nobody sees this", file=stream)


def test_a_stream_that_somebody_else_has_put_there_is_left_alone(capsys):
    console.never_fail()
    print("seen")
    assert capsys.readouterr().out == "seen\n"


def redirected(run_dir, program):
    """Run a program in a process whose output goes to the log of an actor."""
    begin = (
        "import sys; from asyncspec.actors.base import ActorSpec, redirect_output\n"
        f"redirect_output(ActorSpec('generator', 'generator0', {str(run_dir)!r}, ''))\n"
    )
    return subprocess.run([sys.executable, "-c", begin + program], capture_output=True, text=True, timeout=120)


def test_an_actor_prints_into_its_log_and_may_go_on_printing_when_the_disk_is_full(tmp_path):
    program = "print('\\u2713 a reward prints this')\nprint('and this', file=sys.stderr)"
    done = redirected(tmp_path, program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    log = tmp_path / "logs" / "generator0.log"
    assert log.read_text() == "\u2713 a reward prints this\nand this\n"
    log.unlink()
    log.symlink_to("/dev/full")
    assert redirected(tmp_path, f"{program}\nsys.stdout.flush()").returncode == 0


def test_an_actor_without_a_log_says_so_and_runs(tmp_path):
    (tmp_path / "logs").touch()
    done = redirected(tmp_path, "print('into nothing')")
    log = tmp_path / "logs" / "generator0.log"
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"generator0 writes no log: {log}: File exists\n"


def test_a_trace_that_cannot_be_written_is_dropped_and_named_once(tmp_path, monkeypatch):
    said = []
    (tmp_path / "a file").touch()
    TraceFile(tmp_path / "a file", said.append).close()
    assert said == [f"{tmp_path}/a file/trace.json cannot be written: Not a directory; the rest goes on without it"]
    trace = TraceFile(tmp_path, said.append)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    trace.write("generator0", [])
    trace.write("generator0", [])
    trace.close()
    monkeypatch.undo()
    assert said[1:] == [
        f"{tmp_path}/trace.json cannot be written: No space left on device; the rest goes on without it"
    ]


INTERRUPTED = """
import os, signal, sys
from asyncspec.launch.interrupt import InterruptFlag

if sys.argv[1] == "ignored":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
flag, seen = InterruptFlag(), []
for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
    os.kill(os.getpid(), number)
    seen.append(flag.count)
print(*seen)
"""


@pytest.mark.parametrize("sighup, seen", [("handled", "1 1 2"), ("ignored", "0 0 1")])
def test_a_closed_terminal_interrupts_once_unless_sighup_is_ignored(sighup, seen):
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, sighup], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == seen, done.stderr
