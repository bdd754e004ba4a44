"""Processes made by the fork server behave like any others.

Each is forked for a client: the process that was started in its place and stands for it.
"""

import os
import resource
import signal
import socket
import subprocess
import sys

import pytest
from runs import alive, descendants, outliving

from asyncspec.launch.forkserver import ForkServer

PLAYED = """
import os, random, sys, threading, time
if sys.argv[1] == "chance":
    import numpy
what, *rest = sys.argv[1:]
if what == "say":
    loaded = "fractions" in sys.modules
    descriptors = len(os.listdir("/proc/self/fd"))
    print(os.getcwd(), repr(os.environ.get("WHAT")), loaded, __name__, rest, sys.stdin.read(), descriptors, flush=True)
    print("and more", file=sys.stderr)
elif what == "tell":
    os.write(int(rest[0]), b"told")
elif what == "end":
    sys.exit(rest[0] if rest[0] == "a reason" else int(rest[0]))
elif what == "raise":
    raise RuntimeError("a trouble")
elif what == "kill":
    os.kill(os.getpid(), int(rest[0]))
elif what == "thread":
    threading.Timer(0.2, lambda: print("finished")).start()
    print("begun")
elif what == "chance":
    print(random.random(), numpy.random.random())
elif what == "sleep":
    from asyncspec.launch import ending
    ending.make_ready()
    print(os.getpid(), flush=True)
    time.sleep(60)
"""


@pytest.fixture
def started(tmp_path, monkeypatch):
    """callable(what, ...) -> client process; its attribute `server` is the fork server."""
    (tmp_path / "played.py").write_text(PLAYED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    (tmp_path / "noisy.py").write_text("print('loaded', end='')")
    server, processes = ForkServer(["fractions", "noisy", "numpy.random"]), []

    def start(*args, keep=(), **how):
        command = server.command("played", *args, keep=keep)
        processes.append(
            subprocess.Popen(
                command,
                pass_fds=[server.descriptor, *keep],
                text=True,
                **dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) | how,
            )
        )
        return processes[-1]

    start.server = server
    yield start
    server.close()
    for process in processes:
        process.kill()  # a client that runs the module itself does not end with the server
        process.communicate(timeout=60)


def test_a_forked_process_has_its_own_directory_environment_arguments_and_streams(started, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    environment = {**os.environ, "WHAT": "first \udcff"}  # a byte that is not valid UTF-8
    process = started("say", "two words", "", stdin=subprocess.PIPE, cwd=tmp_path / "elsewhere", env=environment)
    said, more = process.communicate("given", timeout=60)[0].splitlines()
    assert (
        said.startswith(f"{tmp_path / 'elsewhere'} 'first \\udcff' True __main__ ['two words', ''] given")
        and more == "and more"
    )
    # It inherits no descriptor of the server or of other forked processes. Open are 0, 1, 2 and the listing itself.
    others = [started("sleep") for _ in range(2)]
    for other in others:
        other.stdout.readline()
    assert started("say").communicate(timeout=60)[0].splitlines()[0].split()[-1] == "4"


def test_a_forked_process_may_inherit_further_descriptors(started):
    read, write = os.pipe()
    process = started("tell", str(write), keep=[write])
    os.close(write)
    assert os.read(read, 100) == b"told" and os.read(read, 100) == b""  # no process holds the write end anymore
    os.close(read)
    assert process.wait(10) == 0


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_process_may_be_forked_with_closed_streams(started, closed):
    command = started.server.command("played", "end", "5")
    assert (
        subprocess.run(
            ["sh", "-c", f'exec "$@" {closed}', "sh", *command], pass_fds=[started.server.descriptor], timeout=60
        ).returncode
        == 5
    )


def test_a_forked_process_waits_for_its_threads_and_has_its_own_random_numbers(started):
    assert started("thread").communicate(timeout=60)[0].split() == ["begun", "finished"]
    said = [started("chance").communicate(timeout=60)[0].split() for _ in range(3)]
    assert all(len(set(of)) == 3 for of in zip(*said)), said


def test_a_client_that_is_stopped_mid_request_blocks_no_other_client(started):
    """The client has sent its descriptor, but not the request itself."""
    mine, theirs = socket.socketpair()
    with socket.socket(fileno=os.dup(started.server.descriptor)) as requests:
        socket.send_fds(requests, [b"?"], [theirs.fileno()])
    assert started("end", "6").wait(10) == 6
    mine.close()
    theirs.close()


def test_a_client_runs_the_module_itself_if_the_server_has_no_descriptors_left(started):
    first = started("sleep")
    pid = int(first.stdout.readline())
    resource.prlimit(started.server._process.pid, resource.RLIMIT_NOFILE, (16, 16))
    others = [started("sleep") for _ in range(6)]
    pids = [int(process.stdout.readline()) for process in others]
    assert 0 < sum(pid == process.pid for pid, process in zip(pids, others)) < 6 and alive([pid, *pids]) == [pid, *pids]


@pytest.mark.slow
def test_libraries_are_loaded_without_asking_for_gpus(tmp_path):
    """Asking would initialize CUDA in the server, and then no forked process could use it."""
    text = """
import sys, torch
asked, real = [], torch.cuda.is_available
torch.cuda.is_available = lambda: asked.append("is_available") or real()
torch.cuda.device_count = lambda: asked.append("device_count") or 0
from asyncspec.config import load
from asyncspec.launch import forkserver, roles
config = load("tiny", ["run_dir=/none"])
modules = roles.libraries(config, roles.specs(config))
def serve(requests):
    assert "torchtitan" in sys.modules and torch.cuda.is_available() is False
    print(asked)
    sys.exit(0)
forkserver._serve, sys.argv[1:] = serve, [str(__import__("os").getppid()), "0", *modules]
asked.clear()
forkserver._main()
"""
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, stdin=socket.socketpair()[0], timeout=60
    )
    assert done.stdout == "['is_available']\n", done.stdout + done.stderr  # only the call in this test


