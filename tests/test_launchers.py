"""Which launcher is chosen, which settings are refused, and which signals interrupt a run; the Slurm scripts."""

import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from runs import ROOT

from asyncspec import cli
from asyncspec.cli import main
from asyncspec.config import ConfigError, load
from asyncspec.errors import UserError
from asyncspec.launch import attempts, torchrun
from asyncspec.launch.interrupt import InterruptFlag
from asyncspec.launch.machine import check_host
from asyncspec.launch.roles import hold

SBATCH = sorted((ROOT / "launch" / "slurm").glob("*.sbatch"))


@pytest.mark.parametrize("script", SBATCH, ids=lambda path: path.name)
def test_slurm_scripts_are_valid_shell(script):
    checker = ["shellcheck", "-x", "-P", "SCRIPTDIR"] if shutil.which("shellcheck") else ["bash", "-n"]
    done = subprocess.run([*checker, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_launcher_loads_no_library_that_only_actors_need(tmp_path):
    """They load in the fork server. Before that they would cost every start seconds."""
    code = (
        "import sys; from asyncspec.config import load; from asyncspec.launch import monarch, roles; "
        "config = load('tiny', [f'run_dir={sys.argv[1]}']); "
        "roles.prepare_run_dir(config); monarch.check_machine(config); "
        "print({'torch', 'torchtitan', 'numba', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "run"], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stdout + done.stderr


COMMAND = """#!/usr/bin/env python3
import os, signal, sys, time
# This comes first, so that the stand-in handles SIGTERM by the time anybody can know that it runs.
signal.signal(signal.SIGTERM, lambda *_: os._exit(int(os.environ["CODE"])))
name = os.path.basename(sys.argv[0])
with open(os.path.join(os.environ["SEEN"], name), "a") as file:
    print(*sys.argv[1:], file=file)
if name == "scontrol":
    print("node1\\nnode2")
elif "launch/" in " ".join(sys.argv):
    time.sleep(float(os.environ["SECONDS_OF_WORK"]))
    sys.exit(int(os.environ["CODE"]))
"""


@pytest.mark.parametrize("script", SBATCH, ids=lambda path: path.name)
@pytest.mark.parametrize("code, warned", [(0, False), (1, False), (130, False), (130, True)])
def test_slurm_scripts_forward_signals_and_exit_with_the_launchers_code(tmp_path, script, code, warned):
    """A mock Slurm of two nodes records the commands it is given."""
    (tmp_path / "bin").mkdir()
    for name in ("srun", "scontrol"):
        (tmp_path / "bin" / name).write_text(COMMAND)
        (tmp_path / "bin" / name).chmod(0o755)
    process = subprocess.Popen(
        ["bash", script, "--steps", "3"],
        env={
            **os.environ,
            "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
            "SEEN": str(tmp_path),
            "CODE": str(code),
            "SECONDS_OF_WORK": "30" if warned else "0.2",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_ID": "41",
            "SLURM_SUBMIT_DIR": str(ROOT),
        },
    )
    asked = tmp_path / "srun"
    deadline = time.monotonic() + 60
    while "launch/" not in (asked.read_text() if asked.exists() else "") and time.monotonic() < deadline:
        time.sleep(0.05)
    if warned:
        time.sleep(0.3)  # the script has started the stand-in; wait until it handles signals, too
        process.send_signal(signal.SIGTERM)
    assert process.wait(60) == code
    launched = [line for line in asked.read_text().splitlines() if "launch/" in line]
    command = {"ray": "ray.py", "torchrun": "async.py", "monarch": "monarch.py --hosts node2:20041"}[script.stem]
    assert len(launched) == 1 and launched[0].endswith(f"{ROOT}/launch/{command} --steps 3")
    meeting = "asyncspec.cli host :20041" if script.stem == "monarch" else "node1:20041"
    assert meeting in asked.read_text()


@pytest.mark.parametrize(
    "arguments, environment, said",
    [
        (["--launcher", "torchrun"], {}, "--launcher torchrun: expected torchrun to start this command"),
        (
            ["--launcher", "monarch"],
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            "--launcher monarch: expected one process, but torchrun has started 2; nearest valid choice: ",
        ),
        (
            ["--launcher", "monarch", "deployment.nodes=trainer+logprob,generator"],
            {},
            "names 2 nodes, and this is one host; expected --hosts with the other 1, torchrun --nnodes 2",
        ),
        (
            ["--hosts", "a,b", "deployment.nodes=trainer+logprob,3*generator"],
            {},
            "--hosts a,b: 2 besides this host, which plays the first node; expected one for each further node",
        ),
        (
            ["--hosts", "a"],
            {},
            "expected one for each further node of deployment.nodes='', at least 1; deployment.nodes names",
        ),
        (
            ["--hosts", "a:b", "deployment.nodes=trainer+logprob,generator"],
            {},
            "--hosts: 'a:b': expected HOST or HOST:PORT; nearest valid choice: a:26600",
        ),
        (
            ["--hosts", "a:70000", "deployment.nodes=trainer+logprob,generator"],
            {},
            "--hosts: 'a:70000': expected HOST or HOST:PORT; nearest valid choice: a:26600",
        ),
        (
            ["--hosts", "nowhere.invalid", "deployment.nodes=trainer+logprob,generator"],
            {},
            "--hosts: 'nowhere.invalid': ",
        ),
        (
            ["--hosts", "localhost,localhost", "deployment.nodes=trainer+logprob,generator"],
            {},
            "--hosts localhost,localhost: localhost:26600 is named twice",
        ),
        (["--hosts", "a..b", "deployment.nodes=trainer+logprob,generator"], {}, "--hosts: 'a..b': "),
        (
            ["--hosts", "a", "--launcher", "ray"],
            {},
            "--hosts a: expected one process, no --node, and the monarch launcher",
        ),
        (
            ["--launcher", "monarch", "deployment.host=203.0.113.7"],
            {},
            "deployment.host='203.0.113.7': Cannot assign requested address",
        ),
        (
            ["--launcher", "torchrun", "deployment.host=203.0.113.7"],
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            "deployment.host='203.0.113.7': Cannot assign",
        ),
    ],
)
def test_a_launcher_that_does_not_fit_gives_one_line(arguments, environment, said, monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["train", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize("host", ["nowhere.invalid", "*", "[::1]", "a" * 70])
def test_a_host_that_actors_cannot_listen_on_gives_one_line(host):
    with pytest.raises(
        ConfigError, match="expected an address of this host; nearest valid choice: deployment.host=auto"
    ) as caught:
        check_host(load("tiny", [f"deployment.host={host}"]))
    assert f"deployment.host={host!r}: " in str(caught.value) and "\n" not in str(caught.value)


def test_a_host_may_be_any_address_of_this_host_or_a_name_of_one():
    assert [
        check_host(load("tiny", [f"deployment.host={host}"])) for host in ("auto", "127.0.0.1", "localhost", "0.0.0.0")
    ] == ["127.0.0.1", "127.0.0.1", "localhost", "0.0.0.0"]


def test_a_directory_whose_lock_cannot_be_opened_gives_one_line(tmp_path):
    (tmp_path / "lock").mkdir()
    with pytest.raises(
        ConfigError, match=f"^run_dir='{tmp_path}': lock: Is a directory; expected a directory to write to$"
    ):
        hold(str(tmp_path))


@pytest.mark.parametrize("script", ["async", "monarch", "ray"])
def test_scripts_do_not_shadow_the_packages_of_the_same_name(script, tmp_path):
    listed = (
        "import runpy, sys; sys.path.insert(0, sys.argv[1]); runpy.run_path(sys.argv[2]); "
        "import monarch; print(monarch.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", listed, str(ROOT / "launch"), str(ROOT / "launch" / f"{script}.py")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.stdout and str(ROOT / "launch") not in done.stdout, done.stderr


@pytest.mark.parametrize("restarts", [0, 2])
def test_a_controller_that_does_not_start_in_time_is_given_up(restarts, capsys):
    """The controller freezes before its first message to the launcher."""
    attempt = object.__new__(attempts._Attempt)
    attempt.config, attempt.restarts_left, attempt.resuming = (
        load("tiny", ["deployment.start_timeout_s=0.2", "engine.kind=mock", "trainer.kind=mock"]),
        restarts,
        False,
    )
    attempt.interrupt, attempt.playing = (
        SimpleNamespace(count=0),
        {"controller": SimpleNamespace(prepared=lambda: None)},
    )
    if restarts:
        assert attempt._controller() == "" and attempt.resuming
        assert "controller died: frozen: no sign of life for 0.2 s; all actors restart" in capsys.readouterr().out
    else:
        with pytest.raises(attempts.NotStarted, match="did not start within 0 s; raise deployment.start_timeout_s"):
            attempt._controller()


@pytest.mark.parametrize(
    "environment, named",
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_PORT=None"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "29500"}, "MASTER_ADDR=None"),
        ({"WORLD_SIZE": "2"}, "RANK=None"),
        ({"WORLD_SIZE": "two", "RANK": "0"}, "WORLD_SIZE='two'"),
    ],
)
def test_a_part_of_torchruns_environment_is_refused_in_one_line(monkeypatch, capsys, environment, named):
    for name in ("WORLD_SIZE", "RANK", "MASTER_PORT", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert torchrun.ranks() == (0, 1)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as caught:
        torchrun.ranks()
    assert named in str(caught.value) and str(caught.value).endswith("unset WORLD_SIZE")
    assert main(["train"]) == 2 and capsys.readouterr().err.count("\n") == 1
    monkeypatch.setenv("WORLD_SIZE", "1")  # as some clusters set it for every process
    assert torchrun.ranks() == (0, 1)


@pytest.mark.parametrize(
    "sent, counted",
    [
        (["SIGINT", "SIGINT"], 2),
        (["SIGHUP", "SIGHUP"], 1),
        (["SIGUSR1"], 1),
        (["SIGXCPU", "SIGTERM"], 2),
        (["SIGTERM", "SIGHUP"], 1),
    ],
)
def test_warnings_of_a_terminal_or_a_scheduler_interrupt_a_run_once(sent, counted):
    before = {number: signal.getsignal(number) for number in signal.valid_signals() if number not in (9, 19, 32, 33)}
    try:
        flag = InterruptFlag()
        for name in sent:
            os.kill(os.getpid(), getattr(signal, name))
        assert flag.count == counted
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def test_an_ignored_hangup_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    others = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGXCPU)
    }
    try:
        flag = InterruptFlag()
        os.kill(os.getpid(), signal.SIGHUP)
        assert flag.count == 0 and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
        for number, handler in others.items():
            signal.signal(number, handler)
