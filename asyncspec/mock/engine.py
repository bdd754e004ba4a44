"""MockEngine: an engine whose tokens take time but mean nothing.

One engine stands for the GPUs of a node. Each live sequence advances with the wall clock, at the speed that its GPU has
with the number of sequences it holds. So the batch shrinks, and speeds up, as a real one does. Only one of every
`mock.token_unit` tokens is actually sent.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from asyncspec.clock import now
from asyncspec.config import Config, MockConfig
from asyncspec.engine.protocol import Completion, Request
from asyncspec.mock.timings import acceptance_of_a_position, response_tokens, tokens_per_s
from asyncspec.wire.facts import Rounds

LONGEST_WAIT_S = 0.01  # the longest that one poll waits


class MockModel(nn.Module):
    """Weights to broadcast."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements))


@dataclass
class _Sequence:
    request: Request
    sample: int
    length: int
    gpu: int
    started_at: float
    done: float = 0.0
    versions: list[tuple[int, float]] = field(default_factory=list)  # (version, tokens done when it arrived)


class MockEngine:
    def __init__(self, config: Config) -> None:
        self.config: MockConfig = config.mock
        self.slots, self.draft_length = config.engine.slots, config.mock.draft_length if config.drafting else 0
        self._accepted = acceptance_of_a_position(config.mock.acceptance, self.draft_length)
        self.model = MockModel(config.mock.weights)
        self.version = self.draft_version = 0
        self._waiting: deque[tuple[Request, int]] = deque()
        self._live: list[_Sequence] = []
        self._at = now()

    @property
    def live(self) -> int:
        return len(self._live)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def parameters(self, kind: str) -> Mapping[str, torch.Tensor]:
        return dict(self.model.named_parameters())

    def submit(self, request: Request) -> None:
        self._waiting.extend((request, sample) for sample in range(len(request.seeds)))

    def rounds(self) -> list[Rounds]:
        return []

    def plan(self) -> int:
        return -1

    def forget(self, request_id: int) -> None:
        pass

    def load_policy(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        with torch.no_grad():
            self.model.weight.copy_(tensors["weight"])
        self.version = version
        for sequence in self._live:
            sequence.versions.append((version, sequence.done))

    def load_draft(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        self.draft_version = version

    def poll(self) -> list[Completion]:
        """Wait until the next sequence ends, for at most LONGEST_WAIT_S; return the samples that have ended."""
        self._fill()
        speeds = self._speeds()
        wait = min((max(0.0, s.length - s.done) / speeds[s.gpu] for s in self._live), default=LONGEST_WAIT_S)
        time.sleep(min(LONGEST_WAIT_S, wait))
        at, self._at = self._at, now()
        ended = []
        for sequence in self._live:
            sequence.done += (self._at - at) * speeds[sequence.gpu]
            if sequence.done >= sequence.length:
                ended.append(sequence)
        self._live = [s for s in self._live if s.done < s.length]
        return [self._completion(s) for s in ended]

    def _speeds(self) -> list[float]:
        """Return tokens per second of a sequence on each GPU, by this machine's clock."""
        counts = [0] * self.config.gpus
        for sequence in self._live:
            counts[sequence.gpu] += 1
        return [tokens_per_s(self.config, max(1, n), self.draft_length) / self.config.time_scale for n in counts]

    def _fill(self) -> None:
        if not self._live:
            self._at = now()
        while self._waiting and len(self._live) < self.slots:
            request, sample = self._waiting.popleft()
            counts = [0] * self.config.gpus
            for sequence in self._live:
                counts[sequence.gpu] += 1
            length = response_tokens(self.config, request.seeds[sample])
            self._live.append(
                _Sequence(request, sample, length, counts.index(min(counts)), now(), versions=[(self.version, 0.0)])
            )

    def _completion(self, s: _Sequence) -> Completion:
        unit = self.config.token_unit
        tokens = max(1, round(s.length / unit))
        versions = torch.empty(tokens, dtype=torch.int32)
        for version, done in s.versions:
            versions[min(tokens - 1, math.floor(done / unit)) :] = version
        verifications = max(1, round(tokens / (self.config.acceptance if self.draft_length else 1.0)))
        accepted_at = [round(verifications * self._accepted**j) for j in range(1, self.draft_length + 1)]
        return Completion(
            request_id=s.request.request_id,
            sample=s.sample,
            tokens=torch.zeros(tokens, dtype=torch.int32),
            logprobs=torch.zeros(tokens),
            versions=versions,
            truncated=s.length == self.config.tokens_max,
            verifications=verifications,
            proposed=verifications * self.draft_length,
            accepted=max(0, tokens - verifications) if self.draft_length else 0,
            started_at=s.started_at,
            reached_at=[verifications, *accepted_at[:-1]] if self.draft_length else [],
            accepted_at=accepted_at,
        )
