"""Nodes of a run that Monarch plays on other hosts; here all hosts are this machine, at several loopback addresses."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import SILENT, Running, descendants, events, outliving, pid_of, rows

from asyncspec.config import UserError, load
from asyncspec.launch import hosts
from asyncspec.launch.join import Rendezvous
from asyncspec.ledger.audit import violations

NODES = "deployment.nodes=trainer+logprob,2*generator"


class Served:
    """A process of `asyncspec host` at an address of this machine."""

    def __init__(self, tmp_path, number, cwd=None, **environment):
        self.address = f"127.0.1.{number}:{26600 + os.getpid() % 10000}"
        self.output = tmp_path / f"host{number}.{time.monotonic_ns()}.out"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "asyncspec.cli", "host", self.address],
            stdout=open(self.output, "w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=cwd,
            env={**os.environ, **environment},
        )

    def wait(self):
        deadline = time.monotonic() + 60
        while f"--hosts {self.address}" not in self.output.read_text():
            assert self.process.poll() is None and time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.05)

    def plays(self, run_dir, actor):
        log = run_dir / "logs" / f"{actor}.log"
        return log.exists() and pid_of(run_dir, actor) in descendants(self.process.pid)

    def end(self):
        everyone = [self.process.pid, *descendants(self.process.pid)]
        self.process.kill()
        self.process.wait()
        assert not outliving(everyone)


@pytest.fixture
def served(tmp_path):
    started = []

    def serve(count, **elsewhere):
        started.extend(Served(tmp_path, number, **elsewhere) for number in range(1, count + 1))
        for host in started:
            host.wait()
        return started

    yield serve
    for host in started:
        host.end()


def command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""


def joined(run_dir):
    return {event["actor"] for event in events(run_dir) if event["event"] == "joined"}


@pytest.mark.slow
def test_hosts_play_nodes_take_over_lost_ones_and_serve_the_next_run(tmp_path, served):
    run_dir, (one, two, spare) = tmp_path / "run", served(3)
    given = ("--hosts", ",".join(host.address for host in (one, two, spare)))
    run = Running.new(run_dir, "--steps", "100000", NODES, *given, SILENT, "checkpoint.every=5")
    run.wait_for_steps(2)
    assert (
        one.plays(run_dir, "generator0") and two.plays(run_dir, "generator1") and not spare.plays(run_dir, "generator1")
    )
    # A node's process dies: it is started again on the same host.
    os.kill(descendants(one.process.pid)[0], signal.SIGKILL)
    run.wait_for(lambda: any(name.startswith("generator0.") for name in joined(run_dir)), "node 1 to come back")
    assert f"node 1 at {one.address}: its process ended" in run.output
    # A host is lost: the spare host takes over its node.
    two.end()
    run.wait_for(lambda: any(name.startswith("generator1.") for name in joined(run_dir)), "node 2 to move")
    assert spare.plays(run_dir, next(name for name in joined(run_dir) if name.startswith("generator1.")))
    # The trainer dies: all actors start again, also those on the hosts.
    count = run.output.count("plays generator0")
    run.signal("trainer", signal.SIGKILL)
    run.wait_for(lambda: run.output.count("plays generator0") > count, "the nodes to join again")
    run.wait_for_steps(len(rows(run_dir)) + 3)
    assert "all actors restart from the last checkpoint" in run.output and "Traceback" not in run.output, run.output
    run.kill()  # the processes that it started on the hosts still exist when the next launcher comes
    again = Running.resumed(run_dir, "--hosts", f"{spare.address},{one.address}")
    again.wait_for_steps((steps := len(rows(run_dir))) + 3)
    os.kill(again.process.pid, signal.SIGINT)
    assert "Traceback" not in again.end(130)
    trained = len(rows(run_dir))
    assert (
        [row["step"] for row in rows(run_dir)] == list(range(trained))
        and trained > steps
        and violations(events(run_dir), 1, 4, trained) == []
    )
    playing = [
        pid for host in (one, spare) for pid in descendants(host.process.pid) if b"asyncspec.launch" in command_of(pid)
    ]
    assert not outliving(playing) and one.process.poll() is None and spare.process.poll() is None  # hosts keep serving


ALONE = """
import sys, time
from asyncspec.launch import hosts
hosts.HOST_ALONE_S = 1.0
node = hosts._Node()
hosts._Node.play._method(node, sys.argv[1], 1, 7, sys.argv[1])
print(node._child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_a_nodes_process_ends_when_its_launcher_is_gone(tmp_path):
    # the directory of a run that was never started
    (tmp_path / "config.yaml").write_text("run_dir: .\ndeployment: {nodes: 'trainer+logprob,generator'}\n")
    process = subprocess.Popen([sys.executable, "-c", ALONE, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    assert process.wait(60) == 1 and not outliving([child])
    left = subprocess.Popen([sys.executable, "-m", "asyncspec.launch.join", str(os.getpid()), str(tmp_path), "1", "7"])
    time.sleep(8)
    assert left.poll() is None  # it waits for the run to start
    Rendezvous("tcp://127.0.0.1:1", -1, 1, launch=8).write(str(tmp_path))
    assert left.wait(60) == 1  # but not for a run of another launcher


def of(config, *names, answering=lambda address: True, monkeypatch):
    """Return the nodes of a run that starts no processes, and a list for what it would play."""
    nodes, played = hosts.Hosts(load("tiny", config), [hosts.Address.parse(name, "") for name in names]), []
    monkeypatch.setattr(hosts, "HOST_RETRY_S", 0.01)
    monkeypatch.setattr(hosts.Address, "answers", answering)
    return nodes, played


def test_a_node_is_retried_a_few_times_and_moves_if_its_host_is_gone(monkeypatch, capsys):
    nodes, played = of(
        [NODES, "deployment.replacements=2"],
        "here",
        "gone",
        "other",
        answering=lambda address: address.host != "gone",
        monkeypatch=monkeypatch,
    )
    monkeypatch.setattr(
        nodes,
        "_play",
        lambda node, address: nodes._played.add(node) or played.append((node, address.host)) or (1, "the reason"),
    )
    for starts in (1, 2):  # after each start of all actors, a node has all its tries again
        nodes.play(7)
        for thread in nodes._threads.values():
            thread.join(10)
        assert sorted(played) == [(1, "here")] * 3 * starts + [(2, "other")] * 3 * starts and not nodes.wrong
    printed = capsys.readouterr().out
    assert printed.count("node 1 at here:26600: the reason; restarting the node") == 4
    assert printed.count("node 2 at other:26600: the reason; its deployment.replacements are used up") == 2


@pytest.mark.parametrize("code, tries", [(2, 1), (1, 3)])
def test_a_node_that_cannot_be_played_is_an_error(code, tries, monkeypatch):
    nodes, played = of(
        ["deployment.nodes=trainer+logprob,generator", "deployment.replacements=2"], "a:1", monkeypatch=monkeypatch
    )
    monkeypatch.setattr(nodes, "_play", lambda node, address: played.append(node) or (code, "no GPU"))
    nodes.play(7)
    nodes._threads[1].join(10)
    assert nodes.wrong == "node 1 at a:1: no GPU" and len(played) == tries


def test_a_node_leaves_a_host_that_is_unfit_for_it(monkeypatch):
    nodes, played = of(
        ["deployment.nodes=trainer+logprob,generator", "deployment.replacements=3"], "a", "b", monkeypatch=monkeypatch
    )
    monkeypatch.setattr(
        nodes,
        "_play",
        lambda node, address: (
            nodes._played.add(node) or played.append(address.host) or (2 if address.host == "a" else 1, "")
        ),
    )
    nodes.play(7)
    nodes._threads[1].join(10)
    assert played == ["a", "b", "b", "b"]


@pytest.mark.slow
def test_an_error_on_a_host_ends_the_run_with_one_line(tmp_path, served):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (host,) = served(1, cwd=elsewhere, PYTHONPATH=str(elsewhere))
    (elsewhere / "asyncspec").mkdir()
    (elsewhere / "asyncspec" / "__init__.py").write_text("raise SystemExit('asyncspec 0.0 is installed here')\n")
    run_dir = tmp_path / "run"
    run = Running.new(
        run_dir,
        "--steps",
        "2",
        "deployment.nodes=trainer+logprob,generator",
        "--hosts",
        host.address,
        "deployment.replacements=1",
    )
    output = run.end(1)
    assert (
        f"failed: node 1 at {host.address}: its process ended: SystemExit: asyncspec 0.0 is installed here" in output
        and "Traceback" not in output
        and output.count("failed: ") == 1
    ), output


@pytest.mark.parametrize(
    "text, host, port, url",
    [
        ("localhost", "localhost", 26600, "tcp://127.0.0.1:26600"),
        ("10.0.0.3:4000", "10.0.0.3", 4000, "tcp://10.0.0.3:4000"),
        ("service<2MuAHeDjLCEd>@tcp://a.b:4444", "a.b", 4444, "service<2MuAHeDjLCEd>@tcp://a.b:4444"),
        ("tcp://a:4444@tcp://0.0.0.0:4444", "a", 4444, "tcp://a:4444@tcp://0.0.0.0:4444"),
    ],
)
def test_addresses_may_have_our_form_or_monarchs(text, host, port, url):
    address = hosts.Address.parse(text, "")
    assert (address.host, address.port, address.url()) == (host, port, url)


@pytest.mark.parametrize("name", ["nowhere.invalid", "a..b", "a" * 70])
def test_an_unknown_host_name_does_not_answer(name):
    assert hosts.Address.parse(name, "").answers() is None


@pytest.mark.parametrize("text", ["", ":", "a:", "a:0", "a:1:2", "tcp://a", "a b", "[::1]:4"])
def test_an_invalid_address_gives_one_line(text):
    with pytest.raises(UserError, match="expected HOST or HOST:PORT; nearest valid choice: ") as caught:
        hosts.Address.parse(text, "--hosts:")
    assert "\n" not in str(caught.value)


def test_a_port_that_is_taken_gives_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UserError,
            match=f"^asyncspec host 127.0.0.1:{port}: Address already in use; expected an address of this host and a "
            f"free port$",
        ):
            hosts.serve(f"127.0.0.1:{port}")
    with pytest.raises(UserError, match="^asyncspec host 203.0.113.7:26600: Cannot assign requested address; "):
        hosts.serve("203.0.113.7")
    for text in ("nowhere.invalid", "a..b", "tcp://127.0.0.1:1@tcp://0.0.0.0:1"):
        with pytest.raises(UserError, match="^asyncspec host[: ].*; ") as caught:
            hosts.serve(text)
        assert "\n" not in str(caught.value)
