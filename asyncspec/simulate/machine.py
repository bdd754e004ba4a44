"""This machine as a device: a run under other settings, simulated from a calibration of one run on the same machine.

The groups are the calibrated run's own, step by step: as many tokens, with or without a signal. How long rounds take
follows from the calibration, and the draft length of a round from the configuration or, with auto, from the real
chooser, which gets the calibrated times and acceptance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from asyncspec.config import Config
from asyncspec.simulate.calibrate import LONGEST, Work, trained_tokens
from asyncspec.simulate.pipeline import Group, Pipeline, Step, simulate
from asyncspec.simulate.replica import RoundCosts
from asyncspec.speculation.draft_length import AutoLength, Observation
from asyncspec.speculation.step_times import BLOCK
from asyncspec.wire.messages import StepDone

LIVES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TAUGHT = 64  # verifications that teach the chooser the acceptance


def draft_lengths(config: Config, work: Work, positions: float) -> Callable[[int], int]:
    """Return the draft length for a number of live sequences.

    Args:
        positions: of a sequence, on average.
    """
    if config.fixed_draft_length is not None:
        return lambda live: config.fixed_draft_length
    lives = sorted({n for n in LIVES if n < config.engine.slots} | {config.engine.slots})
    seconds = np.array(
        [[float(work.round_seconds(n, k, n * positions)) for k in (*range(LONGEST + 1), LONGEST)] for n in lives]
    )
    found: dict[int, int] = {}
    for live in range(1, config.engine.slots + 1):
        bucket = round(2 * np.log2(live))
        if bucket not in found:
            found[bucket] = _chosen(AutoLength(lives, seconds), work, live)
    return lambda live: found[round(2 * np.log2(live))]


def _chosen(chooser: AutoLength, work: Work, live: int) -> int:
    """Return what the chooser takes once it knows the acceptance."""
    reaches = np.cumprod(work.retention)
    rows = (np.arange(TAUGHT) + 0.5) / TAUGHT
    kept = (rows[:, None] < reaches[None, :]).sum(1)
    seconds = float(work.round_seconds(TAUGHT, LONGEST, 0.0))
    for _ in range(BLOCK):
        chooser.observe(Observation(TAUGHT, LONGEST, seconds, kept, usual=False))
    return chooser.choose(live)


def round_costs(config: Config, work: Work, lengths: Callable[[int], int]) -> RoundCosts:
    """Return the costs of a generator's rounds by the number of live sequences."""
    live = np.arange(config.engine.slots + 1, dtype=float)
    k = np.array([lengths(max(1, int(n))) for n in live])
    base = work.round_seconds(live, k, 0.0)
    emitted = np.array([work.emitted(each) for each in k])
    return RoundCosts(np.asarray(base, float), work.round_s["position"] * live, k, emitted)


def pipeline(config: Config, work: Work, costs: RoundCosts, cores: float) -> Pipeline:
    """Return the pipeline of a configuration on this machine."""
    adapted = 0
    if config.adapting:
        adapted = round(work.adapted) or config.draft.groups_per_step
    return Pipeline(
        lag=config.policy_lag,
        generators=config.deployment.generators,
        slots=config.engine.slots,
        costs=costs,
        logprobs=config.deployment.logprobs,
        swap_s=work.swap_s + work.swap_draft_s * min(1, adapted),
        delivery_s=work.delivery_s,
        pass_tokens=config.trainer.tokens_per_pass,
        pass_s=work.pass_s,
        token_s=work.token_s,
        group_s=work.group_s,
        update_s=work.update_s,
        adapted=adapted,
        adapt_s=work.adapt_s,
        cores=cores,
    )


def workload(config: Config, work: Work, steps: Sequence[StepDone], prompt: float) -> list[list[Group]]:
    """Return the groups of a run as the calibrated one had them. Acceptance is that of its positions: a response needs
    one round for each `emitted` tokens, and on average half a round's more than one token at its end.
    """
    found = []
    for step in steps:
        groups = sorted(step.groups, key=lambda g: g.place)
        found.append(
            [
                Group(
                    [max(0.5, n - 1.0) for n in group.response_tokens],
                    np.zeros(len(group.response_tokens)),
                    prompt,
                    work.reward_s,
                    work.logprob_s + work.logprob_token_s * sum(group.response_tokens),
                    trained_tokens(group, prompt),
                )
                for group in groups
            ]
        )
    return found


def run(config: Config, work: Work, steps: Sequence[StepDone], prompt: float, cores: float) -> list[Step]:
    """Return what comes out for the steps of a run with this configuration."""
    positions = prompt + np.mean([n for step in steps for group in step.groups for n in group.response_tokens]) / 2
    lengths = draft_lengths(config, work, float(positions))
    costs = round_costs(config, work, lengths)
    return simulate(pipeline(config, work, costs, cores), workload(config, work, steps, prompt))
