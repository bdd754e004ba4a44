"""bench deployment: 12 generating and 4 training nodes, without a GPU. Each node has a network namespace, a torchrun
and its actors. Queues, lag, broadcasts and attribution are real. Only the computing is mocked, by waiting
(configs/mock_rl_think_8b.yaml says for how long, and why).

Variants: no speculation; speculation; and speculation with a fault: an exception in a generator, a generating node that
is cut off from the network for a while, a trainer rank whose part of each checkpoint takes longer than a step.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from asyncspec import faults
from asyncspec.bench.harness import Benchmark, Samples, plot_parts, ratio
from asyncspec.bench.jobs import job_dir
from asyncspec.bench.namespaces import Hosts
from asyncspec.config import Config, load, topology
from asyncspec.errors import UserError
from asyncspec.ledger import checkpoint, ledger
from asyncspec.ledger.audit import violations
from asyncspec.timing.attribution import PARTS
from asyncspec.timing.metrics import read_rows

CONFIG, SKIP = "mock_rl_think_8b", 2  # the configuration; steps that fill the pipeline
LONGEST_S = 900.0
FAULT_AFTER = 4  # steps
CUT_S = 12.0  # seconds of wall time for which a node is cut off
RAISES, CUT_OFF, SLOW = "a generator raises", "a node cut off", "a slow checkpoint"
SAVE_EVERY, SAVE_S = 3, 6.0  # steps between checkpoints, and seconds of wall time that one rank's part takes
_OF_VARIANT = {  # variant -> its settings
    "ar": ["speculation.method=none"],
    "spec": [],
    f"spec, {RAISES}": ["deployment.faults=asked"],
    f"spec, {CUT_OFF}": [],
    f"spec, {SLOW}": [
        f"checkpoint.every={SAVE_EVERY}",
        f"deployment.delays=trainer_rank1:checkpoint={SAVE_S:g}",
    ],
}
PUBLISHED = {"exposed_generation_ar_s": 10.4, "exposed_generation_spec_s": 0.6, "step_ar_s": 75.0, "step_spec_s": 60.5}


class DeploymentBenchmark(Benchmark):
    name = "deployment"
    repeats = 1
    variants = tuple(_OF_VARIANT)
    columns = (
        "step_s",
        "exposed_generation_s",
        "exposed_logprob_s",
        "prepare_s",
        "recovery_s",
        "train_s",
        "lag_violations",
        "generators_lost",
        "joined_again",
        "checkpoints",
    )

    def __init__(self, overrides: Sequence[str], out: Path) -> None:
        self.overrides, self.out = list(overrides), out.absolute()
        self.config = self._config("ar")
        if (steps := self.config.steps) <= FAULT_AFTER + SKIP:
            raise UserError(
                f"bench deployment: steps={steps}: expected at least {FAULT_AFTER + SKIP + 1}, for the faults"
            )
        nodes = topology.parse(self.config.deployment.nodes)
        self.victim = max(i for i, node in enumerate(nodes) if "generator" in node)  # the node that is cut off
        self.raising = f"generator{topology.total(nodes)['generator'] // 2}"
        self.hosts = Hosts(len(nodes))

    def _config(self, variant: str) -> Config:
        return load(CONFIG, self._settings(variant))

    def _settings(self, variant: str) -> list[str]:
        common = ["speculation.method=ngram", "deployment.silent_timeout_s=3"]
        return [*common, *_OF_VARIANT[variant], *self.overrides]

    def measure(self, variant: str, repetition: int) -> dict[str, float]:
        run_dir = job_dir(self.out, variant, repetition)
        logs = run_dir.with_suffix(".hosts")
        logs.mkdir(parents=True, exist_ok=True)
        nodes = []
        for i in range(self.hosts.count):
            nodes.append(
                self.hosts.start(
                    i,
                    [
                        "-m",
                        "torch.distributed.run",
                        "--nnodes",
                        str(self.hosts.count),
                        "--nproc-per-node",
                        "1",
                        "--node-rank",
                        str(i),
                        "--master-addr",
                        self.hosts.address(0),
                        "--master-port",
                        str(29500 + repetition),
                        "-m",
                        "asyncspec.cli",
                        "train",
                        "--config",
                        CONFIG,
                        "--run-dir",
                        str(run_dir),
                        *self._settings(variant),
                    ],
                    logs / f"{i}.log",
                )
            )
        try:
            self._attend(variant, run_dir, nodes)
        finally:
            self.hosts.cut_off(self.victim, False)
            for node in nodes:
                if node.poll() is None:
                    os.killpg(node.pid, signal.SIGTERM)
            for node in nodes:
                try:
                    node.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(node.pid, signal.SIGKILL)
        rows = read_rows(run_dir / "metrics.jsonl") if (run_dir / "metrics.jsonl").exists() else []
        if len(rows) < self.config.steps:
            raise UserError(
                f"bench deployment: {variant}: {len(rows)} of {self.config.steps} steps done; "
                f"see {logs} and {run_dir}/logs"
            )
        scale, steady = self.config.mock.time_scale, rows[SKIP:]

        def mean(key: str) -> float:
            return statistics.fmean(row[key] for row in steady) / scale

        events = list(ledger.read(run_dir))
        broken = violations(events, self.config.policy_lag, self.config.rl.groups_per_step, len(rows))
        return {
            "step_s": mean("time/step"),
            "step_median_s": statistics.median(row["time/step"] for row in steady) / scale,
            **{f"{part}_s": mean(f"time/{part}") for part in PARTS},
            "generation_s": mean("time/generation"),
            "violations": len(broken),
            "generators_lost": rows[-1].get("recovery/generators_lost", 0),
            "restarts": rows[-1].get("recovery/restarts", 0),
            "checkpoints": len(list(run_dir.glob("checkpoints/trainer-*"))),
            "saved_step": found[0] if (found := checkpoint.newest(run_dir, "trainer")) else 0,
            "joined_again": sum(event["event"] == "joined" for event in events),
            "lag_violations": sum("version" in text for text in broken)
            + sum(row["lag/max"] > self.config.policy_lag for row in rows),
        }

    def _attend(self, variant: str, run_dir: Path, nodes: list[subprocess.Popen]) -> None:
        """Wait until the controller's node has ended. Cause the variant's fault in between."""
        deadline, cut, metrics = time.monotonic() + LONGEST_S, 0.0, run_dir / "metrics.jsonl"
        due = variant.endswith((RAISES, CUT_OFF))
        while nodes[0].poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
            if due and metrics.exists() and len(read_rows(metrics)) >= FAULT_AFTER:
                due = False
                if variant.endswith(RAISES):
                    faults.ask(run_dir, self.raising, "CUDA error: uncorrectable ECC error encountered")
                else:
                    cut = time.monotonic()
                    self.hosts.cut_off(self.victim, True)
            if cut and time.monotonic() - cut > CUT_S:
                cut = 0.0
                self.hosts.cut_off(self.victim, False)

    def headline(self, samples: Samples) -> dict[str, float]:
        def mean(variant: str, key: str) -> float:
            return statistics.fmean(sample[key] for sample in samples[variant])

        return {
            "exposed_generation_ar_s": mean("ar", "exposed_generation_s"),
            "exposed_generation_spec_s": mean("spec", "exposed_generation_s"),
            "step_ar_s": mean("ar", "step_s"),
            "step_spec_s": mean("spec", "step_s"),
            "step_speedup": ratio(samples, "step_s", "ar", "spec"),
            "lag_violations": sum(s["lag_violations"] for v in self.variants for s in samples[v]),
            "violations": sum(s["violations"] for v in self.variants for s in samples[v]),
            "step_raises_s": mean(f"spec, {RAISES}", "step_s"),
            "step_cut_off_s": mean(f"spec, {CUT_OFF}", "step_s"),
            "step_slow_checkpoint_s": mean(f"spec, {SLOW}", "step_s"),
            "generators_lost": sum(s["generators_lost"] for v in self.variants for s in samples[v]),
            "time_scale": self.config.mock.time_scale,
            "rate_shaped": float("rate" in self.hosts.shaped),
            "delay_shaped": float("delay" in self.hosts.shaped),
        }

    def plot(self, axes, samples: Samples) -> None:
        """Draw a step of each variant by its parts; a stroke is the published step."""
        plot_parts(axes, samples, self.variants)
        for variant, key in (("ar", "step_ar_s"), ("spec", "step_spec_s")):
            axes.plot([PUBLISHED[key]], [variant], "k|", markersize=30)
        axes.set_xlabel("seconds per step on the mocked machines; strokes: published")

    def close(self) -> None:
        self.hosts.close()


def make(overrides: Sequence[str], out: Path) -> DeploymentBenchmark:
    return DeploymentBenchmark(overrides, out)
