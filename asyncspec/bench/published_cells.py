"""The cells of `asyncspec bench published`: how each published value is predicted, and under which assumptions.

- 235B: arXiv 2604.26779 projects Qwen3-235B-A22B on 512 and 2,048 GPUs with a closed simulator
- 8B: the same paper measured Qwen3-8B on 32 GB200, and on 64 with policy lag 1
- NeMo-RL: the steps of its performance page
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml

from asyncspec.models import sizes
from asyncspec.simulate.devices import Drafting, Forward, forward, gpu, known_model
from asyncspec.simulate.pipeline import Group, Pipeline, seconds, simulate
from asyncspec.simulate.rollout import Overheads, Rounds, finish_s
from asyncspec.simulate.workload import Acceptance, Lengths

HERE = Path(__file__).with_name("published.yaml")
LABELS = ("predicted", "fitted", "not identifiable", "conditional")
PROMPT, SHARE = 200, 0.65  # tokens; the published share of generation in a synchronous step
FREE = Overheads()  # drafting costs what the operator tables say, and nothing else
KS, ACCEPTANCES = range(1, 9), [n / 2 for n in range(3, 19)]
AR_S = {"rl-think": 133.6, "rl-zero": 100.0}  # seconds of generation without speculation
LENGTH = {"rl-think": 2.77, "rl-zero": 3.32}  # acceptance length of the draft trained in domain, k = 3
# Published values, by cell.
PUBLISHED = {
    "235b-512/k=3/acceptance=3": 2.72,
    "235b-512/end-to-end/k=3/acceptance=3": 1.70,
    "235b-512/all-experts/k=3/acceptance=3": 2.72,
    "235b-2048/rollout": 3.5,
    "235b-2048/end-to-end": 2.5,
    "8b/rl-think/k=3": 1.54,
    "8b/rl-zero/k=3": 1.77,
    "8b/rl-think/general": 1.19,
    "8b/rl-zero/general": 1.51,
    "8b/rl-think/general-adapted": 1.26,
    "8b/rl-zero/general-adapted": 1.63,
    "8b/rl-think/in-domain-adapted": 1.52,
    "8b/rl-zero/in-domain-adapted": 1.78,
    "8b/rl-think/n-gram": 133.6 / 262.9,
    "8b/rl-zero/n-gram": 100.0 / 140.2,
    "8b-async/exposed-generation/none": 10.4,
    "8b-async/exposed-generation/eagle3": 0.6,
    "8b-async/speedup": 1.24,
    "nemo/235b/64-gb200": 286,
    "nemo/235b/128-gb200": 345,
    "nemo/235b/128-h100": 395,
    "nemo/235b/256-h100": 312,
    "nemo/30b-a3b/32-h100": 192,
    "nemo/30b-a3b/16-gb200": 221,
    "nemo/235b/128-gb200/one-off": 278,
    "nemo/235b/256-h100/one-off": 231,
    "nemo/30b-a3b/32-h100/one-off": 152,
    "nemo/30b-a3b/16-gb200/one-off": 301,
}
DRAFTS = {  # acceptance lengths at k = 3 by what the draft was trained on
    "general": {"rl-zero": 2.88, "rl-think": 2.40},
    "general-adapted": {"rl-zero": 3.04, "rl-think": 2.55},
    "in-domain-adapted": {"rl-zero": 3.29, "rl-think": 2.74},
}
NGRAM = {"rl-think": 2.05, "rl-zero": 2.47}  # acceptance lengths of n-gram lookup
# NeMo-RL: model, rollouts, mean and longest response, and per number of GPUs the tensor parallel degree in generation.
NEMO = {
    "235b": ("Qwen/Qwen3-235B-A22B", 512, 5700, 8192, {"64-gb200": 8, "128-gb200": 8, "128-h100": 16, "256-h100": 16}),
    "30b-a3b": ("Qwen/Qwen3-30B-A3B", 2048, 3155, 4096, {"32-h100": 2, "16-gb200": 1}),
}


class Cell(NamedTuple):
    """A prediction. compute: from chosen assumptions to the value; it takes those named in `priors`."""

    id: str
    label: str
    priors: Mapping[str, Sequence[float]]
    compute: Callable[..., float]
    needs: str  # what it would take to identify it; "": nothing


class Prediction(NamedTuple):
    id: str
    label: str
    value: float
    low: float
    high: float
    needs: str


@cache
def assumed() -> dict:
    return yaml.safe_load(HERE.read_text())


def usual(priors: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: values[0] for name, values in priors.items()}


def predict(cell: Cell) -> Prediction:
    """Return a cell's value under the usual assumptions, and its range over all combinations."""
    value = cell.compute(**usual(cell.priors))
    found = [value] + [
        cell.compute(**dict(zip(cell.priors, chosen))) for chosen in itertools.product(*cell.priors.values())
    ]
    return Prediction(cell.id, cell.label, value, min(found), max(found), cell.needs)


