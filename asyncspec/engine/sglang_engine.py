"""An SGLang server behind the Engine protocol, over HTTP (SGLang 0.5.23). The user starts the server.

A sample is one POST to /generate, in a thread that waits for the whole answer. At most `slots` samples are in flight;
the server batches them.

The server reports the version of each token in meta_info.weight_versions: for each stretch of the response, the
`weight_version` that was in force when it was sampled. It records this when the version changes, for the tokens that
the request has at that moment. So a swap is

    write the files                    the server continues to sample under v
    /pause_generation, mode retract    the running step ends, its tokens count for v; requests return to the queue
    /update_weights_from_disk          weight_version v+1, flush_cache: no KV cache computed under v remains
    /continue_generation               the KV caches are computed again, then tokens are sampled under v+1

Mode in_place would keep the KV cache. But with SGLang's overlapped scheduling, its default, a step is then running
whose tokens are sampled under v and would be reported as v+1. Mode abort would end partial responses. So this is the
only way, and engine.kv_at_swap must be recompute.
"""

from __future__ import annotations

import os
import queue
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError

from asyncspec import clock
from asyncspec.config import Config, resolve_path, work
from asyncspec.deadlines import SERVER_SAMPLE_S, SERVER_WEIGHTS_S
from asyncspec.engine.protocol import Completion, QueueingEngine, Sample, at_least
from asyncspec.engine.sglang_server import Answer, Server, ServerError, Updated, check
from asyncspec.errors import first_line
from asyncspec.models import hf_files, policy
from asyncspec.models.policy import PolicyShape

LONGEST_WAIT_S = 0.01  # the longest that one poll waits for an answer


@dataclass
class _Sent(Sample):
    version: int = 0  # the engine's version when the sample was sent


