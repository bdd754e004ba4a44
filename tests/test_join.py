"""Nodes that start by themselves and join a run, and start again alone."""

import os
import signal
import subprocess
import sys

from asyncspec.audit import violations
from runs import Running, alive, descendants, events, rows

NODES = "deployment.nodes=trainer+logprob,2*generator"


def started(output, node):
    return f"node {node} plays generator" in output


def test_nodes_join_by_the_controllers_address_and_one_of_them_starts_again_alone(tmp_path):
    run_dir = tmp_path / "run"
    first = Running.new(run_dir, "--steps", "200", NODES, "--node", "0", "deployment.host=127.0.0.1", "deployment.silent_timeout_s=2",
                        "checkpoint.every=5", seconds=240)
    first.wait_for((run_dir / "rendezvous.json").exists, "the first node's address")

    def node(number):
        return Running(run_dir, "--join", str(run_dir), "--node", str(number), seconds=240)

    one, two = node(1), node(2)
    first.wait_for_steps(2)
    everyone = [two.process.pid, *descendants(two.process.pid)]
    os.kill(two.process.pid, signal.SIGKILL)  # the launcher; its actor goes with it
    first.wait_for_steps(len(rows(run_dir)) + 2)
    assert not alive(everyone)
    again = node(2)
    again.wait_for(lambda: "node 2 plays generator1.1" in again.output, "the node to come back")
    first.wait_for(lambda: any(event["event"] == "joined" and event["actor"] == "generator1.1" for event in events(run_dir)), "the generator to join")
    # The trainer dies: all start again, also on the nodes that have joined.
    first.signal("trainer", signal.SIGKILL)
    first.wait_for(lambda: one.output.count("node 1 plays generator0") == 2, "the nodes to join again")
    first.wait_for_steps(len(rows(run_dir)) + 3)
    os.kill(first.process.pid, signal.SIGINT)
    output = first.end(130)
    assert "all is started again from the last checkpoint" in output and one.end(130) and again.end(130)
    trained = len(rows(run_dir))
    assert [row["step"] for row in rows(run_dir)] == list(range(trained)) and violations(events(run_dir), 1, 4, trained) == []


def test_a_node_that_is_interrupted_leaves_the_run_going(tmp_path):
    run_dir = tmp_path / "run"
    first = Running.new(run_dir, "--steps", "16", NODES, "--node", "0", "deployment.host=127.0.0.1", "deployment.silent_timeout_s=2")
    first.wait_for((run_dir / "rendezvous.json").exists, "the first node's address")
    one, two = (Running(run_dir, "--join", str(run_dir), "--node", str(number)) for number in (1, 2))
    first.wait_for_steps(2)
    os.kill(two.process.pid, signal.SIGINT)
    two.end(130)
    first.end()
    one.end()
    assert len(rows(run_dir)) == 16 and violations(events(run_dir), 1, 4, 16) == []


def said(*args):
    done = subprocess.run([sys.executable, "-m", "asyncspec.cli", "train", *args], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stdout + done.stderr
    return done.stderr


def test_what_cannot_join_is_told_so_in_a_line(tmp_path):
    assert "no config.yaml in it" in said("--join", str(tmp_path), "--node", "1")
    assert "expected --node K beside it and nothing else" in said("--join", str(tmp_path))
    assert "names 3 nodes; expected 0 to 2" in said(NODES, "--node", "3", "deployment.host=127.0.0.1")
    assert "expected the address at which the other nodes reach this one" in said(NODES, "--node", "0")
    assert "expected deployment.nodes to say" in said("--node", "0")
    assert "names 3 nodes, and this is one host" in said(NODES)
