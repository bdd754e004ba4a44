"""bench chaos: faults at random moments of a default run. An actor is killed, frozen, or raises an exception, a hundred
times. Does the run end, learn as well as without faults, and train every ticket once, within the lag?

Variants: the same job without faults; with faults; with its launcher killed and the run resumed, ten times; and with
faults where each prompt is an episode of two turns. There the processes that run the environments are hit, too. A fault
hits the process that plays a role at that moment, even a replacement that is still starting.

Detection is the time from the fault to the ledger's `lost`. Recovery is the time from the fault to the ledger's
`joined`, or to `ready` if the whole run restarts.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.table import Table

from asyncspec.bench.harness import Benchmark, Samples
from asyncspec.bench.jobs import run_job
from asyncspec.config import load
from asyncspec.faults import ask, asked, withdraw
from asyncspec.ledger import ledger
from asyncspec.ledger.audit import fates, violations
from asyncspec.timing.metrics import read_rows

FAULTS = 100
BETWEEN_S = (0.5, 6.5)  # seconds from one fault to the next, uniformly distributed
KINDS = {"killed": 0.5, "frozen": 0.25, "raised": 0.25}  # share of the faults
RAISED_S = 20.0  # for an actor to come to a place where it raises what it was asked to; a draft adapter may be slow
ROLES = {"generator0": 0.4, "logprob": 0.2, "draft_adapter": 0.15, "trainer": 0.125, "controller": 0.125}
ENVIRONMENT = "environment"  # not an actor: a process of a generator
WITH_ENVIRONMENTS = {role: 0.7 * share for role, share in ROLES.items()} | {ENVIRONMENT: 0.3}
EPISODES = (
    "environment.name=asyncspec.bench.sleeping_tools:AskedTwice",
    "environment.turn_timeout_s=2",
    "environment.failures=1",
    "sampling.max_response_tokens=400",
)
CUTS = 10
SETTINGS = (
    "deployment.replacements=100000",
    "deployment.restarts=100000",
    "deployment.silent_timeout_s=2",
    "checkpoint.every=5",
    "deployment.faults=asked",
)


class ChaosBenchmark(Benchmark):
    name = "chaos"
    repeats = 1
    variants = ("undisturbed", "faults", "resumed", "environments")
    columns = ("faults", "raised", "tickets_lost", "tickets_doubled", "lag_violations", "accuracy_gain", "seconds")

    def __init__(self, overrides: Sequence[str], out: Path) -> None:
        self.overrides, self.out = list(overrides), out
        self.faults: list[dict] = []  # of all repetitions

    def measure(self, variant: str, repetition: int) -> dict[str, float]:
        run_dir, started = self.out / f"{variant}-{repetition}", time.monotonic()
        roles = {"faults": ROLES, "environments": WITH_ENVIRONMENTS}.get(variant)
        storm = Storm(run_dir, np.random.default_rng([repetition, 0xFA]), roles=roles) if roles else None
        episodes = EPISODES if variant == "environments" else ()
        arguments = (f"seed={repetition}", *SETTINGS, *episodes, *self.overrides)
        rows = (
            cut_and_resume(run_dir, arguments) if variant == "resumed" else run_job(run_dir, *arguments, beside=storm)
        )
        events = list(ledger.read(run_dir))
        hits = [] if storm is None else timed(storm.faults, events)
        self.faults += hits
        config = load(str(run_dir / "config.yaml"))
        ends = fates(events)
        found = violations(events, config.policy_lag, config.rl.groups_per_step, len(rows))
        accuracy = [row["eval/score"] for row in rows if row["eval/score"] is not None]
        return {
            "faults": CUTS if variant == "resumed" else len(hits),
            "raised": sum(fault["kind"] == "raised" for fault in hits),
            "seconds": time.monotonic() - started,
            "violations": len(found),
            "tickets_lost": sum(not sum(counts.values()) for counts in ends.values()),
            "tickets_doubled": sum(sum(counts.values()) > 1 for counts in ends.values()),
            "lag_violations": sum("version" in text for text in found)
            + sum(row["lag/max"] > config.policy_lag for row in rows),
            "accuracy_gain": accuracy[-1] - accuracy[0],
            **{
                f"{role}_{what}_s": value
                for role in ROLES
                for what in ("detected", "recovered")
                if (value := median_of(hits, role, what)) is not None
            },
        }

    def headline(self, samples: Samples) -> dict[str, float]:
        disturbed = samples["faults"] + samples["resumed"] + samples["environments"]
        total = {
            key: sum(sample[key] for sample in disturbed)
            for key in ("faults", "raised", "tickets_lost", "tickets_doubled", "lag_violations", "violations")
        }
        gain = {
            variant: statistics.median(sample["accuracy_gain"] for sample in samples[variant])
            for variant in self.variants
        }
        recovery = median_of(self.faults, "generator0", "recovered")
        return total | {
            "generator_recovery_s": float("nan") if recovery is None else recovery,
            **{f"accuracy_gain_{variant}": value for variant, value in gain.items()},
        }

    def tables(self, samples: Samples) -> list[Table]:
        table = Table(title="seconds from the fault: median (largest)", title_justify="left")
        for heading in ("actor", "fault", "count", "detected", "recovered"):
            table.add_column(heading, justify="left" if heading in ("actor", "fault") else "right")
        for role in WITH_ENVIRONMENTS:
            for kind in KINDS:
                of = [fault for fault in self.faults if (fault["role"], fault["kind"]) == (role, kind)]
                cells = [[fault[what] for fault in of if what in fault] for what in ("detected", "recovered")]
                table.add_row(
                    role,
                    kind,
                    str(len(of)),
                    *(f"{statistics.median(cell):.2f} ({max(cell):.2f})" if cell else "" for cell in cells),
                )
        return [*super().tables(samples), table]

    def plot(self, axes, samples: Samples) -> None:
        for place, role in enumerate(ROLES):
            for (kind, mark), beside in zip((("killed", "o"), ("frozen", "s"), ("raised", "^")), (-0.1, 0.1, 0.3)):
                values = [
                    f["recovered"] for f in self.faults if (f["role"], f["kind"]) == (role, kind) and "recovered" in f
                ]
                axes.plot(
                    [place + beside] * len(values),
                    values,
                    mark,
                    alpha=0.5,
                    label=kind if not place else None,
                )
        axes.set_xticks(range(len(ROLES)), ROLES)
        axes.set_ylabel("seconds from the fault to recovery")
        axes.set_ylim(bottom=0)
        axes.legend()


class Storm:
    """Causes the faults while a run is under way."""

    def __init__(
        self, run_dir: Path, rng: np.random.Generator, count: int = FAULTS, roles: Mapping[str, float] | None = None
    ) -> None:
        """
        Args:
            roles: the share of the faults that hits each role; None: ROLES.
        """
        self.run_dir, self.rng, self.count, self.roles = run_dir, rng, count, dict(roles or ROLES)
        self.faults: list[dict] = []

    def __call__(self, process) -> None:
        while process.poll() is None and not (self.run_dir / "metrics.jsonl").exists():
            time.sleep(0.1)
        while process.poll() is None and len(self.faults) < self.count:
            time.sleep(self.rng.uniform(*BETWEEN_S))
            role = str(self.rng.choice(list(self.roles), p=list(self.roles.values())))
            kind = str(self.rng.choice(list(KINDS), p=list(KINDS.values())))
            actor, pid = self._newest(role)
            if role == ENVIRONMENT and kind == "raised":
                kind = "killed"  # bench environments and the tests have environments that raise
            try:
                if not pid or _stopped(pid):
                    continue
                if kind != "raised":
                    os.kill(pid, signal.SIGSTOP if kind == "frozen" else signal.SIGKILL)
                elif not self._raises(actor, process):
                    continue
                self.faults.append({"time": time.time(), "role": role, "kind": kind, "actor": actor})
            except ProcessLookupError:  # nobody plays the role at the moment
                pass

    def _raises(self, actor: str, process) -> bool:
        """Have an actor raise an exception, and wait until it has. Return whether it did. No two exceptions are alike:
        those would end the run.
        """
        word = "".join(self.rng.choice(list("bcdfghklmnprstvz"), 8))
        ask(self.run_dir, actor, f"a fault of bench chaos: {word}")
        deadline = time.monotonic() + RAISED_S
        while asked(self.run_dir, actor) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        return not withdraw(self.run_dir, actor)

    def _newest(self, role: str) -> tuple[str, int]:
        """Return the name and the process of who plays a role now; ("", 0): nobody does."""
        if role == ENVIRONMENT:
            running = environments_of(self._newest("generator0")[1])
            return ENVIRONMENT, int(self.rng.choice(running)) if running else 0
        logs = sorted((self.run_dir / "logs").glob(f"{role}*.log"), key=lambda path: path.stat().st_mtime_ns)
        found = [
            (log.stem, pid) for log in logs for pid in re.findall(r"starts, pid (\d+)", log.read_text(errors="replace"))
        ]
        return (found[-1][0], int(found[-1][1])) if found else ("", 0)


def environments_of(generator: int) -> list[int]:
    """Return the processes that run environments for a generator."""
    try:
        tasks = Path(f"/proc/{generator}/task").iterdir()  # an actor's main loop may be in any thread
        children = [pid for task in tasks for pid in (task / "children").read_text().split()]
        return [int(pid) for pid in children if b"environment_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    except OSError:  # one of them has just ended
        return []


def cut_and_resume(run_dir: Path, arguments: Sequence[str], cuts: int = CUTS) -> list[dict]:
    """Run a job, kill its launcher `cuts` times at even intervals, resume it; return the rows of its metrics."""
    steps = load("tiny", arguments).steps
    for cut in range(cuts):

        def until_its_turn(process) -> None:
            path = run_dir / "metrics.jsonl"
            while process.poll() is None and (
                not path.exists() or len(read_rows(path)) < (cut + 1) * steps // (cuts + 1)
            ):
                time.sleep(0.05)
            process.kill()

        run_job(
            run_dir,
            *(arguments if not cut else ()),
            beside=until_its_turn,
            expected=(-signal.SIGKILL,),
            resume=bool(cut),
        )
    return run_job(run_dir, resume=True)


def _stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "TZ"
    except OSError:
        return True


def timed(faults: list[dict], events: list[dict]) -> list[dict]:
    """Return the faults, with the seconds to detection and to recovery if the ledger has them."""
    result = []
    for fault in faults:
        later = [event for event in events if event["time"] >= fault["time"] - 0.01]
        # A fault during a restart of the whole run has no `lost` event of its own: the restart repairs it.
        noted = next(
            (e for e in later if e["event"] == "resumed" or (e["event"] == "lost" and e["actor"] == fault["actor"])),
            None,
        )
        lost = noted["time"] if noted is not None else None
        replaced = next(
            (
                e["time"]
                for e in later
                if lost is not None
                and e["time"] >= lost
                and (
                    e["event"] == "ready"
                    or (
                        e["event"] == "joined"
                        and noted["event"] == "lost"
                        and e["actor"].partition(".")[0] == fault["role"]
                    )
                )
            ),
            None,
        )
        result.append(
            fault
            | ({"detected": lost - fault["time"]} if noted is not None and noted["event"] == "lost" else {})
            | ({} if replaced is None else {"recovered": replaced - fault["time"]})
        )
    return result


def median_of(faults: list[dict], role: str, what: str) -> float | None:
    """Return the median over kills; None without any. How fast a freeze is detected depends on a setting."""
    values = [fault[what] for fault in faults if fault["role"] == role and fault["kind"] == "killed" and what in fault]
    return statistics.median(values) if values else None


def make(overrides: Sequence[str], out: Path) -> ChaosBenchmark:
    return ChaosBenchmark(overrides, out)
