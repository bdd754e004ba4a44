"""Make one row of metrics.jsonl from the trainer's report of a step. Times are in seconds, lengths in tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from asyncspec.catalog import KNOWN_AS
from asyncspec.timing.attribution import break_down, covered
from asyncspec.wire.facts import added
from asyncspec.wire.messages import GroupRecord, StepDone

# Rows of the table at the end of a run: (label, metric).
TABLE_ROWS = (
    ("data", "time/data"),
    ("transport", "time/transport"),
    ("prepare (weight sync)", "time/prepare"),
    ("admission (policy lag)", "time/admission"),
    ("exposed generation", "time/exposed_generation"),
    ("exposed environment", "time/exposed_environment"),
    ("exposed reward", "time/exposed_reward"),
    ("exposed logprob", "time/exposed_logprob"),
    ("recovery", "time/recovery"),
    ("train", "time/train"),
    ("export", "time/export"),
    ("other", "time/other"),
    ("step", "time/step"),
    ("a group generates", "time/generation"),
    ("a group is scored", "time/logprob"),
)


def step_row(done: StepDone, counters: dict[str, float], evaluation: dict, kl: bool = False) -> dict:
    """Return the metrics of step `done.step`.

    Args:
        counters: the actors' latest counters.
        evaluation: the eval/ fields of the latest evaluation.
        kl: whether the run has a KL term; `kl` is written only then.
    """
    groups = [*done.groups, *done.unused]
    phases = {g.ticket_id: g.phases for g in groups}
    parts = break_down(done.start, done.end, done.waits, done.busy, phases)
    lengths = np.array([n for g in groups for n in g.response_tokens])
    verifications, proposed = sum(g.verifications for g in groups), sum(g.proposed for g in groups)
    by_position = zip_longest(summed(g.accepted_at for g in groups), summed(g.reached_at for g in groups), fillvalue=0)
    seconds, turns = done.end - done.start, sum(g.turns or len(g.response_tokens) for g in groups)
    row = {
        "step": done.step,
        "policy_version": done.step + 1,
        "reward/mean": float(np.mean([g.reward_mean for g in groups])),
        **evaluation,
        "groups/without_signal": sum(not g.rewards_differ for g in groups) / len(groups),
        "groups/trained": len(done.groups),
        "groups/unused": len(done.unused),
        "lag/mean": 0.0,
        "lag/max": 0.0,
        "lag/proximal_max": max((done.step - g.proximal_version for g in done.groups), default=0),
        "loss/policy": 0.0,
        "loss/kl": 0.0,
        **done.stats,
        "tokens/response_mean": float(lengths.mean()),
        "tokens/response_max": int(lengths.max()),
        "completions/min_length": int(lengths.min()),
        "tokens/truncated": sum(g.truncated for g in groups) / len(lengths),
        "time/step": seconds,
        **{f"time/{part}": value for part, value in parts.items()},
        # Whole stages: the time during which any group of the step was in them. The trainer may wait longer, for a
        # group that waits for a slot or for another stage.
        "time/generation": stage_time(groups, "generate"),
        "time/logprob": stage_time(groups, "logprob"),
        # For comparison with NeMo-RL: a stopwatch around the trainer's waits, whatever their cause.
        "timing/train/exposed_generation": sum(w.end - w.start for w in done.waits),
        "spec/draft_length": proposed / verifications if verifications else 0.0,
        # the first token of each turn comes from no verification
        "spec/acceptance_length": (lengths.sum() - turns) / verifications if verifications else 1.0,
        "spec/acceptance_rate": sum(g.accepted for g in groups) / proposed if proposed else 0.0,
        # For each position: of the verifications that reached its proposal, the share that accepted it.
        **{
            f"spec/acceptance_{j}": accepted / reached
            for j, (accepted, reached) in enumerate(by_position, 1)
            if reached
        },
        "spec/draft_version": max(g.draft_version for g in groups),
        "throughput/tokens_per_s": float(lengths.sum()) / seconds,
        **_episodes(groups),
        **counters,
    }
    if "draft/policy_version" in counters:
        # the versions by which the draft's training lags behind the step's policy
        row["draft/lag"] = done.step - counters["draft/policy_version"]
    row |= {known: row[ours] for ours, known in KNOWN_AS if ours in row and (kl or known != "kl")}
    return {key: float(value) if isinstance(value, np.floating) else value for key, value in row.items()}


def _episodes(groups: Sequence[GroupRecord]) -> dict[str, float]:
    """Return the metrics of episodes; none without an environment."""
    count = sum(len(g.response_tokens) for g in groups if g.turns)
    if not count:
        return {}
    found = {
        "environment/turns_mean": sum(g.turns for g in groups) / count,
        "environment/tokens_mean": sum(g.environment_tokens for g in groups) / count,
        # the time during which an environment held up any group of the step
        "time/environment": stage_time(groups, "environment"),
    }
    for name, use in sorted(added(g.tools for g in groups).items()):
        found[f"tool/{name}_calls"] = use.calls / count
        found[f"tool/{name}_s"] = use.seconds / use.calls
        found[f"tool/{name}_longest_s"] = use.longest
    return found


def summed(lists: Iterable[Sequence[int]]) -> list[int]:
    """Add up counts by position; past the end of a list its counts are 0."""
    return [sum(counts) for counts in zip_longest(*lists, fillvalue=0)]


def stage_time(groups, name: str) -> float:
    return covered((p.start, p.end) for g in groups for p in g.phases if p.name == name)


def read_rows(path: Path) -> list[dict]:
    """Return the rows of a metrics.jsonl, up to the first one that is damaged or that a crash cut short."""
    rows: list[dict] = []
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not isinstance(row, dict):
            break
        rows.append(row)
    return rows


def scores_by_version(rows: Iterable[Mapping[str, Any]]) -> dict[float, float]:
    """Return the score of each version that was evaluated, in order. A row repeats the evaluation before it."""
    found = {row["eval/policy_version"]: row["eval/score"] for row in rows if row.get("eval/score") is not None}
    return dict(sorted(found.items()))


def scores(rows: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """Return what the held-out rewards of some evaluations are called, and each as text.

    Args:
        rows: rows with the eval/ fields.

    Returns:
        "accuracy" and percentages if all rewards are 0 or 1, else "score" and numbers with the share that is solved.
    """
    if all(row["eval/score"] == row["eval/solved"] for row in rows):
        return "accuracy", [f"{row['eval/score']:.1%}" for row in rows]
    return "score", [f"{row['eval/score']:.3f} ({row['eval/solved']:.1%} solved)" for row in rows]
