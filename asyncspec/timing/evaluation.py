"""The statistics of an evaluation: score, pass@k, and how sure they are. Pure functions of the prompts' rewards.

An evaluation has several rollouts of each prompt. Rollouts of one prompt are alike, so they are not independent. Each
statistic is therefore computed for each prompt first. The estimate is the mean over prompts, and its interval comes
from how much the prompts differ: with prompts as clusters of equal weight (Miller 2024, "Adding Error Bars to Evals",
arXiv 2411.00640). It says how sure the number is for other prompts of the same kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

CONFIDENCE = 0.95
SOLVED = 1.0  # a rollout with at least this reward has solved its prompt

Rewards = Sequence[float | None]  # of one prompt's rollouts; None: the reward failed, or does not apply


def pass_at(k: int, samples: int, solved: int) -> float:
    """Return the probability that at least one of k samples, drawn from n without replacement, has solved the prompt.
    It estimates the same of k new samples without bias: 1 - C(n - c, k) / C(n, k), from Chen et al. 2021, "Evaluating
    Large Language Models Trained on Code", arXiv 2107.03374. The quotient is a product of k factors at most 1.

    Args:
        k: at most `samples`.
        samples: n.
        solved: c, how many of them have solved it.
    """
    return 1.0 - math.prod((samples - solved - i) / (samples - i) for i in range(k)) if samples - solved >= k else 1.0


def interval(values: Sequence[float], draws: int, share: bool) -> tuple[float, float] | None:
    """Return the bounds of the 95% confidence interval of a mean over prompts; None for fewer than two prompts.

    A share gets Wilson's score interval with the effective number of independent draws: p (1 - p) over the squared
    standard error, at most their real number, as Korn and Graubard (1998) define it; Dean and Pagano (2015) recommend
    this for clustered shares. Where all prompts are solved, or none, it is the number of prompts. The interval stays
    within 0 and 1, and always has a width. Any other mean gets Student's interval. Both use Student's t with one degree
    of freedom fewer than prompts.

    Args:
        values: the statistic of each prompt.
        draws: how many outcomes they come from that share no rollout: of pass@k, rollouts / k.
        share: whether it is a share: between 0 and 1, with a variance of at most p (1 - p).
    """
    from scipy.special import stdtrit  # scipy.stats takes a second to import

    count = len(values)
    if count < 2:
        return None
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(count)
    t = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2))
    if not share:
        return mean - t * error, mean + t * error
    variance = mean * (1 - mean)
    effective = float(count if variance <= 0 else draws if error == 0 else min(draws, variance / error**2))
    middle = (mean + t**2 / (2 * effective)) / (1 + t**2 / effective)
    half = t / (1 + t**2 / effective) * math.sqrt(max(0.0, variance) / effective + t**2 / (4 * effective**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def summary(prompts: Iterable[Rewards], ks: Sequence[int]) -> dict[str, float | int | None]:
    """Return the statistics of a set of prompts: score, solved, pass@k, the bounds of their intervals, and counts. What
    is not known is None.

    Rollouts without a reward are no samples. A prompt with none that counts is left out, and one with fewer than k is
    left out of pass@k.

    Args:
        ks: the k of pass@k.
    """
    everything = list(prompts)
    sampled = [[reward for reward in rewards if reward is not None] for rewards in everything]
    counted = [rewards for rewards in sampled if rewards]
    binary = all(reward in (0.0, 1.0) for rewards in counted for reward in rewards)
    solved = [(len(rewards), sum(reward >= SOLVED for reward in rewards)) for rewards in counted]
    found: dict[str, float | int | None] = {
        **_estimate("score", [float(np.mean(rewards)) for rewards in counted], sum(n for n, _ in solved), binary),
        "solved": _mean([c / n for n, c in solved]),
    }
    for k in ks:
        enough = [(n, c) for n, c in solved if n >= k]
        found |= _estimate(f"pass@{k}", [pass_at(k, n, c) for n, c in enough], sum(n // k for n, _ in enough), True)
    missing = sum(len(rewards) for rewards in everything) - sum(map(len, sampled))
    return found | {"prompts": len(counted), "left_out": len(everything) - len(counted), "failed": missing}


def fields(sets: Mapping[str, Sequence[Rewards]], ks: Sequence[int]) -> dict[str, float | int | None]:
    """Return the eval/ fields of an evaluation: eval/score and so on of all prompts, and eval/NAME/score and so on of
    each set that has a name.

    Args:
        sets: name -> the rewards of each prompt.
        ks: the k of pass@k.
    """
    everything = summary([rewards for prompts in sets.values() for rewards in prompts], ks)
    found = {f"eval/{key}": value for key, value in everything.items()}
    for name, prompts in sets.items():
        if name:
            found |= {f"eval/{name}/{key}": value for key, value in summary(prompts, ks).items()}
    return found


def names(evaluation: Mapping[str, object]) -> list[str]:
    """Return the names of the sets of an evaluation's fields, in order."""
    parts = [key.split("/") for key in evaluation if key.startswith("eval/")]
    return [part[1] for part in parts if len(part) == 3 and part[2] == "score"]


def _estimate(name: str, values: Sequence[float], draws: int, share: bool) -> dict[str, float | None]:
    low, high = interval(values, draws, share) or (None, None)
    return {name: _mean(values), f"{name}_low": low, f"{name}_high": high}


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
