"""Small whole runs for tests: started like a user starts them, and watched from outside."""

import json
import os
import queue
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp

from asyncspec.ledger.audit import audit
from asyncspec.ledger.ledger import read

ROOT = Path(__file__).parents[1]
SCRIPT = str(ROOT / "launch" / "async.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
SMALL = [
    "rl.groups_per_step=4",
    "rl.group_size=4",
    "data.eval_prompts=6",
    "data.train_prompts=200",
    "eval.every=2",
    "sampling.max_response_tokens=64",
    "engine.slots=16",
    # A fixed draft length, because auto calibrates for seconds.
    "speculation.draft_length=3",
    # On two slow cores, five Ray actors may start beside another test.
    "deployment.start_timeout_s=300",
]
# How long a process that was told to end may take on a busy machine. deployment.stop_timeout_s is the usual bound.
ENDED_S = 20
# For tests that freeze actors. With 2 s, two runs on two cores sometimes lose an actor that is alive.
SILENT = "deployment.silent_timeout_s=3"


def rows(run_dir):
    path = run_dir / "metrics.jsonl"
    # a run may be writing the last line
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def events(run_dir):
    return list(read(run_dir))


def ledger(run_dir):
    """The ledger's events about tickets."""
    return [event for event in events(run_dir) if "ticket" in event]


def pid_of(run_dir, actor):
    """Pid of the newest process that plays this actor."""
    return int(re.findall(r"starts, pid (\d+)", (run_dir / "logs" / f"{actor}.log").read_text())[-1])


def descendants(pid):
    children = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                children[int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])].append(int(entry.name))
            except OSError:
                pass
    found, queue = [], [pid]
    while queue:
        queue += children[queue.pop()]
        found = [*found, *[p for p in queue if p not in found]]
    return found


def alive(pids):
    result = []
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                result.append(pid)
        except OSError:
            pass
    return result


def outliving(pids):
    """Return the pids that are still alive after ENDED_S."""
    deadline = time.monotonic() + ENDED_S
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive(pids)


def forking():
    """Return a multiprocessing context whose processes start with the libraries loaded."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "asyncspec.rl.accumulate",
            "asyncspec.rl.scorer",
            "asyncspec.models.policy",
            "asyncspec.drafts.draft",
            "asyncspec.wire.weights",
        ]
    )
    return context


def in_ranks(count, target, *args, told=1):
    """Run target(rank, *args, port, results) in processes that share a store at this port.

    Return what they put into the queue `results`: `told` items each.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = forking()
    results = context.Queue()
    children = [context.Process(target=target, args=(rank, *args, store.port, results)) for rank in range(count)]
    for child in children:
        child.start()
    found, deadline = [], time.monotonic() + 120
    while len(found) < count * told:
        with suppress(queue.Empty):
            found.append(results.get(timeout=1))
            continue
        assert not any(child.exitcode for child in children) and time.monotonic() < deadline
    for rank, child in enumerate(children):
        child.join(60)
        assert child.exitcode == 0, f"rank {rank} ended with {child.exitcode}"
    return found


def torchrun_on(hosts, folder, flags_of, *arguments, before=lambda node: ()):
    """Start torchrun with one worker on each host. Return (process, the file of its output) of each.

    Args:
        hosts: network namespaces, see bench.namespaces.
        flags_of: callable(node) -> further flags of torchrun.
        arguments: what torchrun starts.
        before: callable(node) -> what Python is given before torchrun.
    """
    running, flags = [], ["--nnodes", str(hosts.count), "--nproc-per-node", "1"]
    for node in range(hosts.count):
        command = [*before(node), "-m", "torch.distributed.run", *flags, *flags_of(node), *arguments]
        output = folder / f"{node}.log"
        running.append((hosts.start(node, command, output), output))
    return running


def at_master(hosts, port):
    """Return the flags of torchrun for `torchrun_on` with which all hosts meet on the first one."""
    where = ["--master-addr", hosts.address(0), "--master-port", str(port)]
    return lambda node: [*where, "--node-rank", str(node)]


class Running:
    """A run in progress; its output goes to a file beside its directory."""

    def __init__(self, run_dir, *args, launcher=(sys.executable, SCRIPT), seconds=580):
        self.run_dir, self.deadline = run_dir, time.monotonic() + seconds
        self.output_file = run_dir.with_suffix(f".{time.monotonic_ns()}.out")
        self.process = subprocess.Popen(
            [*launcher, *args],
            stdout=open(self.output_file, "w"),
            stderr=subprocess.STDOUT,
            cwd=run_dir.parent,
            start_new_session=True,
        )

    @classmethod
    def new(cls, run_dir, *args, **kwargs):
        return cls(run_dir, "--run-dir", str(run_dir), *SMALL, *args, **kwargs)

    @classmethod
    def resumed(cls, run_dir, *args, **kwargs):
        return cls(run_dir, "--resume", str(run_dir), *args, **kwargs)

    @property
    def output(self):
        return self.output_file.read_text()

    def wait_for(self, condition, what):
        while not condition():
            assert self.process.poll() is None and time.monotonic() < self.deadline, (
                f"waiting for {what}:\n{self.output}"
            )
            time.sleep(0.02)

    def wait_for_steps(self, count):
        self.wait_for(lambda: len(rows(self.run_dir)) >= count, f"{count} steps")

    def signal(self, actor, number):
        os.kill(pid_of(self.run_dir, actor), number)

    def end(self, code=0):
        """Wait until the run ends with this exit code; return its output."""
        try:
            self.process.wait(max(1, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(self.output) from None
        assert self.process.returncode == code, self.output
        return self.output

    def kill(self):
        """Kill the launcher and every process it started, at once."""
        everyone = [self.process.pid, *descendants(self.process.pid)]
        for pid in everyone:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()
        assert not outliving(everyone)


def train(run_dir, *args, launcher=(sys.executable, "-m", "asyncspec.cli", "train"), timeout=400, groups=4, **kwargs):
    command = [*launcher, "--run-dir", str(run_dir), *SMALL, f"rl.groups_per_step={groups}", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=run_dir.parent, **kwargs)


def check_finished(run_dir, steps, lag=1):
    """Check that every step was trained once, within the lag, and that every ticket is accounted for."""
    metrics = rows(run_dir)
    assert [row["step"] for row in metrics] == list(range(steps)) and max(row["lag/max"] for row in metrics) <= lag
    assert audit(str(run_dir)) == 0
