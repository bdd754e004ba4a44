"""The Engine protocol: submit prompts, poll for finished samples, swap weights between two steps.

An engine is asynchronous by construction: `submit` never waits, and `poll` does one bounded piece of work and returns
the samples that finished. Weights change only inside `load_policy` and `load_draft`, which the caller invokes between
two polls. Every token is stamped with the version that sampled it, in the step that sampled it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch

from asyncspec.models.shape import PolicyShape
from asyncspec.speculation.verify import Sampling
from asyncspec.wire.facts import Rounds


@dataclass(frozen=True)
class Request:
    """All samples of one prompt."""

    request_id: int
    prompt: Sequence[int]
    seeds: Sequence[int]  # one per sample
    max_response_tokens: int
    sampling: Sampling | None = None  # of these samples, with the embedded engine; None: the engine's
    # A conversation has a request of one sample for each turn, whose prompt is all that came before it.
    keeps: bool = False  # whether a request may follow, so that the KV cache is worth keeping
    follows: int | None = None  # the request whose prompt and response this prompt begins with

    @cached_property
    def read_as(self) -> Hashable:
        """What requests have in common whose prompts are read once for all of them."""
        return (tuple(self.prompt), self.sampling) if self.follows is None else self.request_id


class Partial(NamedTuple):
    """A sample that has a slot, so far. The tensors are those of a `Completion`."""

    request_id: int
    sample: int
    tokens: torch.Tensor
    logprobs: torch.Tensor


@dataclass(frozen=True)
class Completion:
    """One finished sample.

    tokens: int32 [T], the response, with the stop token unless it is truncated.
    logprobs: float32 [T], behavior logprobs under the sampling distribution.
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
    started_at: float  # clock.now() when the sample got its slot
    # Counts by a proposal's position, from the first; empty if the engine does not report them. Proposals past the
    # response's end do not count.
    # verifications that reached this proposal: it existed, and all proposals before it were accepted
    reached_at: Sequence[int] = ()
    accepted_at: Sequence[int] = ()  # verifications that accepted this proposal
    # uint8 or int16 [P + T - 1, M, K], the experts of all tokens of prompt and response but the last, as in
    # wire.messages.Group; None: the engine was not asked for them
    experts: torch.Tensor | None = None
    loss_mask: torch.Tensor | None = None  # of an episode: uint8 [T], see wire.messages.Group; None: all were sampled


class Engine(Protocol):
    version: int
    draft_version: int

    def submit(self, request: Request) -> None: ...

    def poll(self) -> list[Completion]: ...

    def forget(self, request_id: int) -> None:
        """Free what is kept of a request that no request will follow. Not knowing it is no error."""
        ...

    def rounds(self) -> list[Rounds]:
        """Return the rounds since the last call; none if the engine does not measure them."""
        ...

    def plan(self) -> int:
        """Return the draft length that the next `poll` takes, if several ranks must take the same; else -1."""
        ...

    def load_policy(self, tensors: Mapping[str, torch.Tensor], version: int) -> None: ...

    def load_draft(self, tensors: Mapping[str, torch.Tensor], version: int) -> None: ...

    def parameters(self, kind: str) -> Mapping[str, torch.Tensor]:
        """Return the names and shapes of the tensors for `load_policy` (kind "policy") or `load_draft` ("draft"). The
        values may be on the meta device.
        """
        ...

    @property
    def live(self) -> int: ...

    @property
    def waiting(self) -> int: ...

    @property
    def slots(self) -> int: ...


@dataclass
class Sample:
    """One sample of a request, numbered from 0."""

    request: Request
    number: int
    started_at: float = 0.0  # when it got its slot


class QueueingEngine:
    """Base class of engines: a queue where samples wait for slots."""

    samples_as_asked = False  # whether a request may have a sampling of its own

    def __init__(self, shape: PolicyShape, slots: int, max_prompt_tokens: int, max_response_tokens: int) -> None:
        self.shape, self.slots = shape, slots
        self.max_prompt_tokens, self.max_response_tokens = max_prompt_tokens, max_response_tokens
        self._queue: deque[Sample] = deque()
        self._live: dict = {}  # in engines over another library: samples that have a slot, by their names there

    @property
    def live(self) -> int:
        return len(self._live)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def rounds(self) -> list[Rounds]:
        return []

    def plan(self) -> int:
        return -1

    def forget(self, request_id: int) -> None:
        pass

    def submit(self, request: Request) -> None:
        """Queue all samples of a prompt.

        Raises:
            ValueError: see `check_request`; or the request has a sampling of its own, which this engine does not know.
        """
        if request.sampling is not None and not self.samples_as_asked:
            raise ValueError(f"request {request.request_id}: expected the engine's own sampling")
        check_request(request, self.shape.vocab_size, self.max_prompt_tokens, self.max_response_tokens)
        self._queue.extend(Sample(request, i) for i in range(len(request.seeds)))


def at_least(counts_J: np.ndarray) -> list[int]:
    """Turn counts of exactly j into counts of at least j.

    Args:
        counts_J: int [J], how many verifications had exactly j of something, j from 0.

    Returns:
        How many had at least j of it, j from 1, without zeros at the end.
    """
    counts = counts_J[::-1].cumsum()[::-1][1:]
    return counts[: np.count_nonzero(counts)].tolist()


def check_request(request: Request, vocab_size: int, max_prompt_tokens: int, max_response_tokens: int) -> None:
    """Refuse a request that would break a step.

    Raises:
        ValueError: the prompt is empty, longer than max_prompt_tokens, or holds a number that is not a token; the
            request's limit of response tokens is below 1 or above the engine's; a seed takes more than 64 bits. The
            prompt of a request that follows another may be longer, if prompt and response together are not.
    """

    def need(held: bool, what: str) -> None:
        if not held:
            raise ValueError(f"request {request.request_id}: {what}")

    if request.follows is not None:
        max_prompt_tokens += max_response_tokens - request.max_response_tokens
    need(
        0 < len(request.prompt) <= max_prompt_tokens,
        f"prompt of {len(request.prompt)} tokens: expected 1 to {max_prompt_tokens}",
    )
    need(
        0 <= min(request.prompt) and max(request.prompt) < vocab_size,
        f"prompt: expected tokens from 0 to {vocab_size - 1}",
    )
    need(
        0 < request.max_response_tokens <= max_response_tokens,
        f"max_response_tokens={request.max_response_tokens}: expected 1 to {max_response_tokens}",
    )
    need(all(-(2**63) <= seed < 2**63 for seed in request.seeds), "seeds: expected 64-bit integers")
