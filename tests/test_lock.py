"""Locks between processes, on file systems with and without flock."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from asyncspec.config import ConfigError
from asyncspec.deadlines import LOCK_LEFT_S, LOCK_RENEW_S
from asyncspec.launch import roles
from asyncspec.lock import Lock, Taken

WITHOUT = """
import errno, fcntl, os
def unsupported(*args):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
fcntl.flock = unsupported
"""
TAKES = """
import sys
from pathlib import Path
from asyncspec.lock import Lock, Taken
try:
    lock = Lock(Path(sys.argv[1]))
except Taken:
    print("taken")
else:
    print("held", flush=True)
    sys.stdin.readline()
    lock.release()
"""


@pytest.fixture
def asking(tmp_path):
    """callable() -> a process that asks for a lock, and says "held" or "taken". A line of input has it release it."""
    asked = []

    def ask(before):
        command = [sys.executable, "-c", before + TAKES, str(tmp_path / "lock")]
        asked.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return asked[-1]

    yield ask
    for process in asked:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("before", ["", WITHOUT], ids=["flock", "without"])
def test_one_of_several_processes_gets_a_lock_and_its_death_frees_it(asking, before):
    """Without flock, a process that asks waits until the holder renews the lock, or could have."""
    first = [asking(before) for _ in range(4)]
    said = [process.stdout.readline().strip() for process in first]
    assert sorted(said) == ["held", "taken", "taken", "taken"]
    holder = first[said.index("held")]
    holder.kill()  # as a node that loses its power
    holder.wait()
    second = asking(before)
    assert second.stdout.readline().strip() == "held"
    second.communicate("release\n", timeout=3 * LOCK_LEFT_S)
    assert asking(before).stdout.readline().strip() == "held"


@pytest.mark.slow
def test_a_holder_that_was_stopped_for_too_long_ends_when_another_process_has_the_lock(asking):
    first = asking(WITHOUT)
    assert first.stdout.readline().strip() == "held"
    first.send_signal(signal.SIGSTOP)
    second = asking(WITHOUT)
    assert second.stdout.readline().strip() == "held"
    first.send_signal(signal.SIGCONT)
    assert first.wait(4 * LOCK_RENEW_S) == -signal.SIGTERM
    assert "another process has taken the lock" in first.stdout.read()
    assert second.poll() is None


def test_a_lock_server_that_cannot_be_asked_is_no_file_system_without_locks(tmp_path, monkeypatch):
    def unreachable(*args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unreachable)
    with pytest.raises(OSError, match="No locks available"):
        Lock(tmp_path / "lock")
    with pytest.raises(ConfigError, match="^run_dir='.*': lock: No locks available; expected .* that can lock now$"):
        roles.hold(str(tmp_path))


def test_a_file_that_was_replaced_since_it_was_judged_stays(tmp_path, monkeypatch):
    """Of two processes that find an old owner the slower one must not remove the other's."""

    def unsupported(*args):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    owner = tmp_path / "lock.owner"
    owner.write_text("dead")

    def judged(path):
        owner.write_text("quicker")
        return False

    monkeypatch.setattr(fcntl, "flock", unsupported)
    monkeypatch.setattr("asyncspec.lock._renewed", judged)
    with pytest.raises(Taken):
        Lock(tmp_path / "lock")
    assert owner.read_text() == "quicker" and sorted(os.listdir(tmp_path)) == ["lock", "lock.owner"]
