"""bench peers: the default job here and in TRL.

TRL's GRPOTrainer gets the same policy, prompts in the same order, reward, group and batch sizes, optimizer, loss,
clipping and correction, on both cores in turns; once with transformers' generate and once with vLLM on the CPU. This
system runs its default job: the generator, the trainer and the logprob actor have a thread each. A run ends once its
held-out accuracy is reached, as in bench end_to_end. Evaluations count in this system's steps and not in TRL's.

TRL lives in an environment of its own. ASYNCSPEC_TRL_PYTHON names its interpreter; without it the benchmark makes one
with scripts/compare/make_environments.sh, which takes about 5 minutes.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path

from rich.table import Table

from asyncspec import config as configuration
from asyncspec.bench.end_to_end import EVAL_EVERY, SKIP, STEPS, TARGET, curve, to_target_s, watch
from asyncspec.bench.harness import Benchmark, Samples, ratio
from asyncspec.bench.interpreters import SCRIPTS, interpreter
from asyncspec.bench.jobs import job_dir, run_job
from asyncspec.errors import UserError
from asyncspec.tasks.data import load_problems
from asyncspec.timing.metrics import read_rows

OURS = "asyncspec"
ENGINES = {"TRL, transformers": "transformers", "TRL, vLLM": "vllm"}
CORES = 2
ROWS_PER_PASS = 16  # rollouts of one of TRL's passes: the fastest of 16, 32 and 128 on two cores


def job_of(c: configuration.Config, engine: str, directory: Path) -> dict:
    """Return the fields of scripts/compare/trl_grpo.py's Job that make it run a configuration's job."""
    optimizer = c.trainer.optimizer
    return {
        "directory": str(directory),
        "policy": str(configuration.resolve_path(c.model.path)),
        "train": str(directory / "train.jsonl"),
        "held_out": str(directory / "held_out.jsonl"),
        "engine": engine,
        "threads": CORES,
        "rows_per_pass": ROWS_PER_PASS,
        "steps": c.steps,
        "eval_every": c.eval.every,
        "target": TARGET,
        "seed": c.seed,
        "groups_per_step": c.rl.groups_per_step,
        "group_size": c.rl.group_size,
        "max_prompt_tokens": c.engine.max_prompt_tokens,
        "max_response_tokens": c.sampling.max_response_tokens,
        "temperature": c.sampling.temperature,
        "clip_low": c.rl.clip_low,
        "clip_high": c.rl.clip_high,
        "correction_high": c.rl.correction_high,
        "lr": optimizer.lr,
        "beta1": optimizer.beta1,
        "beta2": optimizer.beta2,
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm,
        "warmup_steps": optimizer.warmup_steps,
    }


class PeersBenchmark(Benchmark):
    name = "peers"
    repeats, full_repeats = 2, 8
    variants = (OURS, *ENGINES)
    columns = ("to_target_s", "steps", "step_s", "reward_start")

    def __init__(self, overrides: Sequence[str], out: Path) -> None:
        self.overrides, self.out = list(overrides), out
        configuration.load("tiny", self.overrides)  # wrong fields, before anything is made

    @cached_property
    def python(self) -> str:
        """The interpreter of an environment with TRL."""
        return interpreter("trl", self.out)

    def measure(self, variant: str, repetition: int) -> dict[str, float]:
        directory = job_dir(self.out, variant, repetition)
        shutil.rmtree(directory, ignore_errors=True)  # of a sitting that was cut short
        overrides = [f"steps={STEPS}", f"eval.every={EVAL_EVERY}", f"seed={repetition}", "checkpoint.every=0"]
        overrides += self.overrides
        if variant == OURS:
            rows = run_job(directory, *overrides, beside=partial(watch, directory), expected=(0, 130))
        else:
            directory.mkdir()
            rows = self._trl(directory, ENGINES[variant], configuration.load("tiny", overrides))
        steps = [row for row in rows if "time/step" in row]
        return {
            "to_target_s": to_target_s(rows, f"bench peers: {variant}"),
            "steps": float(len(steps)),
            "step_s": statistics.median(row["time/step"] for row in steps[SKIP:]),
            "reward_start": statistics.fmean(row["reward/mean"] for row in steps[:EVAL_EVERY]),
        }

    def _trl(self, directory: Path, engine: str, c: configuration.Config) -> list[dict]:
        """Run TRL's trainer on a configuration's job; return its rows."""
        problems, job = load_problems(c), job_of(c, engine, directory)
        for name, rows in (("train", problems.training), ("held_out", problems.held_out)):
            lines = [json.dumps({"prompt": row.prompt, "answer": row.answer}) + "\n" for row in rows]
            Path(job[name]).write_text("".join(lines))
        file, log = directory / "job.json", directory / "log"
        file.write_text(json.dumps(job, indent=1))
        with log.open("w") as written:
            done = subprocess.run(
                [self.python, str(SCRIPTS / "trl_grpo.py"), str(file)], stdout=written, stderr=subprocess.STDOUT
            )
        if done.returncode:
            raise UserError(f"bench peers: TRL ended with code {done.returncode}; see {log}")
        return read_rows(directory / "metrics.jsonl")

    def headline(self, samples: Samples) -> dict[str, float]:
        return {
            "step_ratio_trl": min(self._ratio(samples, "step_s", variant) for variant in ENGINES),
            "accuracy_time_ratio_trl": min(self._ratio(samples, "to_target_s", variant) for variant in ENGINES),
        }

    def _ratio(self, samples: Samples, key: str, variant: str) -> float:
        return ratio(samples, key, variant, OURS)

    def tables(self, samples: Samples) -> list[Table]:
        table = Table(title="TRL's seconds over this system's, median of the pairs", title_justify="left")
        for column in ("engine", "step", f"to {TARGET:g}"):
            table.add_column(column, justify="left" if column == "engine" else "right")
        for variant in ENGINES:
            ratios = [self._ratio(samples, key, variant) for key in ("step_s", "to_target_s")]
            table.add_row(variant, *(f"{each:.2f}" for each in ratios))
        return [*super().tables(samples), table]

    def plot(self, axes, samples: Samples) -> None:
        """Draw the held-out accuracy of each run by its time."""
        for variant, color in zip(self.variants, ("#2f6db5", "#c9362b", "#7a5195")):
            for repetition in range(len(samples[variant])):
                file = job_dir(self.out, variant, repetition) / "metrics.jsonl"
                if not file.exists():  # deleted since --full measured it
                    continue
                rows = read_rows(file)
                label = variant if repetition == 0 else None
                axes.plot(*zip(*curve(rows)), "o-", color=color, markersize=3, alpha=0.7, label=label)
        axes.axhline(TARGET, color="gray", linewidth=0.8, linestyle="--")
        axes.set_xlabel("seconds since the first step began")
        axes.set_ylabel("held-out accuracy, mean of two")
        axes.legend(fontsize=7)


def make(overrides: Sequence[str], out: Path) -> PeersBenchmark:
    return PeersBenchmark(overrides, out)
