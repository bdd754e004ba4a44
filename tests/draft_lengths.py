"""A simulated engine for the tests of draft lengths: it takes step times and acceptance and returns the choices."""

from __future__ import annotations

import numpy as np

from asyncspec.speculation.draft_length import LONGEST, Observation


def costs(*seconds):
    """Seconds of a step at each draft length, float [LONGEST + 2], continued linearly beyond the given ones.

    The extra entry is for the longest draft with fewer proposals verified. It equals the last given time.
    """
    more = [seconds[-1] + (seconds[-1] - seconds[-2]) * n for n in range(1, LONGEST + 2 - len(seconds))]
    return np.array([*seconds, *more, seconds[-1]])


def none(live):
    """Kept proposals of rows that have kept none, int64 [live]."""
    return np.zeros(live, dtype=np.int64)


def step(k, seconds, kept_B, **more):
    return Observation(live=len(kept_B), draft_length=k, seconds=seconds, kept_B=kept_B, **more)


def kept(rng, live, k, acceptance):
    """Accepted proposals of each row. acceptance: probability for each proposal, or one for all."""
    return (rng.random((live, LONGEST)) < acceptance).cumprod(1)[:, :k].sum(1)


def play(chooser, seconds, acceptance, live=8, steps=4000, seed=0, noise=0.05):
    """Return the draft length chosen at each step, int64 [steps].

    Args:
        seconds: of a step, for each draft length.
        acceptance: probability for each proposal, or one for all; or a function of the step's number.
        noise: standard deviation of the logarithm of a step's time.
    """
    rng, chosen = np.random.default_rng(seed), []
    for number in range(steps):
        chosen.append(k := chooser.choose(live))
        now = acceptance(number) if callable(acceptance) else acceptance
        chooser.observe(step(k, seconds[k] * rng.lognormal(0, noise), kept(rng, live, k, now)))
    return np.array(chosen)


def emitted(acceptance):
    """Expected tokens of a step at each draft length, float [LONGEST + 1]."""
    return np.append(1.0, 1 + np.cumprod(np.broadcast_to(acceptance, LONGEST)).cumsum())


def over_best(chosen, seconds, acceptance):
    """Tokens per second of the chosen lengths, divided by those of the best length."""
    tokens_K, seconds_K = emitted(acceptance), seconds[: LONGEST + 1]
    return tokens_K[chosen].sum() / seconds_K[chosen].sum() / max(tokens_K / seconds_K)
