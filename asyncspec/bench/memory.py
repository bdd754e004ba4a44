"""bench memory: what doctor says that an actor needs, against the most that its process has held.

Runs of three steps with random policies of 80 to 130 million parameters, whose weights outweigh the libraries. Rewards
are random, so that each group has a gradient. A checkpoint is held back for longer than a step usually takes, so that
its copy is there during a pass, as with a slow disk. The most that a process has held is VmHWM in /proc. glibc is told
to give freed memory back at once; by default it keeps what was freed of less than 32 MiB.

A ratio is the estimate over what was measured; of a role with several ranks the one that is furthest from 1.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from asyncspec.actors.crew import actor_names
from asyncspec.bench.harness import Benchmark, Samples, median
from asyncspec.config import load as load_config
from asyncspec.config import resolve_path
from asyncspec.drafts import draft
from asyncspec.errors import UserError
from asyncspec.launch import estimate
from asyncspec.models import policy
from asyncspec.models.contents import policy_tensors
from asyncspec.models.hf_files import write_checkpoint
from asyncspec.models.shape import PolicyShape

SHAPES: dict[str, dict[str, Any]] = {
    "untied": {
        "dim": 768,
        "n_layers": 8,
        "n_heads": 12,
        "n_kv_heads": 4,
        "head_dim": 64,
        "hidden_dim": 2048,
        "vocab_size": 32768,
        "tied": False,
    },
    "tied": {
        "dim": 1024,
        "n_layers": 10,
        "n_heads": 16,
        "n_kv_heads": 8,
        "head_dim": 64,
        "hidden_dim": 3072,
        "vocab_size": 8192,
        "tied": True,
    },
}
# Without AVX-512 a step in 16 bits took a minute or more, alone on two cores.
SLOW = ["model.dtype=bfloat16", "deployment.delays=checkpoint=200"]
# name -> (shape, fields)
RUNS: dict[str, tuple[str, list[str]]] = {
    "one rank": ("untied", []),
    "one rank, 16 bits": ("untied", SLOW),
    "two trainer ranks": ("untied", ["trainer.ranks=2"]),
    "two trainer ranks, 16 bits": ("tied", ["trainer.ranks=2", *SLOW]),
    "tensor parallel": ("untied", ["trainer.ranks=2", "trainer.tensor_parallel=2"]),
    "context parallel": ("untied", ["trainer.ranks=2", "trainer.context_parallel=2"]),
    "two logprob ranks": ("tied", ["logprob.ranks=2"]),
    "reference": ("untied", ["rl.kl_coef=0.1"]),
    "adapters": ("untied", ["model.lora.rank=8"]),
    "long": ("tied", ["sampling.max_response_tokens=300", "trainer.tokens_per_pass=620"]),
    "eagle3": ("untied", ["speculation.method=eagle3"]),
}
FIELDS = [
    "deployment.device=cpu",
    "data.reward=asyncspec.bench.memory:random_reward",
    "rl.group_size=2",
    "rl.groups_per_step=2",
    "sampling.max_response_tokens=60",
    "engine.max_prompt_tokens=56",
    "engine.slots=4",
    "data.eval_prompts=1",
    "trainer.tokens_per_pass=150",  # several passes in a step
    "checkpoint.every=1",
    "checkpoint.keep=1",
    "eval.every=0",
    "logging.backends=",
    "deployment.delays=checkpoint=20",
    "deployment.replacements=0",
    "deployment.restarts=0",
]
STEPS, SAMPLED_S, LOOKED_S = 3, 0.005, 0.05
ROLES = ("trainer", "logprob", "generator", "draft_adapter")


def random_reward(prompt: str, response: str, answer: str) -> float:
    """Return a random reward: random policies get none that they could learn from."""
    return random.random()


def write_policy(directory: Path, sizes: dict[str, Any]) -> None:
    """Write a random policy with a draft beside it."""
    tiny = resolve_path("asset:tiny/policy")
    shape = replace(PolicyShape.from_hf(tiny), max_positions=4096, **sizes)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: (torch.ones(size) if "norm" in name else 0.02 * torch.randn(size, generator=generator)).bfloat16()
        for name, size in policy_tensors(shape).items()
    }
    write_checkpoint(directory, shape.to_hf(), tensors, tiny)
    draft.new("eagle3", shape, policy.load(directory)[0]).save(directory / "eagle3")


def most_held(command: Sequence[str], names: Sequence[str], mark: str) -> dict[str, int]:
    """Run a command. Return the most bytes that each of its actors' processes has held, by name."""
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "0",
        "OMP_NUM_THREADS": "1",
        "ASYNCSPEC_MARK": mark,
    }
    found, pids, looked = dict.fromkeys(names, 0), dict[str, str](), 0.0
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                if time.monotonic() - looked > LOOKED_S:
                    looked = time.monotonic()
                    pids |= _new(set(names) - set(pids), mark)
                for name, pid in pids.items():
                    found[name] = max(found[name], _held(pid))
                time.sleep(SAMPLED_S)
        finally:
            process.terminate()
            process.wait()
        if process.returncode:
            output.seek(0)
            raise UserError(f"bench memory: {output.read().strip().splitlines()[-1]}")
    return found


