"""bench controller: what the controller does for each actor, with stubs in the place of the actors.

The controller's own parts run: its sockets, crew, broadcasts, recovery, schedule and switchboard. The stubs are sockets
in other processes of this machine. They answer nothing, beat as fast as they are asked to, and hold the generators'
inboxes. No weights travel.

- beats_per_s: heartbeats that arrive and are noted in a second, with nothing else to do. An actor sends four a second.
- turn_ms: one turn of the controller's loop, in which nothing has arrived.
- epoch_bytes: what the controller sends when one generator is lost and another one takes its place.

The variants are the numbers of actors: those of 16 nodes, of about 128, and of about 1,000.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import zmq

from asyncspec.actors.conductor import Conductor
from asyncspec.actors.records import Records
from asyncspec.actors.run import Run
from asyncspec.bench.harness import Benchmark, Samples, median
from asyncspec.config import load as load_config
from asyncspec.errors import UserError
from asyncspec.faults import Faults
from asyncspec.report.console import Console
from asyncspec.wire import messages as m
from asyncspec.wire import transport
from asyncspec.wire.codec import encode
from asyncspec.wire.control import ControlServer
from asyncspec.wire.heartbeat import SUFFIX

ACTORS = (130, 1000, 8000)
PROCESSES, TURNS, BEATS_S = 4, 40, 3.0
SENT = 40_000  # beats a second of each process at most: more than the controller takes


def stubs(names: Sequence[str], generators: Sequence[str], address: str, tell, hear) -> None:
    """Play actors: connect each one's control channel and heart, bind the generators' inboxes, and beat when told."""
    context = transport.context()
    hearts, controls = [], []  # sockets
    for name in names:
        for identity in (name, name + SUFFIX):
            socket = context.socket(zmq.DEALER)
            socket.rcvhwm = socket.sndhwm = 0
            socket.identity = identity.encode()
            socket.connect(address)
            if identity != name:
                hearts.append((socket, encode(m.Beat(name, 0.01, {"policy": 3}))))
            else:
                socket.send_multipart(encode(m.Hello(name, "tcp://127.0.0.1:1", "cpu")))
                controls.append(socket)
    bound = {name: transport.Inbox("127.0.0.1", 8) for name in generators}
    tell.put({name: inbox.address for name, inbox in bound.items()})
    while (until := hear.get()) is not None:
        rounds = 0
        while time.monotonic() < until:
            for socket, beat in hearts:
                socket.send_multipart(beat)
            rounds += 1
            time.sleep(max(0.0, rounds * len(hearts) / SENT - (time.monotonic() - (until - BEATS_S))))
        tell.put(rounds * len(hearts))


class Counting(ControlServer):
    """A control channel that counts what it sends."""

    sent = 0

    def send(self, name: str, body: m.Message) -> bool:
        self.sent += sum(len(bytes(frame)) for frame in encode(body))
        return super().send(name, body)


def measured(actors: int) -> dict[str, float]:
    """Measure a controller with so many actors."""
    fields = [f"deployment.generators={actors - 4}", "engine.kind=mock", "trainer.kind=mock", "steps=1000"]
    config = load_config("tiny", [*fields, "deployment.encrypt=false", "logging.backends=", "eval.every=0"])
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        server = Counting("127.0.0.1")
        config.deployment.host = "127.0.0.1"
        run_dir = Path(folder)
        run = Run(config, Records(run_dir, 0, Console(config, run_dir, 0)), server)
        conductor = Conductor(run, Faults("", "controller", run_dir), -1, print)
        names = list(run.crew.members)
        tell = context.SimpleQueue()
        queues = []
        for part in range(PROCESSES):
            mine = names[part::PROCESSES]
            generating = [name for name in mine if run.crew.members[name].role == "generator"]
            queues.append(hear := context.SimpleQueue())
            child = context.Process(target=stubs, args=(mine, generating, server.address, tell, hear), daemon=True)
            child.start()
            stack.callback(child.kill)
        addresses: dict[str, str] = {}
        for _ in range(PROCESSES):
            addresses |= tell.get()
        conductor._load()
        while any(member.hello is None for member in run.crew.present):
            conductor._listen(0.1)
        for member in run.crew.present:
            if member.name in addresses:
                member.hello = m.Hello(member.name, addresses[member.name], "cpu")
        run.begin_broadcasts()
        for member in run.crew.present:
            member.said_ready()
            run.crew.vigil.heard(member.name)
        found = {"turn_ms": 1e3 * statistics.median(turn(conductor) for _ in range(TURNS))}
        began = server.sent
        lost = run.crew.generators[-1]
        hello = run.crew.members[lost].hello
        run.broadcasts.remove(lost)
        run.broadcasts.add(hello, {"policy": False})
        run.welcome()
        found["epoch_bytes"] = server.sent - began
        until = time.monotonic() + BEATS_S
        for hear in queues:
            hear.put(until)
        began, heard, original = time.monotonic(), 0, run.crew.heard

        def count(sender, beat) -> None:
            nonlocal heard
            heard += 1
            original(sender, beat)

        run.crew.heard = count
        while time.monotonic() < until:
            run.wait(0.02)
            conductor.switchboard.receive()
        found["beats_per_s"] = heard / (time.monotonic() - began)
        for hear in queues:
            hear.put(None)
        for close in run.records.closing():
            close()
        for outbox in run.outboxes.values():
            outbox.close(0)
        server.close()
        return found


def turn(conductor: Conductor) -> float:
    """Do one turn of the controller's loop; return its seconds."""
    began = time.perf_counter()
    conductor.schedule.dispatch()
    conductor._listen(0.0)
    conductor._watch()
    conductor.schedule.show()
    conductor._check_end()
    return time.perf_counter() - began


class ControllerBenchmark(Benchmark):
    name = "controller"
    repeats = 3
    variants = tuple(str(actors) for actors in ACTORS)
    columns = ("beats_per_s", "epoch_bytes", "turn_ms")

    def measure(self, variant: str, repetition: int) -> dict[str, float]:
        # The limits of a ZeroMQ context hold for a whole process.
        command = [sys.executable, "-m", "asyncspec.bench.controller", variant]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"bench controller: with {variant} actors: {done.stderr.strip().splitlines()[-1]}")
        return json.loads(done.stdout.splitlines()[-1])

    def headline(self, samples: Samples) -> dict[str, float]:
        return {f"{name}_{actors}": median(samples, str(actors), name) for actors in ACTORS for name in self.columns}

    def plot(self, axes, samples: Samples) -> None:
        axes.loglog(ACTORS, [median(samples, str(actors), "turn_ms") for actors in ACTORS], marker="o")
        axes.set_xlabel("actors")
        axes.set_ylabel("a turn of the controller, ms")


def make(overrides: Sequence[str], out: Path) -> ControllerBenchmark:
    return ControllerBenchmark()


if __name__ == "__main__":
    print(json.dumps(measured(int(sys.argv[1]))))