class SglangEngine(QueueingEngine):
    def __init__(self, config: Config, index: int) -> None:
        """Abort all requests at the server, and have it load the weights of model.path as version 0.

        Args:
            index: index of this generator's address in engine.url.

        Raises:
            UserError: the server does not fit the configuration, see `sglang_server.check`.
            ServerError: the server does not answer, or cannot load the weights.
        """
        path = resolve_path(config.model.path)
        limits = config.engine.max_prompt_tokens, config.sampling.max_response_tokens
        super().__init__(PolicyShape.from_hf(path, config.model.backend), config.engine.slots, *limits)
        self.draft_version = 0
        self._temperature, self._drafting = config.sampling.temperature, config.drafting
        self._answers: queue.SimpleQueue[tuple[int, Answer | ServerError]] = queue.SimpleQueue()
        self._sent = 0
        self.policy = policy.skeleton(self.shape)  # names and shapes; the server has the weights
        self._server = Server(config.server_urls[index])
        check(config, self._server)
        self._load_s = SERVER_WEIGHTS_S + work.start_s(config)
        self._weights = weights_folder(config) / f"generator{index}"
        shutil.rmtree(self._weights, ignore_errors=True)  # files that a killed generator left behind
        self._server.ask("/abort_request", {"abort_all": True})
        self._swap(path.resolve(), 0)

    def parameters(self, kind: str) -> Mapping[str, torch.Tensor]:
        return dict(self.policy.named_parameters())

    def poll(self) -> list[Completion]:
        """Send samples while there is room, wait a moment for an answer, and return the samples that are answered.

        Raises:
            ServerError: the call for a sample failed, or its answer contradicts itself or the request.
        """
        while self._queue and self.live < self.slots:
            self._send(self._queue.popleft())
        done, wait_s = [], LONGEST_WAIT_S
        while self._live:
            try:
                number, answer = self._answers.get(timeout=wait_s)
            except queue.Empty:
                break
            if isinstance(answer, ServerError):
                raise answer
            done.append(self._completion(self._live.pop(number), answer))
            wait_s = 0.0
        return done

    def load_policy(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Load a policy's weights (names as in `parameters`); tokens sampled from now on carry `version`.

        Raises:
            ServerError: the weights are not finite, or the files cannot be written, or the server cannot load them. It
                ends then: what it calls rolling back reads the same files.
        """
        folder = self._weights / f"version{version}"
        for name, tensor in tensors.items():
            if not bool(torch.isfinite(tensor).all()):  # the server does not look
                raise ServerError(f"tensor {name} of version {version} holds values that are not finite")
        try:
            hf_files.write_checkpoint(folder, self.shape.to_hf(), policy.to_hf(self.policy, tensors))
            self._swap(folder, version)
        except (OSError, SafetensorError) as error:
            raise ServerError(
                f"weights of version {version} could not be written to {folder}: {first_line(error)}; "
                "expected an engine.weights_dir with room for them"
            ) from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # the server has loaded them; in /dev/shm they use memory

    def load_draft(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Refuse: a draft with weights cannot be used here.

        Raises:
            ServerError: always. config/check.py refuses such drafts before a run.
        """
        raise ServerError("engine.kind=sglang cannot load the weights of a draft")

    def _swap(self, folder: Path, version: int) -> None:
        """Have the server continue with the weights in a folder."""
        self._server.ask("/pause_generation", {"mode": "retract"})
        body = {
            "model_path": str(folder),
            "load_format": "safetensors",
            "weight_version": str(version),
            "flush_cache": True,
        }
        try:
            updated = self._server.ask("/update_weights_from_disk", body, Updated, self._load_s)
        except ServerError as error:
            raise ServerError(f"{error}; it ends if it cannot load a version, so see its log") from None
        if not updated.success:
            raise ServerError(
                f"SGLang at {self._server.url} could not load version {version}: {' '.join(updated.message.split())}"
            )
        self.version = version
        self._server.ask("/continue_generation", {"torch_empty_cache": False})

    def _send(self, sample: Sample) -> None:
        request = sample.request
        body = {
            "input_ids": list(request.prompt),
            "return_logprob": True,
            "stream": False,
            # A server without --enable-deterministic-inference ignores the seed.
            "sampling_params": {
                "temperature": self._temperature,
                # Fields that are not given would come from the server's --preferred-sampling-params.
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "frequency_penalty": 0.0,
                "presence_penalty": 0.0,
                "repetition_penalty": 1.0,
                "min_new_tokens": 0,
                "max_new_tokens": request.max_response_tokens,
                "stop_token_ids": [*self.shape.eos_token_ids],
                "sampling_seed": request.seeds[sample.number],
            },
        }
        self._sent += 1
        self._live[self._sent] = _Sent(request, sample.number, clock.now(), self.version)
        # A daemon thread, so that the process can exit while samples are in flight.
        threading.Thread(target=_fetch, args=(self._server, body, self._sent, self._answers), daemon=True).start()

    def _completion(self, sample: _Sent, answer: Answer) -> Completion:
        meta, limit = answer.meta_info, sample.request.max_response_tokens
        tokens, reason = [token for _, token, _ in meta.output_token_logprobs], meta.finish_reason

        def need(held: bool, what: str) -> None:
            if not held:
                raise ServerError(
                    f"SGLang at {self._server.url}: request {sample.request.request_id}, sample {sample.number}: {what}"
                )

        need(reason.type in ("stop", "length"), f"ended with {reason.type}: {' '.join((reason.message or '').split())}")
        need(
            0 < len(tokens) == meta.completion_tokens <= limit,
            f"{len(tokens)} logprobs for {meta.completion_tokens} tokens; expected 1 to {limit}, equally many",
        )
        need(
            reason.type == "stop" or len(tokens) == limit,
            f"cut off after {len(tokens)} of {limit} tokens; expected a server with room for prompt "
            f"and response in its --context-length",
        )
        vocabulary = self.shape.vocab_size
        need(
            not isinstance(reason.matched, str) and all(0 <= token < vocabulary for token in tokens),
            f"stopped at {reason.matched!r}; expected tokens below the policy's {vocabulary}",
        )
        versions: list[int] = []
        for span in meta.weight_versions:
            need(
                span.start == len(versions) and span.version.isdecimal(),
                f"weight_versions {span}; expected a whole number as the version of tokens from {len(versions)} on",
            )
            versions += [int(span.version)] * (span.end - span.start)
        need(len(versions) == len(tokens), f"weight_versions cover {len(versions)} tokens; expected {len(tokens)}")
        need(
            sample.version <= versions[0] and versions[-1] <= self.version and versions == sorted(versions),
            f"tokens of versions {versions[0]} to {versions[-1]}; expected {sample.version} to {self.version}: "
            f"only this generator may change the server's weights",
        )
        # Of the verifications, how many accepted a proposal at each position, and how many reached it: those that
        # accepted the one before. It counts what lies behind the stop token too.
        accepted_at = at_least(np.array(meta.spec_correct_drafts_histogram, dtype=np.int64))
        reached_at = (meta.spec_verify_ct, *accepted_at[:-1]) if len(accepted_at) else ()
        return Completion(
            request_id=sample.request.request_id,
            sample=sample.number,
            tokens=torch.tensor(tokens, dtype=torch.int32),
            logprobs=torch.tensor([logprob for logprob, _, _ in meta.output_token_logprobs]),
            versions=torch.tensor(versions, dtype=torch.int32),
            # The server may also stop at tokens of its own, those in the model's generation_config.json.
            truncated=reason.type == "length" and tokens[-1] not in self.shape.eos_token_ids,
            verifications=meta.spec_verify_ct if self._drafting else len(tokens) - 1,
            proposed=meta.spec_num_proposed_drafts,
            accepted=meta.spec_num_correct_drafts,
            started_at=sample.started_at,
            reached_at=reached_at,
            accepted_at=accepted_at,
        )


def weights_folder(config: Config) -> Path:
    """Return the folder for the files of versions while a server loads them: engine.weights_dir, or a folder in memory
    that is named after the run's directory.
    """
    if config.engine.weights_dir:
        return resolve_path(config.engine.weights_dir).resolve()
    return Path(f"/dev/shm/asyncspec-{os.getuid()}", *Path(config.run_dir).resolve().parts[1:])


def _fetch(server: Server, body: dict, number: int, answers: queue.SimpleQueue) -> None:
    try:
        answers.put((number, server.ask("/generate", body, Answer, SERVER_SAMPLE_S)))
    except ServerError as error:
        answers.put((number, error))
