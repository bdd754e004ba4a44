"""What the generation benchmarks share: the configured policy, engines with any drafter, and loads for them.

Prompts and group size are those of the default job. Engines are made once and kept, so that their calibration and
learned acceptance are those of a running job. Suffix decoding copies from past rollouts; every measurement starts
with the past that it had after the warm-up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from asyncspec import config as configuration
from asyncspec.commands.draft_samples import acceptance_length
from asyncspec.config import SpeculationConfig
from asyncspec.drafters.lookup import SuffixDrafter
from asyncspec.drafters.make import drafter_for, drafter_maker
from asyncspec.drafts import draft as drafts
from asyncspec.engine.protocol import Completion, Request
from asyncspec.engine.torch_engine import TorchEngine
from asyncspec.launch.roles import devices
from asyncspec.loading import use_threads
from asyncspec.models import policy, tokenizer
from asyncspec.speculation.draft_length import LONGEST, FixedLength
from asyncspec.speculation.verify import Sampling
from asyncspec.tasks.sums import sums
from asyncspec.timing.metrics import summed

# "random" is an EAGLE-3 draft with random weights: useless, but as costly as a good one.
METHODS = ("eagle3", "mtp", "draft_model", "ngram", "suffix", "random")
WARM_UP_ROLLOUTS = 24  # per slot
# How many turns each of the engines takes that are measured side by side. Shorter turns make the machine's other load
# more alike for both. But with 64 turns most turns were single steps, which began with the other engine's weights in
# the processor's caches, so the costs paid once per step weighed more than in an engine that runs on.
TURNS = 16


def accepted(done: Sequence[Completion]) -> dict[str, float]:
    """Return statistics of finished rollouts: acceptance length, proposals per verification, and acceptance at each
    position, given that the earlier positions were accepted.
    """
    counts = {"acceptance_length": acceptance_length(list(enumerate(done)))}
    if verifications := sum(c.verifications for c in done):
        counts["proposals"] = sum(c.proposed for c in done) / verifications
    positions = enumerate(zip(summed(c.reached_at for c in done), summed(c.accepted_at for c in done)), 1)
    return counts | {f"acceptance_{j}": kept / reached for j, (reached, kept) in positions if reached}


class Loads:
    """The configured policy, its prompts, and the engines made so far."""

    def __init__(self, overrides: Sequence[str], engine: type[TorchEngine] = TorchEngine) -> None:
        """Load the policy and encode the prompts.

        Args:
            engine: the class of the engines.
        """
        self._class, self._overrides = engine, overrides
        self.config = configuration.load("tiny", overrides)
        c = self.config
        use_threads(c.engine.threads)
        self.device = devices(c.deployment.device, ["generator"])[0]
        path = configuration.resolve_path(c.model.path)
        self.model, self.shape = policy.load(path)
        self.tokenizer = tokenizer.load(path)
        self.prompts = [tokenizer.encode_prompt(self.tokenizer, p.prompt) for p in sums(c.seed + 77, 1024)]
        self._engines: dict[tuple[str, int], list[TorchEngine]] = {}
        self._auto = {}
        self._pasts = {}  # suffix decoding's state after the warm-up, by number of slots

    def with_fields(self, overrides: Sequence[str]) -> configuration.Config:
        """Return the configuration with more fields set."""
        return configuration.load("tiny", [*self._overrides, *overrides])

    def engine(self, method: str, slots: int, draft_length: int | str = 0, instance: int = 0) -> TorchEngine:
        """Return an engine with this drafter ("none": no drafter), set to a draft length (0: none) or to "auto".

        Args:
            instance: which of two engines to use, 0 or 1, when two lengths are compared. The addresses of its memory
                make one engine one or two percent faster than the other, so the lengths should swap engines. What
                auto has learned moves with it.
        """
        key = (method, slots)
        if key not in self._engines:
            self._engines[key] = [engine := self.made(method, slots, "auto")]
            engine.poll()
            self._auto[key] = engine.chooser
            self.steady(len(self.prompts) // 2, WARM_UP_ROLLOUTS * (slots + 1), engine)
            if isinstance(engine.drafter, SuffixDrafter):
                self._pasts[slots] = engine.drafter.state_dict() | {"entered": 0}
        if instance == len(self._engines[key]):
            self._engines[key].append(engine := self.made(method, slots, LONGEST))
            self.steady(len(self.prompts) // 2, slots, engine)
        engine = self._engines[key][instance]
        self._set(engine, key, draft_length)
        return engine

    def _set(self, engine: TorchEngine, key: tuple[str, int], draft_length: int | str) -> None:
        engine.drafter.catch_up()
        engine.use(self._auto[key] if draft_length == "auto" else FixedLength(int(draft_length)))
        if isinstance(engine.drafter, SuffixDrafter):
            # All variants of a repetition get the same prompts and random numbers: none may copy another's rollouts.
            engine.drafter.load_state_dict(self._pasts[key[1]])

    def made(self, method: str, slots: int, draft_length: int | str, kept: int = 0) -> TorchEngine:
        """Return a new engine. Its chooser is not set.

        Args:
            draft_length: the longest, or "auto".
            kept: see `TorchEngine`.
        """
        c = self.config
        engine = self._class(
            self.shape,
            self._maker(method),
            slots=slots,
            max_prompt_tokens=c.engine.max_prompt_tokens,
            max_response_tokens=c.sampling.max_response_tokens,
            draft_length=draft_length,
            sampling=Sampling(c.sampling.temperature, c.sampling.top_p, c.sampling.top_k),
            kept=kept,
            device=self.device,
            dtype=getattr(torch, c.model.dtype),
        )
        engine.load_policy(dict(self.model.named_parameters()), 0)
        return engine

    def _maker(self, method: str):
        c = self.config
        if method == "random":
            torch.manual_seed(c.seed)
            return drafter_for(drafts.new("eagle3", self.shape, self.model))
        spec = SpeculationConfig(
            method=method, draft_path=c.speculation.draft_path if method == c.speculation.method else ""
        )
        directory = configuration.Config(speculation=spec).draft_directory
        return drafter_maker(method, configuration.resolve_path(directory), self.shape)

    def submit(self, engine: TorchEngine, index: int, samples: int, round_: int) -> None:
        """Submit samples of prompt number `index`; each `round_` has other random numbers."""
        prompt = self.prompts[index % len(self.prompts)]
        seeds = [(round_ * len(self.prompts) + index) * 1000 + i for i in range(samples)]
        engine.submit(Request(index, prompt, seeds, self.config.sampling.max_response_tokens))

    def steady(self, repetition: int, rollouts: int, *engines: TorchEngine) -> list[dict[str, float]]:
        """Measure tokens per second with all slots busy all the time, over groups of the job's size.

        Response lengths differ much, so all variants of a repetition get the same prompts. The measurement ends when
        the last rollout has got a slot; rollouts that are then still live are abandoned. Several engines take turns,
        see `_by_turns`.
        """
        size = self.config.rl.group_size
        for engine in engines:
            groups = -(-rollouts // size) + -(-engine.slots // size)
            for group in range(groups):
                self.submit(engine, repetition * groups + group, size, repetition)
        results = self._by_turns(repetition, engines, lambda engine: engine.waiting)
        for engine in engines:
            engine.abandon()
        return results

    def batch(self, repetition: int, prompts: int, samples: int, *engines: TorchEngine) -> list[dict[str, float]]:
        """Measure rollouts from the first submission to the last token, including the tail with few live sequences."""
        for engine in engines:
            for index in range(prompts):
                self.submit(engine, repetition * prompts + index, samples, repetition)
        return self._by_turns(repetition, engines, lambda engine: engine.waiting + engine.live)

    def _by_turns(
        self, repetition: int, engines: Sequence[TorchEngine], left: Callable[[TorchEngine], int]
    ) -> list[dict[str, float]]:
        """Run engines until nothing is left of what was submitted. They take turns, each doing a part of its work, so
        that other load on the machine slows all of them alike.

        The order is reversed every turn. An engine that runs twice in a row has warmer caches, so the next repetition
        starts with the opposite order.
        """
        turns, all_ = TURNS if len(engines) > 1 else 1, [left(engine) for engine in engines]
        tokens, steps, seconds = ([0] * len(engines) for _ in range(3))
        done: list[list[Completion]] = [[] for _ in engines]
        for turn in range(1, turns + 1):
            there = list(enumerate(engines))
            for i, engine in there if (turn + repetition) % 2 else reversed(there):
                began, rest = time.perf_counter(), all_[i] * (1 - turn / turns)
                while left(engine) > rest:
                    done[i] += engine.poll()
                    steps[i] += 1
                seconds[i] += time.perf_counter() - began
        results = []
        for i, engine in enumerate(engines):
            tokens[i] = engine.rows.begun_tokens + sum(len(c.tokens) for c in done[i])
            result = {
                "tokens": tokens[i],
                "seconds": seconds[i],
                "tokens_per_s": tokens[i] / seconds[i],
                "step_ms": 1e3 * seconds[i] / steps[i],
            }
            results.append(result | accepted(done[i]))
        return results
