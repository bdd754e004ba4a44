"""What a step's groups show before anything is learned from them: their lag, their rewards, and how far the trainer's
logprobs are from the generator's.

The trainer's first rank has all groups of a step, so nothing here has to be added up over ranks. Groups without a
gradient count too.

Shape suffixes: T response tokens that the policy sampled, R responses.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncspec.config import RLConfig
from asyncspec.wire import messages as m
from asyncspec.wire.facts import sampled, sampled_lengths

WRONG_GAP = 0.5  # nats: rounding in 16 bits makes a tenth of this
MOVED = 1e-4  # nats: more than rounding in 32 bits makes
FAR = 0.1  # nats: rounding in 32 bits never makes as much, and in 16 bits rarely
LOG_RATIO_CAP = 20.0  # as in loss.py, so that the largest ratio is a number


def observed(step: int, groups: Sequence[tuple[m.Group, m.Arrays]], config: RLConfig) -> dict[str, float]:
    """Return the metrics of a step's groups; none if all of them were left out."""
    if not groups:
        return {}
    lag_T = step - np.concatenate([arrays["versions"][sampled(arrays)] for _, arrays in groups])
    gap_T = np.concatenate([logprob_gap(arrays) for _, arrays in groups])
    ratio = np.concatenate([_ratio(arrays, config.correction_level) for _, arrays in groups])
    same = _same_version(groups)
    spreads = [np.std(group.rewards, ddof=1) for group, _ in groups if len(group.rewards) > 1]
    found = {
        "lag/mean": lag_T.mean(),
        "lag/max": lag_T.max(),
        "reward_std": np.mean(spreads) if spreads else 0.0,
        "sampling/importance_sampling_ratio/min": ratio.min(),
        "sampling/importance_sampling_ratio/mean": ratio.mean(),
        "sampling/importance_sampling_ratio/max": ratio.max(),
        "sampling/sampling_logp_difference/mean": np.abs(gap_T).mean(),
        "sampling/sampling_logp_difference/max": np.abs(gap_T).max(),
    }
    if same:
        found["sampling/same_version_gap"] = max(gap_T.mean() for gap_T in same.values())
        found["sampling/same_version_far"] = (np.concatenate([*same.values()]) > FAR).mean()
    if compared := adapter_gaps(groups):
        found["lora/version_gap"] = max(of_version for of_version, _ in compared.values())
        found["lora/base_gap"] = min(of_base for _, of_base in compared.values())
    return {name: float(value) for name, value in found.items()}


def adapter_gaps(groups: Sequence[tuple[m.Group, m.Arrays]]) -> dict[str, tuple[float, float]]:
    """Return for each generator how far its logprobs are from the adapted policy and from the policy without adapters.

    A generator that has its adapters is at the version that it names, up to rounding, and the first distance is the
    smaller one. Of a generator that goes on without them it is the larger one, however little was learned yet.

    Returns:
        The mean distances over the tokens that were scored both ways, by their own version and without adapters, of
        each generator that has any.
    """
    gaps = {}
    compared = [(group, arrays) for group, arrays in groups if "base" in arrays]
    for generator, gap_T in _same_version(compared).items():
        base = [(group, arrays | {"proximal": arrays["base"]}) for group, arrays in compared]
        gaps[generator] = float(gap_T.mean()), float(_same_version(base)[generator].mean())
    return gaps


def wrong_generators(groups: Sequence[tuple[m.Group, m.Arrays]]) -> dict[str, str]:
    """Return each generator whose logprobs are not those of the version that it names, and a line that says so."""
    found = {}
    for generator, gap in same_version_gaps(groups).items():
        if gap > WRONG_GAP:
            found[generator] = (
                f"the logprobs of {generator} differ by {gap:.2f} on average from a fresh pass of the same version: "
                "its weights did not arrive whole, or its engine computes something else"
            )
    for generator, (of_version, of_base) in adapter_gaps(groups).items():
        if without_adapters(of_version, of_base):
            found[generator] = (
                f"the logprobs of {generator} differ by {of_version:.2g} on average from the version that it names, "
                f"and by {of_base:.2g} from the policy without adapters: its engine has no adapters"
            )
    return found


def without_adapters(of_version: float, of_base: float) -> bool:
    """Whether these two of `adapter_gaps` say that a generator goes on without its adapters."""
    return of_version > MOVED and of_version > 2 * of_base


def same_version_gaps(groups: Sequence[tuple[m.Group, m.Arrays]]) -> dict[str, float]:
    """Return for each generator by how much its tokens' logprobs differ, on average, from those of a fresh pass of the
    version that sampled them. It is rounding, unless the generator's weights are not those that it names.

    Returns:
        Mean distance, over the tokens that were scored by their own version, of each generator that has any.
    """
    return {generator: float(gap_T.mean()) for generator, gap_T in _same_version(groups).items()}


def _same_version(groups: Sequence[tuple[m.Group, m.Arrays]]) -> dict[str, np.ndarray]:
    """Return for each generator the distances of its tokens that were scored by their own version, float64 [T]."""
    found: dict[str, list[np.ndarray]] = {}
    for group, arrays in groups:
        same_T = arrays["versions"][sampled(arrays)] == group.proximal_version
        if same_T.any():
            found.setdefault(group.generator, []).append(np.abs(logprob_gap(arrays)[same_T]))
    return {generator: np.concatenate(gaps) for generator, gaps in found.items()}


def logprob_gap(arrays: m.Arrays) -> np.ndarray:
    """Return proximal less behavior logprob of each token of a group that the policy sampled, float64 [T]. Its
    exponential is the token's importance weight, before it is truncated or masked.
    """
    return (arrays["proximal"].astype(np.float64) - arrays["behavior"])[sampled(arrays)]


def _ratio(arrays: m.Arrays, level: str) -> np.ndarray:
    """Return the importance weights of a group, of its tokens or of its responses."""
    log = logprob_gap(arrays)
    if level == "sequence":
        lengths = sampled_lengths(arrays)
        log = np.add.reduceat(log, np.cumsum(lengths) - lengths)
    return np.exp(log.clip(-LOG_RATIO_CAP, LOG_RATIO_CAP))
