"""Evaluations as text, for the console and the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncspec.timing.evaluation import names
from asyncspec.timing.metrics import scores

Evaluation = Mapping[str, Any]  # the eval/ fields


def lines(evaluation: Evaluation, rollouts: int) -> list[str]:
    """Return lines about a complete evaluation: one about all prompts, and one for each set if there are several."""
    oldest, newest = evaluation["eval/policy_version"], evaluation["eval/policy_version_max"]
    versions = f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"
    failed, left_out = evaluation.get("eval/failed"), evaluation.get("eval/left_out")
    without = f", {failed} without a reward" if failed else ""
    without += f", {left_out} prompts left out" if left_out else ""
    found = [f"held-out {_statistics(evaluation)} with {versions} ({rollouts} rollouts{without})"]
    sets = names(evaluation)
    return found + [f"  {name}: {_statistics(of_set(evaluation, name))}" for name in sets if len(sets) > 1]


def of_set(evaluation: Evaluation, name: str) -> dict[str, Any]:
    """Return the fields of one set under the names that those of all prompts have."""
    prefix = f"eval/{name}/"
    return {f"eval/{key.removeprefix(prefix)}": value for key, value in evaluation.items() if key.startswith(prefix)}


def summary(evaluations: Sequence[Evaluation]) -> list[tuple[str, str]]:
    """Return (label, first and last result) of all prompts, and of each set if there are several. Evaluations without a
    score do not count.
    """
    known = [each for each in evaluations if each.get("eval/score") is not None]
    if not known:
        return []
    first, last = known[0], known[-1]
    found, sets = [_from_to("held-out", first, last)], names(last)
    for name in sets if len(sets) > 1 else ():
        before, after = of_set(first, name), of_set(last, name)
        if before.get("eval/score") is not None and after["eval/score"] is not None:
            found.append(_from_to(f"{name}:", before, after))
    return found


def _from_to(label: str, first: Evaluation, last: Evaluation) -> tuple[str, str]:
    name, numbers = scores([first, last])
    bounds = [_bounds(each, "eval/score", name == "accuracy") for each in (first, last)]
    best = max((key for key in last if key.startswith("eval/pass@") and key[10:].isdigit()), key=_k, default="")
    text = " to ".join(f"{number}{bound}" for number, bound in zip(numbers, bounds))
    if best and _k(best) > 1 and first.get(best) is not None and last[best] is not None:
        text += f"; {best[5:]} {first[best]:.1%} to {last[best]:.1%}"
    return f"{label} {name}", text


def _statistics(evaluation: Evaluation) -> str:
    """Return the score and, with several samples, each pass@k; with their 95% intervals."""
    if evaluation["eval/score"] is None:
        return "score unknown"
    name, (number,) = scores([evaluation])
    found = [f"{name} {number}{_bounds(evaluation, 'eval/score', name == 'accuracy')}"]
    for key in sorted((key for key in evaluation if key.startswith("eval/pass@") and key[10:].isdigit()), key=_k):
        if _k(key) > 1 and evaluation[key] is not None:
            found.append(f"{key[5:]} {evaluation[key]:.1%}{_bounds(evaluation, key, True)}")
    return ", ".join(found)


def _k(key: str) -> int:
    return int(key.rpartition("@")[2])


def _bounds(evaluation: Evaluation, key: str, share: bool) -> str:
    low, high = evaluation.get(f"{key}_low"), evaluation.get(f"{key}_high")
    if low is None or high is None:
        return ""
    return f" ({100 * low:.1f} to {100 * high:.1f})" if share else f" ({low:.3f} to {high:.3f})"
