"""Nodes that are started separately and join a run, and that restart alone."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
from runs import SILENT, Running, descendants, events, rows

from asyncspec.config import topology
from asyncspec.ledger.audit import violations

NODES = "deployment.nodes=trainer+logprob,2*generator"


def signal_node(running, number):
    """Take a node's network link down (SIGSTOP) or up again (SIGCONT), in effect: in between, its launcher and actors
    neither send nor answer.
    """
    for pid in [running.process.pid, *descendants(running.process.pid)]:
        with suppress(ProcessLookupError):  # a launcher that continues may end an actor before its SIGCONT
            os.kill(pid, number)


def nodes_of(run_dir, layout, *args):
    """Start a run's first node and let the others join it; return all, by number."""
    first = Running.new(
        run_dir,
        "--steps",
        "100000",
        f"deployment.nodes={layout}",
        "--node",
        "0",
        "deployment.host=127.0.0.1",
        SILENT,
        *args,
    )
    first.wait_for((run_dir / "rendezvous.json").exists, "the first node's address")
    return [
        first,
        *(
            Running(run_dir, "--join", str(run_dir), "--node", str(number))
            for number in range(1, len(topology.parse(layout)))
        ),
    ]


@pytest.mark.slow
def test_a_run_continues_without_cut_off_nodes_and_takes_them_back(tmp_path):
    run_dir, away = tmp_path / "run", {1: "logprob", 3: "draft_adapter", 4: "generator1"}
    nodes = nodes_of(run_dir, "trainer+generator,2*logprob,draft_adapter,generator")
    nodes[0].wait_for_steps(2)
    for number in away:
        signal_node(nodes[number], signal.SIGSTOP)
    nodes[0].wait_for(
        lambda: all(f"{actor} is cut off" in nodes[0].output for actor in away.values()), "the nodes to be given up"
    )
    nodes[0].wait_for_steps(len(rows(run_dir)) + 3)
    for number in away:
        signal_node(nodes[number], signal.SIGCONT)
    nodes[0].wait_for(
        lambda: (
            {event["actor"] for event in events(run_dir) if event["event"] == "joined"}
            >= {f"{actor}.1" for actor in away.values()}
        ),
        "their replacements to join",
    )
    os.kill(nodes[4].process.pid, signal.SIGINT)  # this ends that node alone
    nodes[4].end(130)
    nodes[0].wait_for_steps(len(rows(run_dir)) + 3)
    os.kill(nodes[0].process.pid, signal.SIGINT)
    output = nodes[0].end(130)
    assert "all actors restart" not in output and all(node.end(130) for node in nodes[1:4])
    trained = len(rows(run_dir))
    assert [row["step"] for row in rows(run_dir)] == list(range(trained)) and violations(
        events(run_dir), 1, 4, trained
    ) == []


@pytest.mark.slow
def test_a_run_waits_for_a_cut_off_node_that_it_needs(tmp_path):
    run_dir = tmp_path / "run"
    nodes = nodes_of(run_dir, "generator,trainer+logprob", "deployment.stall_timeout_s=15", "checkpoint.every=2")
    nodes[0].wait_for_steps(5)
    signal_node(nodes[1], signal.SIGSTOP)
    nodes[0].wait_for(
        lambda: "nobody answers for trainer: the run cannot continue" in nodes[0].output, "the trainer to be missed"
    )
    signal_node(nodes[1], signal.SIGCONT)
    nodes[0].wait_for(lambda: nodes[1].output.count("node 1 plays trainer, logprob") >= 2, "all to start again")
    nodes[0].wait_for_steps(len(rows(run_dir)) + 3)
    signal_node(nodes[1], signal.SIGSTOP)  # permanently
    output = nodes[0].end(1)
    signal_node(nodes[1], signal.SIGKILL)
    assert (
        "no progress for 15 s: waiting for logprob, trainer, for which nobody answers" in output
        and f"asyncspec train --resume {run_dir}" in output
    ), output
    trained = len(rows(run_dir))
    assert [row["step"] for row in rows(run_dir)] == list(range(trained)) and violations(
        events(run_dir), 1, 4, trained
    ) == []


def said(*args):
    done = subprocess.run(
        [sys.executable, "-m", "asyncspec.cli", "train", *args], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stdout + done.stderr
    return done.stderr


def test_a_node_that_cannot_join_gets_one_line(tmp_path):
    assert "no config.yaml in it" in said("--join", str(tmp_path), "--node", "1")
    assert "expected --node K with it and nothing else" in said("--join", str(tmp_path))
    assert "names 3 nodes; expected 0 to 2" in said(NODES, "--node", "3", "deployment.host=127.0.0.1")
    assert "expected the address at which the other nodes reach this one" in said(NODES, "--node", "0")
    assert "expected deployment.nodes to say" in said("--node", "0")
    assert "names 3 nodes, and this is one host" in said(NODES)
