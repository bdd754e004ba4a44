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
SIMULATED, PLAIN = 12, 6  # choices that are simulated, of all and of those without speculation
STEPS = 6  # that are simulated, after those that fill the pipeline
WAITS = 0.05  # of a step: shorter waits do not count
REWARD_S = 0.1  # from the end of a group until its rewards are known
LOGPROB_SHARES = (3.0, 2.0)  # GPUs that train for each one that computes logprobs, which are a third of training's work


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

    @property
    def filling(self) -> int:
        """The steps that fill the pipeline."""
        return self.lag + 2

    @cached_property
    def drawn(self) -> tuple[np.ndarray, np.ndarray]:
        """The lengths and acceptance rates of the responses of all steps, float [steps, prompts, group_size]."""
        shape = (self.filling + STEPS, self.prompts, self.group_size)
        rng, count = np.random.default_rng(0), shape[0] * self.rollouts
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
    """What a choice gives: seconds of a step, and of these what is exposed; limit: what holds a step up."""

    choice: Choice
    step_s: float
    exposed_s: float  # generation
    exposed_logprob_s: float
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


def arriving(job: Job, degree: int) -> float:
    """Return the bytes in which weights arrive, in 16 bits. Of several ranks each holds its part of two versions."""
    return 2 * sizes.parameters(dict(job.model)) / degree * (1 if degree == 1 else 2)


def slots_of(job: Job, degree: int, replicas: int) -> int:
    """Return how many sequences of mean length a replica's KV cache holds; 0: the weights do not fit."""
    parameters, held = sizes.parameters(dict(job.model)), min(degree, job.model["num_key_value_heads"])
    weights = parameters * PRECISIONS[job.precision] / degree
    room = MEMORY_SHARE * job.gpu.memory_bytes - weights - arriving(job, degree)
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
            # A generator stands on one node, unless it is larger.
            first = (generating % job.gpu.gpus_per_node) % min(degree, job.gpu.gpus_per_node)
            if trainers < least or generating < degree or generating % degree or first:
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
        trainers = unit * max(1, round(share * units))
        for of_logprob in LOGPROB_SHARES:
            logprobs = step * max(1, round(trainers / of_logprob / step))
            if trainers + logprobs < job.gpus:
                found.add((trainers, logprobs))
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
    """Return a quick estimate of a step. At lag 0 its stages follow one another. Else the slowest one counts: training,
    logprob, the tokens that engines make with as many sequences as the lag keeps in flight, or the longest response.
    """
    alone, training = generation_s(job, choice), train_s(job, choice.trainers)
    logprob = training * choice.trainers / 3 / choice.logprobs
    if job.lag == 0:
        return alone + training
    live = min(choice.slots, max(1.0, job.lag * job.rollouts / choice.replicas))
    rounds, k = rounds_of(job, choice), choice.draft_length
    of_round = rounds.seconds(live, k, job.prompt + job.lengths.mean / 2)
    gained = live * (job.acceptance.length(k) if k else 1.0)
    generating = job.rollouts * job.lengths.mean / choice.replicas * of_round / gained
    return max(training, logprob, generating, alone / job.lag)


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
    step_s, kept = float(seconds(steps, job.filling).mean()), steps[job.filling :]
    waits = {name: float(np.mean([step.parts[name] for step in kept])) for name in kept[0].parts if name != "train"}
    lags = max(index - min(step.oldest) for index, step in enumerate(steps))
    clipped = tuple(sorted(getattr(rounds.target, "clipped", ())))
    alone, limit = generation_s(job, choice), _limit(job, choice, step_s, waits)
    exposed = waits["exposed_generation"], waits["exposed_logprob"]
    return Outcome(choice, step_s, *exposed, training, alone, lags, limit, rounds.target.source, clipped)


def _limit(job: Job, choice: Choice, step_s: float, waits: Mapping[str, float]) -> str:
    """Say what a step mostly waits for."""
    if sum(waits.values()) < WAITS * step_s:
        return "training"
    longest = max(waits, key=lambda name: waits[name])
    if longest != "exposed_generation":
        return {"exposed_logprob": "logprob", "exposed_reward": "rewards"}.get(longest, "weights")
    even = replace(job, lengths=replace(job.lengths, sigma=0.0), acceptance=replace(job.acceptance, spread=0.0))
    return "stragglers" if generation_s(job, choice) > 1.5 * generation_s(even, choice) else "generation"


def plan(job: Job) -> list[Outcome]:
    """Return the best choices, with and without speculation, the best first; none if the model fits in no way."""
    ranked = sorted(choices(job), key=lambda choice: quick_s(job, choice))
    found = [outcome(job, choice) for choice in ranked[:SIMULATED]]
    plain = [choice for choice in ranked[SIMULATED:] if choice.draft_length == 0]
    if plain and not any(each.choice.draft_length == 0 for each in found):
        found.append(min((outcome(job, choice) for choice in plain[:PLAIN]), key=_step_s))
    return sorted(found, key=_step_s)


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
