"""What a draft is worth: how much of it is accepted on held-out prompts, and what that gains on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncspec.commands.draft_samples import Sampler, drafting
from asyncspec.commands.draft_settings import Training
from asyncspec.drafters.make import DrafterMaker, drafter_maker
from asyncspec.drafts.draft import Draft
from asyncspec.loading import use_threads
from asyncspec.models.shape import PolicyShape

LIVE = (1, 4, 16)  # sequences generated at once
TURNS = 4  # parts of a measurement in which the engine with the draft and the one without take turns
GROUP = 8  # samples of each prompt, which is read once for all of them, as in a run


@dataclass(frozen=True)
class Worth:
    """acceptance_length, ngram_acceptance_length: tokens per verification with the draft, and with n-gram lookup.
    prompts: how many held-out prompts were answered for it.
    speedups: tokens per second with the draft over those without, by the number of sequences at once.
    """

    acceptance_length: float
    ngram_acceptance_length: float
    prompts: int
    speedups: dict[int, float]

    def verdict(self) -> str:
        """Return a sentence that says where the draft pays."""
        paying = [str(live) for live, ratio in self.speedups.items() if ratio > 1]
        if not paying:
            return "it does not pay on this machine; train it longer, or generate without a draft"
        where = "everywhere that was measured" if len(paying) == len(self.speedups) else f"at {' and '.join(paying)}"
        return f"it pays {where}; speculation.draft_length=auto, the default, drafts only where it pays"


class Measurer:
    """Measures drafts of one policy with the same prompts."""

    def __init__(self, model, shape: PolicyShape, settings: Training, prompts: Sequence[Sequence[int]]) -> None:
        self.model, self.shape, self.settings, self.prompts = model, shape, settings, prompts

    def sampler(self, maker: DrafterMaker | None) -> Sampler:
        length = 0 if maker is None else self.settings.draft_length
        return Sampler(self.model, self.shape, self.settings, maker, length, max(LIVE))

    def acceptance_length(self, sampler: Sampler, seconds: float) -> tuple[float, int]:
        """Return the acceptance length, and how many prompts were answered in that time."""
        done = sampler(self.prompts, 10**6 * (self.settings.seed + 1), until=time.monotonic() + seconds)
        length = sampler.acceptance_length(done)
        sampler.engine.abandon()
        return length, len(done)

    def worth(self, draft: Draft, until: float) -> Worth:
        """Measure a draft, on one thread. At most half of the time goes to acceptance, the rest to speed.

        Args:
            until: time.monotonic() at which it ends.
        """
        use_threads(1)
        seconds = until - time.monotonic()
        drafted = self.sampler(drafting(draft))
        length, prompts = self.acceptance_length(drafted, seconds / 4)
        looked_up = self.sampler(drafter_maker("ngram", Path(), self.shape))
        ngram, _ = self.acceptance_length(looked_up, seconds / 4)
        engines = (_Timed(drafted, self.prompts), _Timed(self.sampler(None), self.prompts))
        speedups = {}
        for left, live in zip(range(len(LIVE), 0, -1), LIVE):
            part = (until - time.monotonic()) / left
            rates = by_turns(engines, live, time.monotonic() + part)
            speedups[live] = rates[0] / rates[1]
        return Worth(length, ngram, prompts, speedups)


class _Timed:
    """An engine that is kept busy with a number of sequences, for stretches of time."""

    def __init__(self, sampler: Sampler, prompts: Sequence[Sequence[int]]) -> None:
        self.sampler, self.prompts = sampler, prompts

    def begin(self, live: int) -> None:
        engine = self.sampler.engine
        engine.abandon()
        engine.slots = live
        self.seconds, self._finished, self._submitted = 0.0, 0, 0

    @property
    def rate(self) -> float:
        """Tokens per second since `begin`."""
        return (self._finished + self.sampler.engine.rows.begun_tokens) / self.seconds

    def run(self, until: float) -> None:
        """Generate until that time, and one step at least."""
        engine, began = self.sampler.engine, time.monotonic()
        while True:
            while engine.waiting + engine.live < engine.slots + GROUP:
                index = self._submitted % len(self.prompts)
                self.sampler.submit(index, self.prompts[index], GROUP * self._submitted, GROUP)
                self._submitted += 1
            self._finished += sum(len(c.tokens) for c in engine.poll())
            if time.monotonic() >= until:
                break
        self.seconds += time.monotonic() - began


def by_turns(engines: Sequence[_Timed], live: int, until: float) -> list[float]:
    """Return the tokens per second of engines that take turns, each with so many sequences at once."""
    for engine in engines:
        engine.begin(live)
    for left in range(len(engines) * TURNS, 0, -1):
        engines[-left % len(engines)].run(time.monotonic() + (until - time.monotonic()) / left)
    return [engine.rate for engine in engines]
