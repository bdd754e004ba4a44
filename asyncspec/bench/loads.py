"""What the generation benchmarks share: the configured policy, engines with any drafter, and loads put on them.

Prompts are those of the default job, its group size too. Engines are made once and kept: calibration and learned
acceptance are then those of a running job. The past that suffix decoding copies from is that after the warm-up, in
every measurement.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from asyncspec import config as configuration
from asyncspec.commands.draft_train import acceptance_length
from asyncspec.config.schema import SpeculationConfig
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

# "random" is an EAGLE-3 draft of random weights: useless, as costly as a good one.
METHODS = ("eagle3", "mtp", "draft_model", "ngram", "suffix", "random")
WARM_UP_ROLLOUTS = 24  # for each slot
# Of engines that are measured side by side. The shorter, the more alike is what else the machine does; but of 64 turns
# most were single steps, which began with the other engine's weights in the processor's caches: what is paid once a
# step weighed more than it does where an engine goes on.
TURNS = 16


def accepted(done: Sequence[Completion]) -> dict[str, float]:
    """Of finished rollouts: acceptance length, proposals a verification, and acceptance of each position, given that
    those before were accepted.
    """
    counts = {"acceptance_length": acceptance_length(list(enumerate(done)))}
    if verifications := sum(c.verifications for c in done):
        counts["proposals"] = sum(c.proposed for c in done) / verifications
    positions = enumerate(zip(summed(c.reached_at for c in done), summed(c.accepted_at for c in done)), 1)
    return counts | {f"acceptance_{j}": kept / reached for j, (reached, kept) in positions if reached}


class Loads:
    def __init__(self, overrides: Sequence[str], engine: type[TorchEngine] = TorchEngine) -> None:
        """
        Args:
            engine: the class to make engines of.
        """
        self._class, self.config = engine, configuration.load("tiny", overrides)
        c = self.config
        use_threads(c.engine.threads)
        self.device = devices(c.deployment.device, ["generator"])[0]
        path = configuration.resolve_path(c.model.path)
        self.model, self.shape = policy.load(path)
        encoder = tokenizer.load(path)
        self.prompts = [encoder.encode(p.prompt).ids for p in sums(c.seed + 77, 1024)]
        self._engines: dict[tuple[str, int], list[TorchEngine]] = {}
        self._auto = {}
        self._pasts = {}  # by slots

    def engine(self, method: str, slots: int, draft_length: int | str = 0, instance: int = 0) -> TorchEngine:
        """An engine with this drafter ("none": without), set to a draft length, 0 or "auto".

        Args:
            instance: 0 or 1. Two engines for comparing two lengths: where its memory lies makes one a hundredth or two
                faster than the other, so they should change places. What auto has learned goes with it.
        """
        key = (method, slots)
        if key not in self._engines:
            self._engines[key] = [engine := self._made(method, slots, "auto")]
            engine.poll()
            self._auto[key] = engine.chooser
            self.steady(len(self.prompts) // 2, WARM_UP_ROLLOUTS * (slots + 1), engine)
            if isinstance(engine.drafter, SuffixDrafter):
                self._pasts[slots] = engine.drafter.state_dict() | {"entered": 0}
        if instance == len(self._engines[key]):
            self._engines[key].append(engine := self._made(method, slots, LONGEST))
            self.steady(len(self.prompts) // 2, slots, engine)
        engine = self._engines[key][instance]
        self._set(engine, key, draft_length)
        return engine

    def _set(self, engine: TorchEngine, key: tuple[str, int], draft_length: int | str) -> None:
        engine.drafter.catch_up()
        engine.use(self._auto[key] if draft_length == "auto" else FixedLength(int(draft_length)))
        if isinstance(engine.drafter, SuffixDrafter):
            # Variants of a repetition get the same prompts and random numbers: none may copy from another's rollouts.
            engine.drafter.load_state_dict(self._pasts[key[1]])

    def _made(self, method: str, slots: int, draft_length: int | str) -> TorchEngine:
        c = self.config
        engine = self._class(
            self.shape,
            self._maker(method),
            slots=slots,
            max_prompt_tokens=c.engine.max_prompt_tokens,
            max_response_tokens=c.sampling.max_response_tokens,
            draft_length=draft_length,
            sampling=Sampling(c.sampling.temperature, c.sampling.top_p, c.sampling.top_k),
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
        """Samples of prompt number `index`; another round, other random numbers."""
        prompt = self.prompts[index % len(self.prompts)]
        seeds = [(round_ * len(self.prompts) + index) * 1000 + i for i in range(samples)]
        engine.submit(Request(index, prompt, seeds, self.config.sampling.max_response_tokens))

    def steady(self, repetition: int, rollouts: int, *engines: TorchEngine) -> list[dict[str, float]]:
        """Tokens a second with all slots busy all the time, over groups of the job's size.

        Lengths differ much, so all variants of a repetition get the same prompts. It ends when the last rollout has got
        a slot; those that are still live are abandoned. Several engines take turns, see `_by_turns`.
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
        """So many rollouts from the first submission to the last token, the tail that runs nearly alone included."""
        for engine in engines:
            for index in range(prompts):
                self.submit(engine, repetition * prompts + index, samples, repetition)
        return self._by_turns(repetition, engines, lambda engine: engine.waiting + engine.live)

    def _by_turns(
        self, repetition: int, engines: Sequence[TorchEngine], left: Callable[[TorchEngine], int]
    ) -> list[dict[str, float]]:
        """Run engines until nothing is left of what was submitted, each a part of the way in turn: what else the
        machine does slows all alike.

        The order is there and back, since who goes on after its own turn has warmer caches, and the other way round the
        next repetition.
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