# Synchronous generation.


@cache
def _drawn(mean: float, sigma: float, limit: float, count: int) -> np.ndarray:
    return Lengths(mean, sigma, limit).draw(np.random.default_rng(0), count)


@cache
def _accepts(length: float, k: int, spread: float, count: int) -> np.ndarray:
    return Acceptance.of_length(length, k, spread).draw(np.random.default_rng(1), count)


@cache
def target_of(model: str, device: str, precision: str, degree: int) -> Forward:
    return forward(gpu(device), known_model(model), precision, degree)


class Loaded(Forward):
    """A mixture whose passes load all experts, however few tokens there are."""

    def __init__(self, inner: Forward) -> None:
        super().__init__(inner.gpu, inner.model, inner.precision, inner.degree)
        self.inner, self.source = inner, inner.source
        per_token = self.model["num_experts_per_tok"] / self.model["num_experts"]
        self._all = 3 / per_token  # tokens that pick nearly all experts at random

    def rest(self, tokens: float) -> float:
        return max(self.inner.rest(tokens), self.inner.rest(self._all))

    def head(self, tokens: float) -> float:
        return self.inner.head(tokens)

    def attend(self, batch: float, context: float) -> float:
        return self.inner.attend(batch, context)


@cache
def generation_s(
    target: Forward,
    method: str,
    overheads: Overheads,
    k: int,
    acceptance: float,
    rollouts: int,
    replicas: int,
    mean: float,
    sigma: float,
    limit: float,
    spread: float,
    at: int = 0,
) -> float:
    """Return the seconds in which replicas generate a batch, all responses at once.

    Args:
        at: the draft length at which `acceptance` was measured; 0: k.
    """
    tokens = _drawn(mean, sigma, limit, rollouts)
    accept = _accepts(acceptance, at or k, spread, rollouts) if k else np.zeros(rollouts)
    rounds = Rounds(target, Drafting(target, method), overheads)
    costs = rounds.costs(-(-rollouts // replicas), k, PROMPT + 0.1 * mean, PROMPT + 2 * mean)
    return finish_s(costs, tokens, accept, PROMPT, replicas)


def speedup_235b(k: int, acceptance: float, gpus: int = 512, overheads: Overheads = FREE) -> Callable[..., float]:
    def compute(degree, mean, sigma, limit, spread, all_experts) -> float:
        target = target_of("Qwen/Qwen3-235B-A22B", "GB200", "fp8", int(degree))
        target = _loaded(target) if all_experts else target
        batch = (4096, gpus // int(degree), mean, sigma, limit, spread)
        without = generation_s(target, "none", Overheads(overheads.round_s), 0, 1.0, *batch)
        return without / generation_s(target, "eagle3", overheads, k, acceptance, *batch)

    return compute


@cache
def _loaded(target: Forward) -> Forward:
    return Loaded(target)


def of_step(speedup: Callable[..., float]) -> Callable[..., float]:
    """Return the speedup of a step in which generation has the published share."""
    return lambda **chosen: 1 / (SHARE / speedup(**chosen) + 1 - SHARE)


# The measured 8B runs.


class Form(NamedTuple):
    """What was fitted to a form's synchronous run: the mean length, and the overhead of a round with k = 3."""

    mean: float
    overheads: Overheads


@cache
def fitted_8b(form: str, rollouts: float, sigma: float, limit: float, spread: float, verify_share: float) -> Form:
    """Fit the mean length to the seconds without speculation, and the overhead to the speedup at k = 3."""
    target, batch = target_of("Qwen/Qwen3-8B", "GB200", "bfloat16", 1), (int(rollouts), 32)

    def without(mean: float) -> float:
        return generation_s(target, "none", Overheads(), 0, 1.0, *batch, mean, sigma, limit, spread)

    mean = _solved(lambda mean: without(mean) - AR_S[form], 200.0, 0.98 * limit)

    def overheads(extra_s: float) -> Overheads:
        return Overheads(0.0, verify_share * extra_s, (1 - verify_share) * extra_s / 3)

    def speedup(extra_s: float) -> float:
        of = generation_s(target, "eagle3", overheads(extra_s), 3, LENGTH[form], *batch, mean, sigma, limit, spread)
        return without(mean) / of

    extra = _solved(lambda extra_s: PUBLISHED[f"8b/{form}/k=3"] - speedup(extra_s), 0.0, 0.05)
    return Form(mean, overheads(extra))


def _solved(rising: Callable[[float], float], low: float, high: float) -> float:
    """Return where a rising function is 0, or the nearer end."""
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2


def speedup_8b(form: str, k: int, acceptance: float, method: str = "eagle3") -> Callable[..., float]:
    def compute(rollouts, sigma, limit, spread, verify_share, scan_s=0.0) -> float:
        found = fitted_8b(form, rollouts, sigma, limit, spread, verify_share)
        target = target_of("Qwen/Qwen3-8B", "GB200", "bfloat16", 1)
        lookup = method == "ngram"
        overheads = Overheads(verify_s=found.overheads.verify_s, row_s=scan_s) if lookup else found.overheads
        batch = (int(rollouts), 32, found.mean, sigma, limit, spread)
        without = generation_s(target, "none", Overheads(), 0, 1.0, *batch)
        return without / generation_s(target, method, overheads, k, acceptance, *batch, 3)

    return compute


def run_8b(speculates: bool) -> Callable[..., tuple[float, float]]:
    """Return a function to the seconds of a step of the asynchronous run, and its exposed generation."""

    def compute(rollouts, reward_s, sigma, limit, spread) -> tuple[float, float]:
        found = fitted_8b("rl-think", assumed()["priors"]["8b"]["rollouts"][0], sigma, limit, spread, 0.5)
        target = target_of("Qwen/Qwen3-8B", "GB200", "bfloat16", 1)
        method, k = ("eagle3", 3) if speculates else ("none", 0)
        rounds = Rounds(target, Drafting(target, method), found.overheads if speculates else Overheads())
        rng, steps, groups = np.random.default_rng(0), 10, int(rollouts) // 16
        tokens = _drawn(found.mean, sigma, limit, steps * groups * 16).reshape(steps, groups, 16)
        accept = _accepts(LENGTH["rl-think"], 3, spread, tokens.size).reshape(tokens.shape)
        rng.shuffle(accept)
        # What the published step takes besides its exposed generation is training and logprob, on the same GPUs.
        pipeline = Pipeline(
            lag=1,
            generators=48,
            slots=64,
            costs=rounds.costs(64, k, PROMPT + 0.1 * found.mean, PROMPT + 2 * found.mean),
            update_s=OTHERS_S,
            delivery_s=1.0,
        )
        work = [[Group(t, a, PROMPT, reward_s, 0.0) for t, a in zip(*of_step)] for of_step in zip(tokens, accept)]
        found_steps = simulate(pipeline, work)
        exposed = [step.parts["exposed_generation"] for step in found_steps[3:]]
        return float(seconds(found_steps, 3).mean()), statistics.fmean(exposed)

    return compute


OTHERS_S = 60.5 - 0.6  # the published asynchronous step with speculation, without its exposed generation


# NeMo-RL's steps.


def nemo_s(name: str, setting: str, off_policy: bool) -> Callable[..., float]:
    def compute(sigma, flops_share, round_s, generating=1.0) -> float:
        model, rollouts, mean, limit, degrees = NEMO[name]
        count, device = setting.split("-")
        degree, gpus = degrees[setting], int(count)
        target = target_of(model, device, "bfloat16", degree)
        replicas = max(1, int(gpus * (generating if off_policy else 1)) // degree)
        generation = generation_s(
            target, "none", Overheads(round_s), 0, 1.0, rollouts, replicas, mean, sigma, limit, 0.0
        )
        config = known_model(model)
        active = sizes.active_parameters(config)
        trainers = gpus * (1 - generating) if off_policy else gpus
        # Training is three passes' work, and policy and reference logprobs are one each.
        others = (6 + 2 + 2) * active * rollouts * (mean + PROMPT) / (trainers * gpu(device).flops * flops_share)
        return max(generation, others) if off_policy else generation + others

    return compute


def cells() -> Iterator[Cell]:
    """Yield all cells."""
    priors, labels = assumed()["priors"], assumed()["labels"]
    large, nemo = priors["235b"], priors["nemo"]
    looking_up = priors["8b"]
    small = {name: values for name, values in looking_up.items() if name != "scan_s"}
    batch = "the batch of a replica, the lengths of responses, the spread of acceptance"
    for k in KS:
        for acceptance in (a for a in ACCEPTANCES if a <= k + 1):
            name = f"k={k}/acceptance={acceptance:g}"
            yield Cell(f"235b-512/{name}", labels["235b-512 grid"], large, speedup_235b(k, acceptance), "")
    grid = [speedup_235b(k, k + 1) for k in KS]

    def best(**chosen) -> float:
        return max(each(**chosen) for each in grid)

    yield Cell("235b-512/best", labels["235b-512 grid"], large, best, "")
    yield Cell(
        "235b-512/all-experts/k=3/acceptance=3",
        labels["235b-512 all experts"],
        large | {"all_experts": [1]},
        speedup_235b(3, 3),
        "",
    )
    measured = fitted_8b("rl-think", **usual(small)).overheads
    yield Cell(
        "235b-512/8b-overheads/k=3/acceptance=3",
        labels["235b-512 8B overheads"],
        large,
        speedup_235b(3, 3, overheads=measured),
        "the overhead of a round, which nobody has said",
    )
    yield Cell(
        "235b-512/end-to-end/k=3/acceptance=3",
        labels["235b-512 end to end"],
        large,
        of_step(speedup_235b(3, 3)),
        "the share of generation; it is taken from the published speedups",
    )
    for name, of in (("rollout", lambda each: each), ("end-to-end", of_step)):
        chosen = {**large, "k": [3, 5, 7], "acceptance": [3.0, 4.0]}

        def at_2048(k, acceptance, of=of, **rest) -> float:
            return of(speedup_235b(int(k), acceptance, gpus=2048))(**rest)

        needs = "draft length, acceptance and rollouts of this point" + (
            ", and the share of generation at lag 2" if name == "end-to-end" else ""
        )
        yield Cell(f"235b-2048/{name}", labels["235b-2048"], chosen, at_2048, needs)
    for form in AR_S:
        yield Cell(f"8b/{form}/k=3", labels["8b k=3"], small, speedup_8b(form, 3, LENGTH[form]), "")
        for k in (5, 7):
            yield Cell(
                f"8b/{form}/k={k}",
                labels["8b k=5 and 7"],
                small,
                speedup_8b(form, k, LENGTH[form]),
                f"the overhead by draft length, acceptance by position, {batch}",
            )
        for draft, lengths in DRAFTS.items():
            yield Cell(f"8b/{form}/{draft}", labels["8b drafts"], small, speedup_8b(form, 3, lengths[form]), "")
        yield Cell(
            f"8b/{form}/n-gram",
            labels["8b n-gram"],
            looking_up,
            speedup_8b(form, 3, NGRAM[form], "ngram"),
            "the host's time to look up the proposals of a sequence, and the draft length",
        )
    of_async = {**priors["8b async"], **{name: small[name] for name in ("sigma", "limit", "spread")}}
    without, with_draft = run_8b(False), run_8b(True)
    needs = "rollouts of a step, and what the 16 GPUs do at the same time"
    for name, compute in (
        ("exposed-generation/none", lambda **chosen: without(**chosen)[1]),
        ("exposed-generation/eagle3", lambda **chosen: with_draft(**chosen)[1]),
        ("speedup", lambda **chosen: without(**chosen)[0] / with_draft(**chosen)[0]),
    ):
        yield Cell(f"8b-async/{name}", labels["8b async"], of_async, compute, needs)
    for name, (*_, degrees) in NEMO.items():
        for setting in degrees:
            synchronous = {key: values for key, values in nemo.items() if key != "generating"}
            yield Cell(
                f"nemo/{name}/{setting}", labels["nemo synchronous"], synchronous, nemo_s(name, setting, False), ""
            )
            if (one_off := f"nemo/{name}/{setting}/one-off") in PUBLISHED:
                needs = "how the GPUs are divided"
                yield Cell(one_off, labels["nemo off-policy"], nemo, nemo_s(name, setting, True), needs)
