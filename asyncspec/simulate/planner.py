"""Chooses how to divide GPUs: tensor parallel degree, generators against trainers, slots, draft length.

All choices are ranked by a quick estimate, a step being its slower stage, and the best ones are simulated. Each node
generates, trains or computes logprobs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from asyncspec.models import sizes
from asyncspec.simulate.devices import PRECISIONS, Drafting, Forward, Gpu, forward
from asyncspec.simulate.pipeline import Group, Pipeline, seconds, simulate
from asyncspec.simulate.rollout import Overheads, Rounds, finish_s
from asyncspec.simulate.workload import Acceptance, Lengths

DEGREES = (1, 2, 4, 8, 16)
LENGTHS = (0, 1, 2, 3, 5, 7)  # draft lengths that are considered
MEMORY_SHARE = 0.9  # of a GPU that may be filled
TRAINER_BYTES = 16  # of a parameter: weights, gradients and two moments in float32
ACTIVATION_BYTES = 8e9  # that a trainer's GPU has left for activations
MOST_SLOTS = 512
# Choices that are simulated, with speculation and without; their steps; of these, those that fill the pipeline.
SIMULATED, PLAIN, STEPS, FILLING = 12, 6, 8, 3
REWARD_S = 0.1  # from the end of a group until its rewards are known
LOGPROB_SHARE = 3  # nodes that train for each one that computes logprobs, which are a third of training's work


@dataclass(frozen=True)
class Job:
    """What is to be trained, and on what.

    acceptance: of a draft; its acceptance rates do not depend on the draft length.
    flops_share: the share of the bfloat16 peak that training and logprob reach.
    """

    model: Mapping[str, Any]
    gpu: Gpu
    gpus: int
    lag: int
    prompts: int
    group_size: int
    lengths: Lengths
    prompt: float
    method: str
    acceptance: Acceptance
    precision: str = "bfloat16"
    flops_share: float = 0.35
    overheads: Overheads = Overheads(round_s=1e-3)

    @property
    def rollouts(self) -> int:
        return self.prompts * self.group_size

    @property
    def nodes(self) -> int:
        return max(1, self.gpus // self.gpu.gpus_per_node)

    @cached_property
    def drawn(self) -> tuple[np.ndarray, np.ndarray]:
        """The lengths and acceptance rates of the responses of some steps, float [STEPS, prompts, group_size]."""
        rng, count = np.random.default_rng(0), STEPS * self.rollouts
        shape = (STEPS, self.prompts, self.group_size)
        return self.lengths.draw(rng, count).reshape(shape), self.acceptance.draw(rng, count).reshape(shape)


class Choice(NamedTuple):
    """How the GPUs are divided. trainers, logprobs: GPUs. replicas: generators of `degree` GPUs each."""

    degree: int
    trainers: int
    logprobs: int
    replicas: int
    slots: int
    draft_length: int


class Outcome(NamedTuple):
    """What a choice gives: seconds of a step, and of these what is exposed; limit: what to have more of."""

    choice: Choice
    step_s: float
    exposed_s: float
    train_s: float
    generation_s: float  # of one batch alone
    oldest: int  # versions that the oldest token was behind
    limit: str
    source: str  # table or roofline
    clipped: tuple[str, ...]


def logprob_ranks(job: Job) -> int:
    """Return how many GPUs a logprob actor needs, a power of two: two versions of the policy in 16 bits fit on them."""
    versions = 2 * 2 * sizes.parameters(dict(job.model))
    return 2 ** math.ceil(math.log2(max(1.0, versions / (MEMORY_SHARE * job.gpu.memory_bytes))))


def target_of(job: Job, degree: int) -> Forward:
    return forward(job.gpu, job.model, job.precision, degree)


def slots_of(job: Job, degree: int, replicas: int) -> int:
    """Return how many sequences of mean length a replica's KV cache holds; 0: the weights do not fit."""
    parameters, held = sizes.parameters(dict(job.model)), min(degree, job.model["num_key_value_heads"])
    weights = parameters * PRECISIONS[job.precision] / degree
    arriving = 2 * parameters / degree * (1 if degree == 1 else 2)
    room = MEMORY_SHARE * job.gpu.memory_bytes - weights - arriving
    sequence = sizes.kv_bytes_per_token(dict(job.model), 2) / held * (job.prompt + job.lengths.mean)
    needed = math.ceil((job.lag + 1) * job.rollouts / replicas)
    return max(0, min(MOST_SLOTS, int(room / sequence), 8 * math.ceil(needed / 8)))


def train_s(job: Job, trainers: int) -> float:
    """Return the seconds in which so many GPUs train a step's rollouts."""
    tokens = job.rollouts * job.lengths.mean + job.prompts * job.prompt
    flops = 6 * sizes.active_parameters(dict(job.model)) * tokens
    return flops / (trainers * job.gpu.flops * job.flops_share)


def choices(job: Job) -> Iterator[Choice]:
    """Yield the choices whose weights fit."""
    parameters = sizes.parameters(dict(job.model))
    room = MEMORY_SHARE * job.gpu.memory_bytes - ACTIVATION_BYTES
    least = math.ceil(parameters * TRAINER_BYTES / room)
    methods = LENGTHS if job.method != "none" else (0,)
    for degree in (n for n in DEGREES if n <= job.gpu.nvlink_gpus and job.model["num_attention_heads"] % n == 0):
        for trainers, logprobs in _splits(job):
            generating = job.gpus - trainers - logprobs
            if trainers < least or generating < degree or generating % degree:
                continue
            replicas = generating // degree
            if slots := slots_of(job, degree, replicas):
                for k in methods:
                    yield Choice(degree, trainers, logprobs, replicas, slots, k)


