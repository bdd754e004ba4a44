"""A broken NCCL group ends alone: what torch reads when a group is made, in a process that a torchrun worker starts.

torch without CUDA has no NCCL groups, so these tests look at the environment that torch would read.
"""

import os
import subprocess
import threading

from runs import TORCHRUN

from asyncspec.models import parallel
from asyncspec.wire import nccl

WORKER = """
import subprocess, sys
from asyncspec.launch.processes import environment
sys.exit(subprocess.run([sys.executable, "-c", sys.argv[1]], env=environment()).returncode)
"""
ACTOR = """
import os
from asyncspec.wire.nccl import HANDLING, ends_alone
told = [os.environ[HANDLING]]
with ends_alone():
    told.append(os.environ[HANDLING])
print("told", *told, os.environ[HANDLING], sum(name.startswith("TORCHELASTIC_") for name in os.environ))
"""


def test_a_broadcast_group_ends_alone_under_torchrun_and_the_ranks_of_a_model_together(tmp_path):
    """torchrun says 1, which aborts the process: so it stays around a broadcast group, which is made with 2."""
    (tmp_path / "worker.py").write_text(WORKER)
    clean = {name: value for name, value in os.environ.items() if name != nccl.HANDLING}
    command = [*TORCHRUN, "--nproc-per-node", "2", str(tmp_path / "worker.py"), ACTOR]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines().count("told 1 2 1 0") == 2, done.stdout + done.stderr


def test_ranks_use_exactly_the_interface_that_is_found_and_never_overrule_the_users(monkeypatch):
    monkeypatch.setattr(parallel, "_interfaces", {})
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0,ib1")
    for found in ("eth1", "lo"):  # the process may be a rank of another run later
        parallel._use_interface(found)
        assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == (found, "ib0,ib1")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    parallel._use_interface("eth1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=eth1"  # NCCL takes a bare eth1 for eth10, too


def test_two_groups_are_made_one_after_the_other_and_leave_the_environment_as_it_was(monkeypatch):
    monkeypatch.delenv(nccl.HANDLING, raising=False)
    entered = threading.Event()

    def other():
        with nccl.ends_alone():
            entered.set()

    thread = threading.Thread(target=other)
    with nccl.ends_alone():
        thread.start()
        assert not entered.wait(0.3)  # or it would take this group's value for the environment's own
    thread.join(10)
    assert entered.is_set() and nccl.HANDLING not in os.environ
