"""How long things take on the mocked machines, in their own seconds, and how long responses are.

This module does not import torch. A decoding step of one GPU with n live sequences takes token_s + n * row_s: the time
to load the weights once, and the time that each sequence adds. With speculation a step takes (1 + k * draft_share)
times as long and emits `acceptance` tokens per sequence.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from asyncspec.config import MockConfig


def response_tokens(config: MockConfig, seed: int) -> int:
    """Draw the tokens of a response from a sample's seed: log-normal, cut off at tokens_max."""
    drawn = np.random.default_rng(seed).lognormal(math.log(config.tokens_median), config.tokens_sigma)
    return int(min(config.tokens_max, max(1, drawn)))


def step_s(config: MockConfig, live: int, draft_length: int) -> float:
    """Return the seconds of a decoding step of one GPU."""
    return (config.token_s + live * config.row_s) * (1 + draft_length * config.draft_share)


def acceptance_of_a_position(length: float, k: int) -> float:
    """Return the acceptance rate of a position, given that all proposals before it were accepted.

    It is the same for all positions, such that verifications of k proposals emit `length` tokens on average.
    """
    low, high = 0.0, 1.0
    for _ in range(50):
        share = (low + high) / 2
        low, high = (share, high) if sum(share**j for j in range(k + 1)) < length else (low, share)
    return share


def tokens_per_s(config: MockConfig, live: int, draft_length: int) -> float:
    """Return the tokens per second of each live sequence."""
    return (config.acceptance if draft_length else 1.0) / step_s(config, live, draft_length)


def generation_s(config: MockConfig, lengths: Sequence[int], gpus: int, draft_length: int) -> float:
    """Return the seconds until the last sequence of a batch has ended.

    All sequences start at once, dealt round-robin to the GPUs.
    """
    slowest = 0.0
    for gpu in range(gpus):
        left = list(lengths[gpu::gpus])
        heapq.heapify(left)
        now = done = 0.0
        while left:
            shortest = heapq.heappop(left)
            now += (shortest - done) / tokens_per_s(config, len(left) + 1, draft_length)
            done = shortest
        slowest = max(slowest, now)
    return slowest
