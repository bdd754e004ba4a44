"""The embedded engine: continuous batching over a slot KV cache, autoregressive or speculative, in plain torch.

One `poll` is one engine step: admit waiting sequences into free slots (prefill, one pass per distinct prompt), propose,
verify, commit, hand out what finished. Live sequences occupy slots 0..live-1; the last one moves into a freed slot. All
per-token state lies in tensors; Python touches a sequence only when it enters and when it leaves.

Shape suffixes: S slots, P positions, B live rows, K draft length, J = K + 1, V vocabulary, E fused draft features.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Mapping

import torch

from asyncspec.engine.base import Completion, Request
from asyncspec.engine.kv_cache import KVCache, SlotAttention, StepRoPE
from asyncspec.models.eagle3 import Eagle3
from asyncspec.models.policy import PolicyShape, build, hidden_states
from asyncspec.speculation import counter_rng
from asyncspec.speculation.eagle3 import Eagle3Drafter
from asyncspec.speculation.verify import sample, sampling_distribution, verify


@dataclass(frozen=True)
class _Sequence:
    request: Request
    sample: int
    started_at: float = 0.0


class TorchEngine:
    def __init__(
        self, shape: PolicyShape, draft: Eagle3 | None = None, *, slots: int, max_prompt_tokens: int,
        max_response_tokens: int, draft_length: int = 0, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0,
        kv_at_swap: str = "keep", device: str = "cpu",
    ) -> None:
        """
        Args:
            draft: EAGLE-3 draft; None generates autoregressively.
            draft_length: k, tokens proposed per verification; 0 without a draft.
            kv_at_swap: what becomes of the KV cache of live sequences at a weight swap: "keep" goes on with it,
                "recompute" fills it again under the new weights.
        """
        self.slots, self.shape = slots, shape
        self.draft_length = draft_length if draft is not None else 0
        self.settings = (temperature, top_p, top_k)
        self.kv_at_swap, self.device = kv_at_swap, device
        self.max_prompt_tokens = max_prompt_tokens
        self.version = self.draft_version = -1
        positions = max_prompt_tokens + max_response_tokens + self.draft_length + 1
        self.model = build(shape, SlotAttention.Config(), max_positions=positions).to(device).requires_grad_(False)
        self.cache = KVCache(shape.n_layers, slots, positions, shape.n_kv_heads, shape.head_dim, device)
        layers = list(self.model.layers.values())
        self.rope = StepRoPE(layers[0].attention.rope.cache.clone())
        for index, layer in enumerate(layers):
            layer.attention.rope = self.rope
            layer.attention.inner_attention.cache, layer.attention.inner_attention.layer = self.cache, index
        self.drafter = None
        if draft is not None:
            draft = draft.to(device).requires_grad_(False)
            self.drafter = Eagle3Drafter(draft, self.model.tok_embeddings, slots, positions, *self.settings)
        self.aux_layers = draft.shape.aux_layers if draft is not None else ()

        def state(*size, dtype=torch.int64):
            return torch.zeros(*size, dtype=dtype, device=device)

        self.token_SP, self.length_S, self.prompt_S = state(slots, positions), state(slots), state(slots)
        self.limit_S, self.seed_S = state(slots), state(slots)
        self.logprob_SP = state(slots, positions, dtype=torch.float32)
        self.version_SP = state(slots, positions, dtype=torch.int32)
        self.counter_S3 = state(slots, 3)  # verifications, proposed, accepted
        self._sequences: list[_Sequence] = []  # of slots 0..live-1
        self._queue: deque[_Sequence] = deque()

    @property
    def live(self) -> int:
        return len(self._sequences)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def submit(self, request: Request) -> None:
        """Queue all samples of a prompt.

        Raises:
            ValueError: the prompt is empty or longer than max_prompt_tokens.
        """
        if not 0 < len(request.prompt) <= self.max_prompt_tokens:
            raise ValueError(f"prompt of {len(request.prompt)} tokens: expected 1 to {self.max_prompt_tokens}")
        self._queue.extend(_Sequence(request, i) for i in range(len(request.seeds)))

    @torch.inference_mode()
    def poll(self) -> list[Completion]:
        """Do one engine step; returns the samples that finished in it."""
        done = self._admit()
        if self._sequences:
            done += self._step()
        return done

    @torch.no_grad()
    def load_policy(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Take over a policy's weights (names as in `named_parameters`); tokens sampled from now on carry `version`."""
        for name, parameter in self.model.named_parameters():
            parameter.copy_(tensors[name])
        self.version = version
        if self.kv_at_swap == "recompute" and self._sequences:
            longest = int(self.length_S[: self.live].max())
            index_BL = torch.arange(longest - 1, device=self.device).expand(self.live, -1)
            self._target(0, self.token_SP[: self.live, : longest - 1], index_BL)

    @torch.no_grad()
    def load_draft(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Take over a draft's weights."""
        for name, parameter in self.drafter.draft.named_parameters():
            parameter.copy_(tensors[name])
        self.draft_version = version

    def _target(self, first_row: int, token_BL, position_BL):
        """One pass of the policy: hidden states after the final norm, and the draft's features (None without a draft)."""
        self.cache.at(first_row, position_BL)
        self.rope.at(position_BL)
        return hidden_states(self.model, token_BL, position_BL, self.aux_layers)

    def _admit(self) -> list[Completion]:
        count = min(len(self._queue), self.slots - self.live)
        if not count:
            return []
        now = time.monotonic()
        new = [replace(self._queue.popleft(), started_at=now) for _ in range(count)]
        first, rows = self.live, slice(self.live, self.live + count)
        distinct: dict[int, int] = {}
        for sequence in new:
            distinct.setdefault(id(sequence.request), len(distinct))
        prompts = list({id(s.request): s.request.prompt for s in new}.values())
        longest = max(map(len, prompts))
        token_UL = torch.tensor([[*p, *[0] * (longest - len(p))] for p in prompts], device=self.device)
        source_B = torch.tensor([distinct[id(s.request)] for s in new], device=self.device)
        length_B = torch.tensor([len(s.request.prompt) for s in new], device=self.device)
        index_L = torch.arange(longest, device=self.device)

        hidden_ULD, features_ULE = self._target(first, token_UL, index_L.expand(len(prompts), -1))
        last_U = torch.tensor([len(p) - 1 for p in prompts], device=self.device)
        logits_UV = self.model.lm_head(hidden_ULD[torch.arange(len(prompts), device=self.device), last_U])
        self.cache.spread(first, source_B, longest)

        self._sequences += new
        self.token_SP[rows, :longest] = token_UL[source_B]
        self.length_S[rows] = self.prompt_S[rows] = length_B
        self.limit_S[rows] = length_B + torch.tensor([s.request.max_response_tokens for s in new], device=self.device)
        self.seed_S[rows] = torch.tensor([s.request.seeds[s.sample] for s in new], device=self.device)
        self.counter_S3[rows] = 0
        p_BV = sampling_distribution(logits_UV, *self.settings)[source_B]
        uniform = counter_rng.uniforms(self.seed_S[rows], length_B.unsqueeze(1))
        token_B1 = sample(p_BV, uniform[counter_rng.TARGET, :, 0]).unsqueeze(1)
        finished_B = self._commit(first, token_B1, p_BV.unsqueeze(1), torch.ones_like(length_B))
        if self.drafter is not None:
            index_BL = index_L.expand(count, -1)
            next_BL = self.token_SP[rows, 1 : longest + 1]
            self.drafter.extend(first, features_ULE[source_B], next_BL, index_BL, length_B - 1)
        return self._retire(finished_B, first)

    def _step(self) -> list[Completion]:
        B, K = self.live, self.draft_length
        length_B = self.length_S[:B]
        position_BJ = length_B.unsqueeze(1) - 1 + torch.arange(K + 1, device=self.device)
        uniform = counter_rng.uniforms(self.seed_S[:B], position_BJ + 1)  # of the positions written to
        last_B1 = self.token_SP[:B].gather(1, length_B.unsqueeze(1) - 1)
        if K:
            draft_BK, q_BKV = self.drafter.propose(B, length_B, K, uniform[counter_rng.DRAFT])
            hidden_BJD, features_BJE = self._target(0, torch.cat([last_B1, draft_BK], 1), position_BJ)
            p_BJV = sampling_distribution(self.model.lm_head(hidden_BJD), *self.settings)
            token_BJ, count_B = verify(
                p_BJV, q_BKV, draft_BK, uniform[counter_rng.ACCEPT, :, :K], uniform[counter_rng.TARGET])
        else:
            hidden_BJD, features_BJE = self._target(0, last_B1, position_BJ)
            p_BJV = sampling_distribution(self.model.lm_head(hidden_BJD), *self.settings)
            token_BJ = sample(p_BJV, uniform[counter_rng.TARGET])
            count_B = torch.ones_like(length_B)
        kept_B = count_B - 1
        before_B = length_B.clone()
        finished_B = self._commit(0, token_BJ, p_BJV, count_B)
        emitted_B = self.length_S[:B] - before_B
        self.counter_S3[:B] += torch.stack(
            [torch.ones_like(kept_B), torch.full_like(kept_B, K), torch.minimum(kept_B, emitted_B)], 1)
        if self.drafter is not None:
            self.drafter.extend(0, features_BJE, token_BJ, position_BJ, emitted_B - 1)
        return self._retire(finished_B, 0)

    def _commit(self, first_row: int, token_BJ, p_BJV, count_B) -> torch.Tensor:
        """Append the first count_B tokens of each row, cut at the stop token and the length limit; who finished?"""
        B, J = token_BJ.shape
        rows = slice(first_row, first_row + B)
        length_B = self.length_S[rows]
        index_J = torch.arange(J, device=self.device)
        stop_BJ = (token_BJ == self.shape.eos_token_id) & (index_J < count_B.unsqueeze(1))
        first_stop_B = torch.where(stop_BJ, index_J, J).amin(1)
        count_B = torch.minimum(torch.minimum(count_B, first_stop_B + 1), self.limit_S[rows] - length_B)
        row_B1 = torch.arange(first_row, first_row + B, device=self.device).unsqueeze(1)
        position_BJ = length_B.unsqueeze(1) + index_J
        # Entries past the count are rubbish; they lie past the length and are overwritten by what comes next.
        self.token_SP[row_B1, position_BJ] = token_BJ
        self.logprob_SP[row_B1, position_BJ] = p_BJV.gather(-1, token_BJ.unsqueeze(-1)).squeeze(-1).log()
        self.version_SP[row_B1, position_BJ] = self.version
        self.length_S[rows] = length_B + count_B
        return (first_stop_B < count_B) | (self.length_S[rows] >= self.limit_S[rows])

    def _retire(self, finished_B, first_row: int) -> list[Completion]:
        """Hand out finished rows and close the gaps they leave."""
        done = []
        for row in (finished_B.nonzero().squeeze(1) + first_row).tolist()[::-1]:
            sequence = self._sequences[row]
            start, end = int(self.prompt_S[row]), int(self.length_S[row])
            verifications, proposed, accepted = self.counter_S3[row].tolist()
            tokens = self.token_SP[row, start:end].to("cpu", torch.int32)
            done.append(Completion(
                sequence.request.request_id, sequence.sample, tokens, self.logprob_SP[row, start:end].cpu().clone(),
                self.version_SP[row, start:end].cpu().clone(), int(tokens[-1]) != self.shape.eos_token_id,
                verifications, proposed, accepted, sequence.started_at))
            last = self.live - 1
            if row != last:
                length = int(self.length_S[last])
                self.cache.move(last, row, length)
                for tensor in (self.token_SP, self.length_S, self.prompt_S, self.limit_S, self.seed_S, self.logprob_SP,
                               self.version_SP, self.counter_S3):
                    tensor[row] = tensor[last]
                if self.drafter is not None:
                    self.drafter.move(last, row, length)
                self._sequences[row] = self._sequences[last]
            self._sequences.pop()
        return done
