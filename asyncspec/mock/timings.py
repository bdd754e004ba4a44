"""How long things take on the machines that are mocked, in their own seconds, and how long responses are. Imports no
torch.

A decoding step of one GPU with n live sequences takes token_s + n * row_s: reading the weights once, and what each
sequence adds. With speculation a step takes (1 + k * draft_share) as long and emits `acceptance` tokens.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from asyncspec.config import MockConfig


def response_tokens(config: MockConfig, seed: int) -> int:
    """Tokens of the response that a sample's seed stands for: log-normal, cut off."""
    drawn = np.random.default_rng(seed).lognormal(math.log(config.tokens_median), config.tokens_sigma)
    return int(min(config.tokens_max, max(1, drawn)))


def step_s(config: MockConfig, live: int, draft_length: int) -> float:
    """Seconds of a decoding step of one GPU."""
    return (config.token_s + live * config.row_s) * (1 + draft_length * config.draft_share)


def acceptance_of_a_position(length: float, k: int) -> float:
    """The share of proposals accepted at each position that they come to, with which verifications of k proposals emit
    `length` tokens on average.
    """
    low, high = 0.0, 1.0
    for _ in range(50):
        share = (low + high) / 2
        low, high = (share, high) if sum(share**j for j in range(k + 1)) < length else (low, share)
    return share


def tokens_per_s(config: MockConfig, live: int, draft_length: int) -> float:
    """Of each live sequence."""
    return (config.acceptance if draft_length else 1.0) / step_s(config, live, draft_length)


def generation_s(config: MockConfig, lengths: Sequence[int], gpus: int, draft_length: int) -> float:
    """How long a batch takes that starts at once, dealt out over GPUs in turn: until the last sequence has ended."""
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
