"""Locks between processes, on file systems with and without flock."""

import subprocess
import sys

import pytest

from asyncspec.deadlines import LOCK_LEFT_S

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
