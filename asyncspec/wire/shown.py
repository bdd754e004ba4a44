"""Rollouts that people read, as parts of messages. See timing/rollouts.py."""

from __future__ import annotations

import msgspec


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rollout."""

    tokens: list[int]
    reward: float | None  # None: of an evaluation, where it failed or does not apply
    truncated: bool
    # (version, number of tokens in a row that it sampled), in order; version -1: an environment wrote them
    versions: list[tuple[int, int]]
    advantage: float | None = None
    gap_mean: float | None = None  # of all tokens' logprobs, proximal and behavior
    gap_max: float | None = None
    gaps: list[float] = []  # proximal - behavior of the first tokens


class Shown(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A group."""

    ticket_id: int
    step: int
    evaluation: bool
    prompt: str
    answer: str
    data_source: str
    samples: list[Sample]
