"""bench controller: what the controller does for each actor, with stubs in the place of the actors.

The controller's own parts run: its sockets, crew, broadcasts, recovery, schedule and switchboard. The stubs are clients
in other processes of this machine. They answer nothing, and beat as fast as they are asked to. No weights travel.

- beats_per_s: heartbeats that arrive and are noted in a second, with nothing else to do. An actor sends four a second.
- turn_ms: one turn of the controller's loop, in which nothing has arrived.
- watch_ms: one look at all actors. The loop takes one every 50 ms, or as often as costs it a twentieth of its time.
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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from asyncspec.actors.conductor import Conductor
from asyncspec.actors.records import Records
from asyncspec.actors.run import Run
from asyncspec.bench.harness import Benchmark, Samples, median
from asyncspec.config import load as load_config
from asyncspec.errors import UserError
from asyncspec.faults import Faults
from asyncspec.report.console import Console
from asyncspec.wire import messages as m
from asyncspec.wire.codec import encode
from asyncspec.wire.control import ControlClient, ControlServer
from asyncspec.wire.heartbeat import SUFFIX
from asyncspec.wire.transport import raise_limits

ACTORS = (130, 1000, 8000)
PROCESSES, TURNS, BEATS_S = 4, 40, 3.0
SENT = 40_000  # beats a second of each process at most: more than the controller takes


def stubs(names: Sequence[str], address: str, tell, hear) -> None:
    """Play actors: connect each one's control channel and heart, and beat when told."""
    raise_limits()
    controls, hearts = [], []
    for name in names:
        controls.append(ControlClient(address, name))
        controls[-1].send(m.Hello(name, "tcp://127.0.0.1:1", "cpu"))
        heart = ControlClient(address, name + SUFFIX)
        hearts.append((heart.socket, heart.frames(m.Beat(name, 0.01, {"policy": 3}))))
    while (until := hear.get()) is not None:
        rounds = 0
        while time.monotonic() < until:
            for socket, frames in hearts:  # those of a beat have no number, so they may be sent again
                socket.send_multipart(frames)
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
            queues.append(hear := context.SimpleQueue())
            arguments = names[part::PROCESSES], server.address, tell, hear
            child = context.Process(target=stubs, args=arguments, daemon=True)
            child.start()
            stack.callback(child.kill)
        conductor._load()
        while any(member.hello is None for member in run.crew.present):
            conductor._listen(0.1)
        run.begin_broadcasts()
        for member in run.crew.present:
            member.said_ready()
            run.crew.vigil.heard(member.name)
        found = {
            "turn_ms": 1e3 * statistics.median(timed(partial(turn, conductor)) for _ in range(TURNS)),
            "watch_ms": 1e3 * statistics.median(timed(conductor.recovery.watch) for _ in range(TURNS)),
        }
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
        server.close()
        return found


def turn(conductor: Conductor) -> None:
    """Do one turn of the controller's loop."""
    conductor.schedule.dispatch()
    conductor._listen(0.0)
    conductor._watch()
    conductor.schedule.show()
    conductor._check_end()


def timed(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class ControllerBenchmark(Benchmark):
    name = "controller"
    repeats = 3
    variants = tuple(str(actors) for actors in ACTORS)
    columns = ("beats_per_s", "epoch_bytes", "turn_ms", "watch_ms")

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
        axes.loglog(ACTORS, [median(samples, str(actors), "watch_ms") for actors in ACTORS], marker="o")
        axes.set_xlabel("actors")
        axes.set_ylabel("a look at all actors, ms")


def make(overrides: Sequence[str], out: Path) -> ControllerBenchmark:
    return ControllerBenchmark()


if __name__ == "__main__":
    print(json.dumps(measured(int(sys.argv[1]))))
