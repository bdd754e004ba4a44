"""bench trainer: packed passes with shared prompts, against padded passes of one group each.

Both paths compute the same gradient: forward and backward over the same groups, without the optimizer's step. The
padded path is what a trainer without packing does: every response repeats its prompt, all are padded to the longest,
and logits of all positions exist at once.

- default: the default job's policy and its lengths;
- smollm2: the shape of SmolLM2-135M with random weights, prompts of 60 tokens and responses of 42;
- long tail: log-normal lengths on 16 ranks. Passes are counted, not run: a round takes as long as its largest pass;
- memory N: the peak of a process over one group of responses of N tokens, besides what the process holds before.

A rate is the number of response tokens per second of busy time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing as mp

from asyncspec.bench.harness import Benchmark, Samples, median, ratio
from asyncspec.config import Config, resolve_path
from asyncspec.config import load as load_config
from asyncspec.models import policy
from asyncspec.models.shape import PolicyShape
from asyncspec.rl.accumulate import GradientAccumulator
from asyncspec.rl.advantage import grpo
from asyncspec.rl.batch import Part, Pool
from asyncspec.rl.loss import Tokens, policy_loss
from asyncspec.wire import messages as m

RANKS, GROUPS, MEDIAN, SIGMA, LONGEST, PROMPT, PASS = 16, 128, 6000, 0.6, 16384, 300, 32768  # of the long tail
LEAST_S = 3.0  # seconds of a measurement; shorter loads are repeated
MEMORY_LENGTHS = (64, 128, 256, 512)  # tokens of each of four responses; the ratio is of the longest
SMOLLM2 = PolicyShape(
    model_type="llama",
    vocab_size=49152,
    dim=576,
    n_layers=30,
    n_heads=9,
    n_kv_heads=3,
    head_dim=64,
    hidden_dim=1536,
    max_positions=8192,
    rope_theta=1e5,
    norm_eps=1e-5,
    tied=True,
    eos_token_id=2,
    pad_token_id=2,
)


@dataclass
class Load:
    """A policy and the groups of a part of a step."""

    model: torch.nn.Module
    groups: list[tuple[m.Group, m.Arrays]]
    tokens_per_pass: int

    @property
    def tokens(self) -> int:
        return sum(int(arrays["lengths"].sum()) for _, arrays in self.groups)


def group_of(rng, ticket: int, prompt: int, lengths: np.ndarray, vocabulary: int) -> tuple[m.Group, m.Arrays]:
    """Return a group of random tokens."""
    total = int(lengths.sum())
    tokens = rng.integers(2, vocabulary, total).astype(np.int32)
    noise = (-rng.random(total)).astype(np.float32)
    arrays = {"tokens": tokens, "behavior": noise, "proximal": noise, "lengths": lengths.astype(np.int32)}
    made = m.Ticket(
        ticket_id=ticket,
        step=0,
        min_version=0,
        prompt="",
        answer="",
        prompt_tokens=rng.integers(2, vocabulary, prompt).tolist(),
        seeds=list(range(len(lengths))),
        issued=0.0,
    )
    rewards = rng.random(len(lengths)).tolist()
    return m.Group(made, "", rewards, [False] * len(rewards), 0, 0, 0, 0, []), arrays


def default_load(config: Config) -> Load:
    """A quarter of a step of the default job. Responses to one prompt have similar lengths, as in its runs."""
    rng, r = np.random.default_rng(0), config.rl
    model, shape = policy.load(resolve_path(config.model.path), positions=config.positions)
    groups = []
    for ticket in range(max(1, r.groups_per_step // 4)):
        middle = rng.lognormal(np.log(36), 0.45)
        lengths = np.clip(rng.normal(middle, 2, r.group_size), 4, 115).astype(int)
        groups.append(group_of(rng, ticket, 12, lengths, shape.vocab_size))
    return Load(model, groups, config.trainer.tokens_per_pass)


def smollm2_load(config: Config, layers: int = SMOLLM2.n_layers, lengths: Sequence[int] = (42,) * 8) -> Load:
    shape, rng = replace(SMOLLM2, n_layers=layers), np.random.default_rng(0)
    torch.manual_seed(0)
    model = policy.build(shape, 60 + max(lengths))
    model.init_states()
    return Load(model, [group_of(rng, 0, 60, np.array(lengths), shape.vocab_size)], 1 << 30)


def packed_path(load: Load, config: Config) -> None:
    trainer = replace(config.trainer, tokens_per_pass=load.tokens_per_pass)
    accumulator = GradientAccumulator(load.model, replace(config, trainer=trainer))
    rounds = [each for group, arrays in load.groups for each in accumulator.add(group, arrays)]
    for passes in (*rounds, *accumulator.flush()):
        accumulator.run(passes[0])


def padded_path(load: Load, config: Config) -> None:
    for group, arrays in load.groups:
        prompt, lengths = group.ticket.prompt_tokens, arrays["lengths"]
        tokens_GL = torch.zeros(len(lengths), len(prompt) + int(lengths.max()), dtype=torch.int64)
        tokens_GL[:, : len(prompt)] = torch.tensor(prompt)
        index_L = torch.arange(tokens_GL.shape[1])
        ends_G = len(prompt) + torch.from_numpy(lengths).unsqueeze(1)
        mask_GL = (index_L >= len(prompt)) & (index_L < ends_G)
        tokens_GL[mask_GL] = torch.from_numpy(arrays["tokens"]).long()
        device = next(load.model.parameters()).device
        tokens_GL, mask_GL = tokens_GL.to(device), mask_GL.to(device)
        logits_GLV = load.model(tokens_GL).float()
        logprobs_TV = logits_GLV[:, :-1][mask_GL[:, 1:]].log_softmax(-1)
        logprob_T = logprobs_TV.gather(-1, tokens_GL[:, 1:][mask_GL[:, 1:]].unsqueeze(-1)).squeeze(-1)
        proximal_T, behavior_T = (torch.from_numpy(arrays[name]).to(device) for name in ("proximal", "behavior"))
        length_G = torch.from_numpy(lengths).long()
        advantage_G = grpo(torch.tensor(group.rewards).double(), torch.zeros_like(length_G), length_G).float()
        advantage_T = advantage_G.repeat_interleave(length_G).to(device)
        tokens = Tokens(proximal_T, behavior_T, advantage_T, length_G.to(device))
        policy_loss(logprob_T, tokens, config.rl)[0].backward()


PATHS = {"padded": padded_path, "packed": packed_path}


def long_tail(path: str, seed: int) -> float:
    """Return which share of the ranks' passes is response tokens."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.lognormal(np.log(MEDIAN), SIGMA, (GROUPS, 16)), LONGEST).astype(np.int32)
    if path == "packed":
        pool = Pool(RANKS, PASS)
        parts = [Part([0] * PROMPT, {"lengths": each, "tokens": np.zeros(each.sum(), np.int32)}) for each in lengths]
        rounds = [each for part in parts for each in pool.add(part)] + pool.flush()
        taken = sum(max(sum(part.tokens for part in each) for each in passes) for passes in rounds)
        return float(lengths.sum()) / (RANKS * taken)
    taken = 0
    for first in range(0, GROUPS, RANKS):  # each rank has a group; all make as many passes as the largest needs
        passes = [padded_sizes(each) for each in lengths[first : first + RANKS]]
        for index in range(max(len(each) for each in passes)):
            taken += max(each[index] for each in passes if index < len(each))
    return float(lengths.sum()) / (RANKS * taken)


