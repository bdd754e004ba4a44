"""The Engine protocol: submit prompts, poll for finished samples, swap weights between two steps.

An engine is asynchronous by construction: `submit` never waits, `poll` does one bounded piece of work and returns what
finished. Weights change only inside `load_policy` and `load_draft`, which the caller invokes between two polls; every
token is stamped with the version that sampled it, in the step that sampled it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping, Protocol, Sequence

import torch


@dataclass(frozen=True)
class Request:
    """All samples of one prompt."""

    request_id: int
    prompt: Sequence[int]
    seeds: Sequence[int]  # one per sample
    max_response_tokens: int


@dataclass(frozen=True)
class Completion:
    """One finished sample.

    tokens: int32 [T], the response, the stop token included unless truncated.
    logprobs: float32 [T], behaviour logprobs under the sampling distribution.
    versions: int32 [T], the weight version that sampled each token.
    """

    request_id: int
    sample: int
    tokens: torch.Tensor
    logprobs: torch.Tensor
    versions: torch.Tensor
    truncated: bool
    verifications: int  # engine steps after the prefill; each emits at least one token
    proposed: int
    accepted: int
    started_at: float  # timing.clock.now() when the sample got its slot


class Engine(Protocol):
    version: int
    draft_version: int

    def submit(self, request: Request) -> None: ...

    def poll(self) -> list[Completion]: ...

    def load_policy(self, tensors: Mapping[str, torch.Tensor], version: int) -> None: ...

    def load_draft(self, tensors: Mapping[str, torch.Tensor], version: int) -> None: ...

    @property
    def live(self) -> int: ...

    @property
    def waiting(self) -> int: ...

    @property
    def slots(self) -> int: ...