def _splits(job: Job) -> Iterator[tuple[int, int]]:
    """Yield numbers of GPUs that train and that compute logprobs: whole nodes, or GPUs of the only node."""
    unit = job.gpu.gpus_per_node if job.nodes > 2 else 1
    units, step = job.gpus // unit, max(unit, logprob_ranks(job))
    found = set()
    for share in (0.06, 0.09, 0.12, 0.16, 0.2, 0.25, 0.31, 0.38, 0.45, 0.55, 0.65):
        trainers = max(1, round(share * units))
        logprobs = step * max(1, round(unit * trainers / LOGPROB_SHARE / step))
        if unit * trainers + logprobs < job.gpus:
            found.add((unit * trainers, logprobs))
    yield from sorted(found)


def rounds_of(job: Job, choice: Choice) -> Rounds:
    method = job.method if choice.draft_length else "none"
    return Rounds(target_of(job, choice.degree), Drafting(target_of(job, choice.degree), method), job.overheads)


def _costs(job: Job, rounds: Rounds, slots: int, k: int):
    return rounds.costs(slots, k, job.prompt + 0.1 * job.lengths.mean, job.prompt + 2 * job.lengths.mean)


def generation_s(job: Job, choice: Choice) -> float:
    """Return the seconds in which the replicas generate one step's rollouts alone."""
    tokens, accept = (each[0].ravel() for each in job.drawn)
    costs = _costs(job, rounds_of(job, choice), choice.slots, choice.draft_length)
    return finish_s(costs, tokens, accept, job.prompt, choice.replicas)


def quick_s(job: Job, choice: Choice) -> float:
    """Return a quick estimate of a step: its stages one after the other at lag 0, else the slower one."""
    generating, training = generation_s(job, choice), train_s(job, choice.trainers)
    return generating + training if job.lag == 0 else max(generating, training)


def outcome(job: Job, choice: Choice) -> Outcome:
    """Simulate some steps."""
    rounds = rounds_of(job, choice)
    parameters = sizes.parameters(dict(job.model))
    training = train_s(job, choice.trainers)
    tokens = job.rollouts * job.lengths.mean + job.prompts * job.prompt
    ranks = logprob_ranks(job)
    actors = max(1, choice.logprobs // ranks)
    of_group = training / 3 * choice.trainers / (ranks * job.prompts)
    pipeline = Pipeline(
        lag=job.lag,
        generators=choice.replicas,
        slots=choice.slots,
        costs=_costs(job, rounds, choice.slots, choice.draft_length),
        logprobs=actors,
        delivery_s=2 * parameters / job.gpu.network_bytes_s,
        pass_tokens=tokens / 16,
    )

    def group_of(lengths: np.ndarray, accept: np.ndarray) -> Group:
        trained = float(lengths.sum() + job.prompt)
        return Group(lengths, accept, job.prompt, REWARD_S, of_group, trained, training * trained / tokens)

    work = [[group_of(*each) for each in zip(*of_step)] for of_step in zip(*job.drawn)]
    steps = simulate(pipeline, work)
    step_s = float(seconds(steps, FILLING).mean())
    exposed = float(np.mean([step.parts["exposed_generation"] for step in steps[FILLING:]]))
    alone = generation_s(job, choice)
    lags = max(index - min(step.oldest) for index, step in enumerate(steps))
    target = rounds.target
    clipped = tuple(sorted(getattr(target, "clipped", ())))
    return Outcome(
        choice,
        step_s,
        exposed,
        training,
        alone,
        lags,
        _limit(job, choice, step_s, exposed, alone),
        target.source,
        clipped,
    )


def _limit(job: Job, choice: Choice, step_s: float, exposed_s: float, alone_s: float) -> str:
    """Say what a step mostly waits for."""
    if exposed_s < 0.05 * step_s:
        return "training"
    longest = replace(job.lengths, sigma=0.0) if job.lengths.sigma else job.lengths
    even = replace(job, lengths=longest, acceptance=replace(job.acceptance, spread=0.0))
    return "stragglers" if alone_s > 1.5 * generation_s(even, choice) else "generation"


def plan(job: Job) -> list[Outcome]:
    """Return the best choices, the best first; if all of them speculate, the best one without speculation is the last.

    It is empty if the model fits in no way.
    """
    ranked = sorted(choices(job), key=lambda choice: quick_s(job, choice))
    found = sorted((outcome(job, choice) for choice in ranked[:SIMULATED]), key=_step_s)
    plain = [choice for choice in ranked if choice.draft_length == 0]
    if plain and not any(each.choice.draft_length == 0 for each in found):
        found.append(min((outcome(job, choice) for choice in plain[:PLAIN]), key=_step_s))
    return found


def _step_s(outcome: Outcome) -> float:
    return outcome.step_s


def by_acceptance(job: Job, choice: Choice, lengths: Sequence[float], ks: Sequence[int]) -> np.ndarray:
    """Return the speedup of generation, float [ks, lengths]; NaN where an acceptance length is above k + 1."""
    without = generation_s(job, choice._replace(draft_length=0))
    found = np.full((len(ks), len(lengths)), np.nan)
    for i, k in enumerate(ks):
        for j, length in enumerate(lengths):
            if length <= k + 1:
                acceptance = Acceptance.of_length(length, k, job.acceptance.spread)
                drafted = replace(job, acceptance=acceptance)
                found[i, j] = without / generation_s(drafted, choice._replace(draft_length=k))
    return found
