"""A made-up engine for the tests of draft lengths: step times and acceptance are given, the choices come back."""

from __future__ import annotations

import numpy as np

from asyncspec.speculation.draft_length import LONGEST, Observation


def costs(*seconds):
    """Seconds of a step of each draft length, float [LONGEST + 2]: the first as given, each longer one more by what the
    last two differ; drafts cost nothing, and what is read of them alone.
    """
    more = [seconds[-1] + (seconds[-1] - seconds[-2]) * n for n in range(1, LONGEST + 2 - len(seconds))]
    return np.array([*seconds, *more, seconds[-1]])


def none(live):
    """Rows that have kept nothing."""
    return np.zeros(live, dtype=np.int64)


def step(k, seconds, kept_B, **more):
    return Observation(live=len(kept_B), draft_length=k, seconds=seconds, kept_B=kept_B, **more)


def kept(rng, live, k, acceptance):
    """Accepted proposals of each row. acceptance: of each proposal, or of all."""
    return (rng.random((live, LONGEST)) < acceptance).cumprod(1)[:, :k].sum(1)


def play(chooser, seconds, acceptance, live=8, steps=4000, seed=0, noise=0.05):
    """Draft lengths that are chosen in so many steps, int64 [steps].

    Args:
        seconds: of a step, for each draft length.
        acceptance: of each proposal, or of all; or a function of the step's number.
        noise: deviation of the logarithm of a step's time.
    """
    rng, chosen = np.random.default_rng(seed), []
    for number in range(steps):
        chosen.append(k := chooser.choose(live))
        now = acceptance(number) if callable(acceptance) else acceptance
        chooser.observe(step(k, seconds[k] * rng.lognormal(0, noise), kept(rng, live, k, now)))
    return np.array(chosen)


def emitted(acceptance):
    """Expected tokens of a step for each draft length, float [LONGEST + 1]."""
    return np.append(1.0, 1 + np.cumprod(np.broadcast_to(acceptance, LONGEST)).cumsum())


def over_best(chosen, seconds, acceptance):
    """Tokens a second of these steps over those of the best length."""
    tokens_K, seconds_K = emitted(acceptance), seconds[: LONGEST + 1]
    return tokens_K[chosen].sum() / seconds_K[chosen].sum() / max(tokens_K / seconds_K)
