"""Processes that a fork server makes are to whoever starts them like any others."""

import os
import signal
import subprocess
import sys

import pytest

from asyncspec.launch.forkserver import ForkServer
from runs import alive, descendants, gone_within

PLAYED = """
import os, sys, time
what, *rest = sys.argv[1:]
if what == "say":
    loaded = "fractions" in sys.modules
    print(os.getcwd(), repr(os.environ.get("WHAT")), loaded, __name__, rest, sys.stdin.read(), len(os.listdir("/proc/self/fd")), flush=True)
    print("and more", file=sys.stderr)
elif what == "tell":
    os.write(int(rest[0]), b"told")
elif what == "end":
    sys.exit(rest[0] if rest[0] == "a reason" else int(rest[0]))
elif what == "raise":
    raise RuntimeError("a trouble")
elif what == "kill":
    os.kill(os.getpid(), int(rest[0]))
elif what == "sleep":
    print(os.getpid(), flush=True)
    time.sleep(60)
"""


@pytest.fixture
def started(tmp_path, monkeypatch):
    """callable(what, ...) -> the process; and the server."""
    (tmp_path / "played.py").write_text(PLAYED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    server, processes = ForkServer(["fractions"]), []

    def start(*args, keep=(), **how):
        command = server.command("played", *args, keep=keep)
        processes.append(subprocess.Popen(command, pass_fds=[server.descriptor, *keep], text=True,
                                          **dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) | how))
        return processes[-1]

    start.server = server
    yield start
    server.close()
    for process in processes:
        process.communicate(timeout=10)


def test_it_has_a_directory_an_environment_arguments_and_streams_of_its_own(started, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    environment = {**os.environ, "WHAT": "first \udcff"}  # a byte that is no character
    process = started("say", "two words", "", stdin=subprocess.PIPE, cwd=tmp_path / "elsewhere", env=environment)
    said, more = process.communicate("given", timeout=20)[0].splitlines()
    assert said.startswith(f"{tmp_path / 'elsewhere'} 'first \\udcff' True __main__ ['two words', ''] given") and more == "and more"
    # Nothing of the server's, or of other processes that it has forked, is open in it: 0, 1, 2 and the listing itself.
    others = [started("sleep") for _ in range(2)]
    for other in others:
        other.stdout.readline()
    assert started("say").communicate(timeout=20)[0].splitlines()[0].split()[-1] == "4"


def test_it_may_inherit_more(started):
    read, write = os.pipe()
    process = started("tell", str(write), keep=[write])
    os.close(write)
    assert os.read(read, 100) == b"told" and os.read(read, 100) == b""  # nobody holds the other end any more
    os.close(read)
    assert process.wait(10) == 0


@pytest.mark.parametrize("what,code", [(("end", "0"), 0), (("end", "7"), 7), (("end", "a reason"), 1), (("raise",), 1), (("kill", "9"), -9), (("kill", "11"), -11)])
def test_its_end_is_that_of_the_process_that_stands_for_it(started, what, code):
    process = started(*what)
    said = process.communicate(timeout=20)[0]
    assert process.returncode == code
    assert {"end": "a reason" if "a reason" in what else "", "raise": "RuntimeError: a trouble", "kill": ""}[what[0]] in said


def test_it_ends_with_the_process_that_stands_for_it_and_the_server_goes_on(started):
    frozen, other = started("sleep"), started("sleep")
    pids = [int(process.stdout.readline()) for process in (frozen, other)]
    os.kill(pids[0], signal.SIGSTOP)
    frozen.kill()
    assert not gone_within(pids[:1], 5) and alive(pids[1:]) and other.poll() is None
    assert started("end", "3").wait(10) == 3


def test_it_ends_with_the_server_and_another_server_is_begun(started):
    process = started("sleep")
    pid, first = int(process.stdout.readline()), started.server._process.pid
    os.kill(first, signal.SIGKILL)
    assert not gone_within([pid], 5) and process.wait(10) == -signal.SIGKILL
    started.server._process.wait()
    again = started("sleep")
    again.stdout.readline()
    assert started.server._process.pid != first and len(descendants(started.server._process.pid)) == 1


def test_without_a_server_the_module_is_run_as_python_would_and_ends_with_who_asked(started):
    command = started.server.command("played", "sleep")
    started.server._process.kill()
    started.server._process.wait()
    process = subprocess.Popen(command, pass_fds=[started.server.descriptor], stdout=subprocess.PIPE, text=True)
    assert int(process.stdout.readline()) == process.pid
    process.kill()
    process.communicate()
    text = f"import os, subprocess, time; subprocess.Popen({command[:5]!r} + [str(os.getpid())] + {command[6:]!r}); time.sleep(60)"
    asking = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    pid = int(asking.stdout.readline())
    asking.kill()
    asking.communicate()
    assert not gone_within([pid], 5)