def padded_sizes(lengths: np.ndarray) -> list[int]:
    """Return the tokens of each padded pass over consecutive responses of a group."""
    sizes, size, count, longest = [], 0, 0, 0
    for length in (PROMPT + int(length) for length in lengths):
        if count and max(longest, length) * (count + 1) > PASS:
            sizes.append(size)
            count = longest = 0
        count, longest = count + 1, max(longest, length)
        size = longest * count
    return [*sizes, size]


def peak(path: str, length: int, results) -> None:
    """Put the peak of this process's memory during a pass, in bytes, besides what it held before."""
    torch.set_num_threads(1)
    config = load_config("tiny")
    load = smollm2_load(config, layers=2, lengths=[length] * 4)
    PATHS[path](smollm2_load(config, layers=1, lengths=[2] * 4), config)  # loads kernels
    before = memory_of("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    PATHS[path](load, config)
    results.put(memory_of("VmHWM") - before)


def memory_of(name: str) -> int:
    """Return a field of this process's status, in bytes."""
    return 1024 * int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0])


class TrainerBenchmark(Benchmark):
    name = "trainer"
    repeats = 5
    variants = tuple(
        f"{load} {path}"
        for load in ("default", "smollm2", "long tail", *(f"memory {length}" for length in MEMORY_LENGTHS))
        for path in PATHS
    )
    columns = ("rate", "useful", "peak_mib")

    def __init__(self, overrides: Sequence[str], out: Path) -> None:
        torch.set_num_threads(1)
        self.config = load_config("tiny", overrides)
        self.loads: dict[str, Load] = {}

    def measure(self, variant: str, repetition: int) -> dict[str, float]:
        kind, _, path = variant.rpartition(" ")
        if kind == "long tail":
            return {"useful": long_tail(path, repetition)}
        if kind.startswith("memory"):
            results = mp.get_context("spawn").SimpleQueue()
            mp.spawn(_peak, args=(path, int(kind.split()[1]), results), nprocs=1)
            return {"peak_mib": results.get() / 2**20}
        if kind not in self.loads:
            self.loads[kind] = {"default": default_load, "smollm2": smollm2_load}[kind](self.config)
            for each in PATHS.values():
                each(self.loads[kind], self.config)
        load = self.loads[kind]
        load.model.zero_grad()
        start, passes = time.perf_counter(), 0
        while not passes or time.perf_counter() - start < LEAST_S:
            PATHS[path](load, self.config)
            passes += 1
        return {"rate": passes * load.tokens / (time.perf_counter() - start)}

    def headline(self, samples: Samples) -> dict[str, float]:
        return {
            "speedup_default": ratio(samples, "rate", "default packed", "default padded"),
            "speedup_smollm2": ratio(samples, "rate", "smollm2 packed", "smollm2 padded"),
            "speedup_long_tail": ratio(samples, "useful", "long tail packed", "long tail padded"),
            "peak_memory_ratio": ratio(
                samples, "peak_mib", *(f"memory {MEMORY_LENGTHS[-1]} {path}" for path in ("packed", "padded"))
            ),
        }

    def plot(self, axes, samples: Samples) -> None:
        for path in PATHS:
            peaks = [median(samples, f"memory {length} {path}", "peak_mib") for length in MEMORY_LENGTHS]
            axes.plot(MEMORY_LENGTHS, peaks, marker="o", label=path)
        axes.set_xlabel("tokens of each of four responses")
        axes.set_ylabel("peak memory of a pass, MiB")
        axes.set_ylim(0)
        axes.legend()


def _peak(_: int, path: str, length: int, results) -> None:
    peak(path, length, results)


def make(overrides: Sequence[str], out: Path) -> TrainerBenchmark:
    return TrainerBenchmark(overrides, out)
