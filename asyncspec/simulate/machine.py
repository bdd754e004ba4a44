"""This machine as a device: a run under other settings, simulated from a calibration of one run on the same machine.

The groups are the calibrated run's own, step by step: as many tokens, with or without a signal. How long rounds take
follows from the calibration, and the draft length of a round from the configuration or, with auto, from the real
chooser, which gets the calibrated times and acceptance.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from asyncspec.config import LONGEST_DRAFT as LONGEST
from asyncspec.config import Config
from asyncspec.simulate.calibrate import SKIP, Work, read_config, read_steps, trained_tokens
from asyncspec.simulate.pipeline import Group, Pipeline, Step, seconds, simulate
from asyncspec.simulate.replica import RoundCosts
from asyncspec.speculation.draft_length import AutoLength, Observation
from asyncspec.speculation.step_times import BLOCK
from asyncspec.wire.messages import GroupRecord, StepDone

LIVES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
POSITIONS = (10.0, 200.0)  # of a sequence, between which a round's time is taken as a straight line
LEAST_SHARING = 0.6  # of the cores' time
TAUGHT = 64  # verifications that teach the chooser the acceptance


def draft_lengths(config: Config, work: Work, positions: float) -> Callable[[int], int]:
    """Return the draft length for a number of live sequences.

    Args:
        positions: of a sequence, on average.
    """
    if config.fixed_draft_length is not None:
        return lambda live: config.fixed_draft_length
    lives = sorted({n for n in LIVES if n < config.engine.slots} | {config.engine.slots})
    ks = (*range(LONGEST + 1), LONGEST)
    seconds = np.array([work.rounds.seconds(n, ks, n * positions) for n in lives])
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
    seconds = float(work.rounds.seconds(TAUGHT, LONGEST, 0.0))
    for _ in range(BLOCK):
        chooser.observe(Observation(TAUGHT, LONGEST, seconds, kept, usual=False))
    return chooser.choose(live)


def round_costs(config: Config, work: Work, lengths: Callable[[int], int]) -> RoundCosts:
    """Return the costs of a generator's rounds by the number of live sequences."""
    live = np.arange(config.engine.slots + 1, dtype=float)
    k = np.array([lengths(max(1, int(n))) for n in live])
    near, far = (work.rounds.seconds(live, k, live * each) for each in POSITIONS)
    slope = (far - near) / (POSITIONS[1] - POSITIONS[0])
    emitted = np.array([work.emitted(each) for each in k])
    return RoundCosts(near - slope * POSITIONS[0], slope, k, emitted)


def pipeline(config: Config, work: Work, costs: RoundCosts) -> Pipeline:
    """Return the pipeline of a configuration on this machine. Its cores are those that this process may use; GPUs
    are not shared.
    """
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
        enter_s=work.enter_s,
        finish_s=work.finish_s,
        pass_tokens=config.trainer.tokens_per_pass,
        pass_s=work.pass_s,
        group_s=work.group_s,
        update_s=work.update_s,
        adapted=adapted,
        adapt_s=work.adapt_s,
        control_s=work.control_s,
        cores=len(os.sched_getaffinity(0)) if config.deployment.device == "cpu" else None,
        sharing=work.sharing,
    )


def workload(work: Work, steps: Sequence[StepDone], k: int) -> list[list[Group]]:
    """Return the groups of a run as the calibrated one had them.

    Args:
        k: the usual draft length. The last round of a response overshoots its end, by more with a longer draft.
    """
    beyond = work.beyond(k) - 1.0  # a sequence gets its first token with its slot

    def group_of(record: GroupRecord) -> Group:
        tokens, count = trained_tokens(record), len(record.response_tokens)
        return Group(
            [max(0.5, n + beyond) for n in record.response_tokens],
            np.zeros(count),
            float(record.prompt_tokens),
            work.reward_s,
            work.logprob_s + work.logprob_token_s * sum(record.response_tokens),
            float(tokens),
            work.token_s * tokens + work.response_s * count if tokens else 0.0,
        )

    return [[group_of(record) for record in sorted(step.groups, key=lambda g: g.place)] for step in steps]


class Predicted(NamedTuple):
    """Seconds of a step, the mean without the first ones, and what of it was exposed."""

    step_s: float
    exposed_generation_s: float
    exposed_logprob_s: float
    train_s: float


class Measured(NamedTuple):
    """A calibrated run."""

    config: Config
    work: Work
    steps: list[StepDone]

    @classmethod
    def read(cls, run_dir: Path, work: Work) -> Measured:
        return cls(read_config(run_dir), work, read_steps(run_dir))

    def changed(
        self,
        lag: int | None = None,
        generators: int | None = None,
        slots: int | None = None,
        draft_length: int | str | None = None,
    ) -> Config:
        """Return the run's configuration with other settings; None: as it was."""
        config = copy.deepcopy(self.config)
        config.policy_lag = config.policy_lag if lag is None else lag
        config.engine.slots = slots or config.engine.slots
        config.deployment.generators = generators or config.deployment.generators
        if draft_length is not None:
            config.speculation.draft_length = str(draft_length)
            if draft_length == 0:
                config.speculation.method, config.speculation.draft_length = "none", "auto"
        return config

    def fit_sharing(self) -> None:
        """Fit the share of the cores' time that is used to the run's own steps, by their median: a few steps of a run
        share the generators with an evaluation.
        """
        measured = np.median([step.end - step.start for step in self.steps[SKIP:]])
        low, high = LEAST_SHARING, 1.0
        for _ in range(12):
            self.work.sharing = (low + high) / 2
            faster = np.median(seconds(self.simulated(self.config), SKIP)) < measured
            low, high = (low, self.work.sharing) if faster else (self.work.sharing, high)

    def predicted(self, config: Config) -> Predicted:
        """Predict the steps of a run with this configuration."""
        found = self.simulated(config)
        skip = min(len(self.steps) // 2, SKIP + config.policy_lag)
        parts = {name: float(np.mean([step.parts[name] for step in found[skip:]])) for name in found[0].parts}
        return Predicted(
            float(seconds(found, skip).mean()), parts["exposed_generation"], parts["exposed_logprob"], parts["train"]
        )

    def simulated(self, config: Config) -> list[Step]:
        """Return the steps of a run with this configuration."""
        groups = [group for step in self.steps for group in step.groups]
        tokens = float(np.mean([n for group in groups for n in group.response_tokens]))
        prompt = float(np.mean([group.prompt_tokens for group in groups]))
        lengths = draft_lengths(config, self.work, prompt + tokens / 2)
        costs = round_costs(config, self.work, lengths)
        work = workload(self.work, self.steps, lengths(max(1, config.engine.slots // 2)))
        return simulate(pipeline(config, self.work, costs), work)
