"""Monarch's sockets are in a short directory of their own, which disappears."""

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from asyncspec.errors import UserError
from asyncspec.launch import scratch


@pytest.fixture
def short():
    """A directory with a short path."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


@pytest.mark.parametrize("directory", ["", "missing", "d" * 150, "a file"])
def test_the_users_temporary_directory_need_not_hold_sockets(short, monkeypatch, directory):
    asked = short / directory
    fallback = short / "fallback"
    fallback.mkdir()
    if directory == "a file":
        asked.touch()
    elif directory != "missing":
        asked.mkdir(exist_ok=True)
    monkeypatch.setenv("TMPDIR", str(asked))
    monkeypatch.setattr(scratch, "_ELSEWHERE", (str(fallback),))
    with scratch.directory() as path:
        assert os.path.dirname(path) == (str(fallback) if directory else str(asked)) and os.listdir(path) == ["lock"]
        assert len(path) + len("/.tmpabcdef/0123456789ab") <= 107
    assert not os.path.exists(path) and os.listdir(fallback) == []


def test_a_host_without_room_for_sockets_is_named_in_one_line(short, monkeypatch):
    monkeypatch.setenv("TMPDIR", f"{short}/missing")
    monkeypatch.setattr(scratch, "_ELSEWHERE", ("/proc",))
    with pytest.raises(UserError, match=f"^TMPDIR='{short}/missing': .*: No such file or directory; expected [^\n]+$"):
        scratch.check()


def test_directories_of_dead_launchers_are_removed(short, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(short))
    killed = (
        "import os; from asyncspec.launch import scratch\n"
        "with scratch.directory() as path: print(path, flush=True); os.kill(os.getpid(), 9)"
    )
    dead = subprocess.run([sys.executable, "-c", killed], stdout=subprocess.PIPE, text=True).stdout.strip()
    assert os.path.dirname(dead) == str(short) and os.path.exists(dead)
    living = short / "asyncspec-living"
    living.mkdir()
    with open(living / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert scratch.check() == f"{short} can hold sockets"
        assert os.listdir(short) == ["asyncspec-living"]
    scratch.check()
    assert os.listdir(short) == []


MONARCH = """
import os, sys
from asyncspec.launch import scratch
import monarch.actor as monarch

before = dict(os.environ)
with scratch.directory() as path:
    with scratch.monarch_in(path):
        monarch.this_host()
    assert "XDG_RUNTIME_DIR" not in os.environ and before.items() <= os.environ.items()
    assert len(os.listdir(path)) == 2, os.listdir(path)
    print("still here", file=sys.stderr, flush=True)
print(os.listdir(os.environ["TMPDIR"]), flush=True)
os._exit(0)
"""


def test_monarchs_host_starts_silently_and_leaves_nothing_behind(short):
    environment = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}
    environment |= {"TMPDIR": str(short), "USER": "somebody"}
    done = subprocess.run([sys.executable, "-c", MONARCH], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "still here\n")


def test_monarchs_host_starts_without_a_standard_error_that_works(short):
    environment = os.environ | {"TMPDIR": str(short)}
    program = MONARCH.replace('print("still here", file=sys.stderr, flush=True)', "")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, stderr=full, timeout=120
        )
    assert (done.returncode, done.stdout) == (0, b"[]\n")