@pytest.mark.slow
def test_numba_is_loaded_only_for_the_embedded_engine():
    """vLLM's engine inspects every value in every module, and does not start if numba is among them."""
    text = """
import sys
from asyncspec.config import load
from asyncspec.launch import roles
config = load("tiny", ["run_dir=/none", "speculation.draft_length=3", f"engine.kind={sys.argv[1]}"])
roles.warm(roles.libraries(config, roles.specs(config)))
print("numba" in sys.modules)
"""
    for kind, loaded in (("torch", True), ("vllm", False)):
        done = subprocess.run([sys.executable, "-c", text, kind], capture_output=True, text=True, timeout=60)
        assert done.stdout == f"{loaded}\n", done.stdout + done.stderr


@pytest.mark.parametrize(
    "what,code",
    [
        (("end", "0"), 0),
        (("end", "7"), 7),
        (("end", "a reason"), 1),
        (("raise",), 1),
        (("kill", "9"), -9),
        (("kill", "11"), -11),
    ],
)
def test_the_client_ends_the_way_its_forked_process_ended(started, what, code):
    process = started(*what)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == code
    assert {"end": "a reason" if "a reason" in what else "", "raise": "RuntimeError: a trouble", "kill": ""}[
        what[0]
    ] in said


def test_a_forked_process_ends_with_its_client_and_the_server_continues(started):
    frozen, other = started("sleep"), started("sleep")
    pids = [int(process.stdout.readline()) for process in (frozen, other)]
    os.kill(pids[0], signal.SIGSTOP)
    frozen.kill()
    assert not outliving(pids[:1]) and alive(pids[1:]) and other.poll() is None
    assert started("end", "3").wait(60) == 3
    other.kill()
    assert "played.py" in other.stdout.read() and not frozen.stdout.read()  # the stack of `other`


def test_a_forked_process_ends_with_its_server_and_another_server_is_started(started):
    process = started("sleep")
    pid, first = int(process.stdout.readline()), started.server._process.pid
    os.kill(first, signal.SIGKILL)
    assert not outliving([pid]) and process.wait(60) == -signal.SIGKILL
    started.server._process.wait()
    again = started("sleep")
    again.stdout.readline()
    assert started.server._process.pid != first and len(descendants(started.server._process.pid)) == 1


def test_a_client_without_a_server_runs_the_module_and_ends_with_its_parent(started):
    command = started.server.command("played", "sleep")
    started.server._process.kill()
    started.server._process.wait()
    process = subprocess.Popen(command, pass_fds=[started.server.descriptor], stdout=subprocess.PIPE, text=True)
    assert int(process.stdout.readline()) == process.pid
    process.kill()
    process.communicate()
    text = (
        "import os, subprocess, time; "
        f"subprocess.Popen({command[:5]!r} + [str(os.getpid())] + {command[6:]!r}); time.sleep(60)"
    )
    asking = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    pid = int(asking.stdout.readline())
    asking.kill()
    asking.communicate()
    assert not outliving([pid])


@pytest.mark.parametrize("name", ["random", "queue", "tokenizers"])
def test_a_file_of_the_working_directory_does_not_come_before_a_library(tmp_path, monkeypatch, name):
    (tmp_path / f"{name}.py").write_text("raise RuntimeError('the wrong module')")
    monkeypatch.chdir(tmp_path)
    server = ForkServer([name])
    done = subprocess.run(
        server.command("asyncspec.lag"), pass_fds=[server.descriptor], capture_output=True, text=True, timeout=120
    )
    server.close()
    assert done.returncode == 0, done.stderr