def _new(names: set[str], mark: str) -> dict[str, str]:
    """Return name -> process id of the actors that have come. An actor gives its process its name."""
    found = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            name = Path(f"/proc/{entry}/comm").read_text().strip()
            if name in names and f"ASYNCSPEC_MARK={mark}".encode() in Path(f"/proc/{entry}/environ").read_bytes():
                found[name] = entry
        except OSError:  # it has ended meanwhile
            continue
    return found


def _held(pid: str) -> int:
    """Return the most bytes that a process has held; 0 once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return 1024 * int(status.partition("VmHWM:")[2].split()[0]) if "VmHWM:" in status else 0


class MemoryBenchmark(Benchmark):
    name = "memory"
    repeats = 1
    variants = tuple(RUNS)
    columns = tuple(f"{role}_{what}" for role in ROLES for what in ("gb", "ratio"))

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)

    def measure(self, variant: str, repetition: int) -> dict[str, float]:
        shape, own = RUNS[variant]
        directory = self.folder / shape
        if not directory.exists():
            write_policy(directory, SHAPES[shape])
        method = [] if any(field.startswith("speculation.method") for field in own) else ["speculation.method=ngram"]
        fields = [*FIELDS, *method, f"model.path={directory}", *own]
        if not method:
            fields.append(f"speculation.draft_path={directory}/eagle3")
        config = load_config("tiny", fields)
        described = PolicyShape.from_hf(directory).to_hf()
        names = actor_names(config)
        run_dir = self.folder / f"{variant.replace(' ', '-').replace(',', '')}-{repetition}"
        flags = ["--steps", str(STEPS), "--run-dir", str(run_dir)]
        command = [sys.executable, "-m", "asyncspec", "train", *flags, *fields]
        measured = most_held(command, list(names), f"{os.getpid()}-{variant}")
        found: dict[str, float] = {}
        for name, role in names.items():
            kind = role.removesuffix("_rank")
            ratio = sum(estimate.of_actor(config, described, role, cpu=True).values()) / measured[name]
            if abs(ratio - 1) >= abs(found.get(f"{kind}_ratio", 1.0) - 1):
                found |= {f"{kind}_gb": measured[name] / 1e9, f"{kind}_ratio": ratio}
        return found

    def headline(self, samples: Samples) -> dict[str, float]:
        ratios = [
            median(samples, variant, f"{role}_ratio")
            for variant in samples
            for role in ROLES
            if all(f"{role}_ratio" in sample for sample in samples[variant])
        ]
        return {"ratio_least": min(ratios), "ratio_most": max(ratios)}

    def plot(self, axes, samples: Samples) -> None:
        for role in ROLES:
            of = [name for name in samples if all(f"{role}_ratio" in sample for sample in samples[name])]
            axes.plot([median(samples, name, f"{role}_ratio") for name in of], of, "o", label=role)
        axes.axvspan(0.9, 1.1, alpha=0.15)
        axes.set_xlabel("estimated over measured")
        axes.legend()

    def close(self) -> None:
        self._folder.cleanup()


def make(overrides: Sequence[str], out: Path) -> MemoryBenchmark:
    if overrides:
        raise UserError(f"bench memory {overrides[0]}: expected no overrides, because each variant has its own fields")
    return MemoryBenchmark()
