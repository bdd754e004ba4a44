"""The embedded engine: continuous batching over a slot KV cache, autoregressive or speculative, in plain torch.

One `poll` is one engine step: admit waiting sequences into free slots (prefill, see prompts.py), choose a draft
length, propose, verify, commit, hand out what finished. In a step live sequences occupy slots 0..live-1: a slot that has become free goes to a
sequence that waits, or else to the last one. All per-token state lies in tensors; Python touches a sequence only when it enters and when it leaves, and the host waits
for the device once a step.

Shape suffixes: S slots, P positions, B live rows, K draft length, J = K + 1, V vocabulary, D model dimension.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Callable, Mapping, Sequence

import numpy as np
import torch

from asyncspec.engine import kv_cache
from asyncspec.engine.base import Completion, Request, at_least, check_request
from asyncspec.engine.decode import DecodeModel
from asyncspec.engine.graphs import TIMES, Graphs
from asyncspec.engine.prompts import PROMPT_ROWS, PromptReader
from asyncspec.models.policy import PolicyShape, build, cast
from asyncspec.speculation import counter_rng
from asyncspec.speculation.base import Drafter, Slots
from asyncspec.speculation.draft_length import LONGEST, AutoLength, FixedLength, LookupLength
from asyncspec.speculation.verify import sample, sampling_distribution, verify
from asyncspec.timing import clock

PREFILL_TOKENS = 4096  # prompt tokens read in one engine step; more would hold up the sequences that are live
CALIBRATION_S, CALIBRATION_ROUNDS = 4.0, 6


@dataclass(frozen=True)
class _Sequence:
    request: Request
    sample: int
    started_at: float = 0.0


class TorchEngine:
    def __init__(
        self, shape: PolicyShape, make_drafter: Callable[..., Drafter] | None = None, *, slots: int, max_prompt_tokens: int,
        max_response_tokens: int, draft_length: int | str = "auto", temperature: float = 1.0, top_p: float = 1.0,
        top_k: int = 0, kv_at_swap: str = "keep", compile_layers: bool = False, device: str = "cpu", dtype: torch.dtype = torch.float32,
    ) -> None:
        """
        Args:
            make_drafter: callable(model, slots, settings) -> Drafter; None generates autoregressively.
            draft_length: k, tokens proposed per verification, or "auto": chosen for each step, see speculation/draft_length.py.
            kv_at_swap: what becomes of the KV cache of live sequences at a weight swap: "keep" goes on with it,
                "recompute" fills it again under the new weights.
            dtype: what policy and draft are computed in, float32 or bfloat16; distributions and logprobs always in float32.
            compile_layers: run steps over few tokens through torch.compile, see engine/compiled.py; compiled at the first weights. On a GPU they are
                launched as CUDA graphs besides, see engine/graphs.py.
        """
        self.slots, self.shape = slots, shape
        self.settings = (temperature, top_p, top_k)
        self.kv_at_swap, self.device, self._compile = kv_at_swap, device, compile_layers
        self.max_prompt_tokens, self.max_response_tokens = max_prompt_tokens, max_response_tokens
        self.version = self.draft_version = -1
        self._longest = longest = 0 if make_drafter is None else LONGEST if draft_length == "auto" else int(draft_length)
        positions = max_prompt_tokens + max_response_tokens + longest + 1
        self.model = cast(build(shape, positions).to(device), dtype).requires_grad_(False)
        # One row more than slots, for exchanging two; behind it rows for prompts.
        rows = slots + 1 + PROMPT_ROWS
        self.decode = DecodeModel(self.model, shape, rows, positions, device, compile_layers)
        self.tokens = Slots(rows, positions, device)
        self.drafter = None if make_drafter is None else make_drafter(self.model, self.tokens, self.settings)
        self.aux_layers = () if self.drafter is None else self.drafter.aux_layers
        # What steps cost beside one another: on processors their own time, which others that share them (the trainer, say) do not lengthen.
        self._clock = time.thread_time if torch.device(device).type == "cpu" else time.perf_counter
        self.lengths = None if draft_length == "auto" and longest else FixedLength(longest)  # auto: made by the calibration
        self._prompts = PromptReader(self.decode, self.tokens, self.drafter, self.settings, slots + 1)
        self._drafting = longest > 0
        self._keeping, self._missed_S = True, np.zeros(slots + 1, dtype=bool)  # features for the draft, and rows of which some were not kept

        def state(*size, dtype=torch.int64):
            return torch.zeros(*size, dtype=dtype, device=device)

        self._stops_V = state(shape.vocab_size, dtype=torch.bool)
        self._stops_V[list(shape.eos_token_ids)] = True
        self.limit_S = state(slots + 1)
        # Random numbers of every position of a row, made when its sequence enters.
        self.uniform_SPR = state(slots + 1, positions, counter_rng.STREAMS, dtype=torch.float32)
        self.logprob_SP = state(slots + 1, positions, dtype=torch.float32)
        self.version_SP = state(slots + 1, positions, dtype=torch.int32)
        self.counter_S3 = np.zeros((slots + 1, 3), dtype=np.int64)  # on the host: verifications, proposed, accepted
        # Verifications that came to j proposals, and that accepted j.
        self.reached_SJ, self.accepted_SJ = (np.zeros((slots + 1, longest + 1), dtype=np.int64) for _ in range(2))
        self._row_S1 = torch.arange(slots, device=device).unsqueeze(1)
        self._sequences: list[_Sequence | None] = []  # of slots from 0; None for those of `_free`
        self._free: list[int] = []  # slots whose sequences finished in the last step
        self._queue: deque[_Sequence] = deque()
        self.entered = 0  # sequences, whose number salts their seeds where a drafter remembers
        self.laps: dict[str, float] | None = None  # seconds by part of a step, for benchmarks: a dict switches it on

    @property
    def live(self) -> int:
        return len(self._sequences) - len(self._free)

    @property
    def begun_tokens(self) -> int:
        """How many tokens the live sequences have emitted."""
        rows = [row for row, sequence in enumerate(self._sequences) if sequence is not None]
        return int((self.tokens.length_S[rows] - self.tokens.prompt_S[rows]).sum())

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def parameters(self, kind: str) -> Mapping[str, torch.Tensor]:
        return dict((self.model if kind == "policy" else self.drafter.draft).named_parameters())

    def submit(self, request: Request) -> None:
        """Queue all samples of a prompt.

        Raises:
            ValueError: see `check_request`.
        """
        check_request(request, self.shape.vocab_size, self.max_prompt_tokens, self.max_response_tokens)
        self._queue.extend(_Sequence(request, i) for i in range(len(request.seeds)))

    def abandon(self) -> None:
        """Forget all sequences, waiting and live; nothing comes of them."""
        self._queue.clear()
        self._sequences.clear()
        self._free.clear()
        self._prompts.forget()

    @torch.inference_mode()
    def poll(self) -> list[Completion]:
        """Do one engine step; returns the samples that finished in it."""
        if self.lengths is None:
            self.lengths = self._calibrated()
            if self.drafter.looks_up:
                self.drafter.learn = self.lengths.learn
        self._lap("outside")
        done = self._admit()
        self._lap("admit")
        if self._sequences:
            done += self._step()
        return done

    @torch.no_grad()
    def load_policy(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Take over a policy's weights (names as in `named_parameters`); tokens sampled from now on carry `version`."""
        for name, parameter in self.model.named_parameters():
            parameter.copy_(tensors[name])
        self.decode.reload()
        if self._compile and self.decode.compiled is None:
            self.decode.compile(self.shape)
            if graphs := Graphs.of(self.slots, self.device):
                self.launch_by(graphs)
        if self.drafter is not None:
            self.drafter.reload()
        self.version = version
        self._prompts.forget()
        if self.kv_at_swap == "recompute" and self.live:
            self._close()
            longest = int(self.tokens.length[: self.live].max())
            if self.aux_layers:
                self.drafter.enter(0, self.live)  # what it has read is of the old weights
            self._prompts.fill(0, self.tokens.token_SP[: self.live, : longest - 1])
            if self.drafter is not None:
                self.drafter.catch_up()
            self._missed_S[: self.live] = False

    @torch.no_grad()
    def load_draft(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Take over a draft's weights."""
        for name, parameter in self.drafter.draft.named_parameters():
            parameter.copy_(tensors[name])
        self.drafter.reload()
        self.draft_version = version

    def launch_by(self, graphs: Graphs) -> None:
        """Launch passes over few tokens, the policy's and the draft's, by these from now on."""
        self.decode.graphs = graphs
        if self.drafter is not None:
            self.drafter.launch_by(graphs)

    def _lap(self, part: str) -> None:
        """What was done since the last lap was this part."""
        if self.laps is None:
            return
        if self.tokens.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.laps[part] = self.laps.get(part, 0.0) + now - self.laps.get("", now)
        self.laps[""] = now

    def _admit(self) -> list[Completion]:
        """Give free slots to waiting sequences."""
        done, budget = [], PREFILL_TOKENS
        while self._queue and self.live < self.slots and budget > 0:
            if not self._prompts.has(self._queue[0].request):
                budget -= self._prompts.read((s.request for s in self._queue), self._drafting)
            new = []
            while self._queue and self.live + len(new) < self.slots and self._prompts.has(self._queue[0].request):
                new.append(self._queue.popleft())
            done += self._enter(new)
        self._close()
        return done

    def _enter(self, new: list[_Sequence]) -> list[Completion]:
        """Put sequences whose prompts were read into free rows and sample their first tokens."""
        prompts, tokens, now = self._prompts, self.tokens, clock.now()
        rows, self._free = sorted(self._free)[: len(new)], sorted(self._free)[len(new) :]
        rows += range(len(self._sequences), len(self._sequences) + len(new) - len(rows))
        self._sequences += [None] * (rows[-1] + 1 - len(self._sequences))
        for row, sequence in zip(rows, new):
            self._sequences[row] = _Sequence(sequence.request, sequence.sample, now)
        sources = [prompts.row(s.request) for s in new]
        lengths = tokens.length[sources].tolist()
        limits = [length + s.request.max_response_tokens for length, s in zip(lengths, new)]
        row_B, source_B, limit_B = torch.tensor([rows, sources, limits], device=self.device).unbind()
        self.decode.cache.copy(sources, rows, longest := max(lengths))
        self._copy_for_drafter(sources, rows)
        length_B, p_BV = tokens.length_S[source_B], prompts.first_token_distribution(source_B)
        tokens.token_SP[row_B, :longest] = tokens.token_SP[source_B, :longest]
        tokens.prompt_S[row_B], tokens.length_S[row_B] = length_B, length_B + 1
        self.limit_S[row_B] = limit_B
        seeds = [s.request.seeds[s.sample] for s in new]
        if self.drafter is not None and self.drafter.remembers:
            # Proposals may be tokens that the same seed sampled before: verifying them takes numbers that never were used.
            seeds = [hash((seed, self.entered + i)) for i, seed in enumerate(seeds)]
            self.entered += len(new)
        needed = max(limits) + self._longest  # a draft may lead beyond the limit
        self.uniform_SPR[row_B, :needed] = uniform_BPR = torch.from_numpy(counter_rng.uniforms(seeds, needed)).to(self.device)
        self.counter_S3[rows] = self.reached_SJ[rows] = self.accepted_SJ[rows] = 0
        self._missed_S[rows] = not self._keeping
        token_B = sample(p_BV, uniform_BPR[..., counter_rng.TARGET].gather(1, length_B.unsqueeze(1)).squeeze(1))
        tokens.token_SP[row_B, length_B] = token_B
        self.logprob_SP[row_B, length_B] = p_BV.gather(1, token_B.unsqueeze(1)).squeeze(1).log_()
        self.version_SP[row_B, length_B] = self.version
        tokens.refresh(len(self._sequences))
        self._lap("admit")
        finished_B = self._stops_V[token_B] | (length_B + 1 >= limit_B)
        return self._retired([row for row, finished in zip(rows, finished_B.cpu().tolist()) if finished])

    def _step(self) -> list[Completion]:
        B = self.live
        if self.drafter is None:
            self._arrange(1)
            _, finished_B, _ = self._advance(B, 0)
            return self._retired(finished_B.nonzero()[0].tolist())
        lengths = self.lengths
        K = lengths.choose(B, self._missed_S)
        self._drafting = K > 0
        self._keeping = K > 0 or lengths.keeps or not self.aux_layers
        if K:  # not this step's own work
            self.drafter.catch_up()
        start = self._clock() if lengths.watches else 0.0
        self._arrange(K + 1)
        # A step that must first read much it has missed says nothing about what such a step usually costs.
        usual = K == 0 or self.drafter.unread(B) <= LONGEST + 1
        kept_B, finished_B, found_B = self._advance(B, K)
        if not self._keeping:
            self._missed_S[:B] = True
        if lengths.watches:
            lengths.observe(B, K, self._clock() - start, kept_B, found_B, usual, self._missed_S[:B])
        return self._retired(finished_B.nonzero()[0].tolist())

    def _advance(self, B: int, K: int, verified: int | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """One verification of every live row: accepted proposals and who finished, on the host; how many proposals a lookup has found.

        Args:
            verified: how many proposals are verified, whatever a lookup has found; None: as many as it has found.
        """
        tokens = self.tokens
        length_B1 = tokens.length_S[:B].unsqueeze(1)
        token_B1 = tokens.token_SP[:B].gather(1, length_B1 - 1)
        position_BJ = length_B1 + tokens.index_P[: K + 1]  # written to
        draft_BJ, accept_BJ, target_BJ = self.uniform_SPR[self._row_S1[:B], position_BJ].unbind(-1)
        proposal = found_B = None
        self._lap("bookkeeping")
        if K:
            proposal = self.drafter.propose(B, K, draft_BJ[:, :K])
            if proposal.count_B is not None:
                found_B = proposal.count_B.cpu().numpy()
                K = int(found_B.max()) if verified is None else verified
                proposal = proposal._replace(draft_BK=proposal.draft_BK[:, :K])
                accept_BJ, target_BJ, position_BJ = accept_BJ[:, : K + 1], target_BJ[:, : K + 1], position_BJ[:, : K + 1]
        self._lap("draft")
        if K:
            token_B1 = torch.cat([token_B1, proposal.draft_BK], 1)
        read_BJ = position_BJ - 1
        hidden_BJD, features_BJD = self.decode.hidden_states(0, token_B1, read_BJ, tokens.spans(0, B, K), self.aux_layers if self._keeping else ())
        logits_BJV = self.decode.logits(hidden_BJD)
        self._lap("target")
        p_BJV = sampling_distribution(logits_BJV, *self.settings)
        if K:
            token_BJ, count_B = verify(p_BJV, proposal.q_BKV, proposal.draft_BK, accept_BJ[:, :K], target_BJ, proposal.count_B)
        else:
            token_BJ, count_B = sample(p_BJV, target_BJ), None
        self._lap("verify and sample")
        before_B = tokens.length[:B].copy()
        finished_B = self._commit(token_BJ, p_BJV, count_B).cpu().numpy()
        tokens.refresh(B)
        if self.drafter is not None and self._keeping:
            self.drafter.observe(0, features_BJD, read_BJ)
        kept_B, counter_B3 = np.zeros(B, dtype=np.int64), self.counter_S3[:B]
        counter_B3[:, 0] += 1
        if K:
            kept_B = count_B.cpu().numpy() - 1
            offered, emitted_B, row_B = K if found_B is None else found_B, tokens.length[:B] - before_B, np.arange(B)
            accepted_B = np.minimum(kept_B, emitted_B)
            counter_B3[:, 1] += offered
            counter_B3[:, 2] += accepted_B
            self.reached_SJ[row_B, np.minimum(offered, emitted_B)] += 1
            self.accepted_SJ[row_B, accepted_B] += 1
        return kept_B, finished_B, found_B

    def _commit(self, token_BJ, p_BJV, count_B) -> torch.Tensor:
        """Append the first count_B tokens of each row (None: its only one), cut at the stop token and the length limit.

        Returns:
            finished_B, bool.
        """
        B, J = token_BJ.shape
        rows, tokens = slice(0, B), self.tokens
        length_B, limit_B = tokens.length_S[rows], self.limit_S[rows]
        position_BJ = length_B.unsqueeze(1) + tokens.index_P[:J]
        # Entries past the count are rubbish; they lie past the length and are overwritten by what comes next.
        tokens.token_SP[rows].scatter_(1, position_BJ, token_BJ)
        self.logprob_SP[rows].scatter_(1, position_BJ, p_BJV.gather(-1, token_BJ.unsqueeze(-1)).squeeze(-1).log_())
        self.version_SP[rows].scatter_(1, position_BJ, self.version)
        stop_BJ = self._stops_V[token_BJ]
        if count_B is None:
            stopped_B, length_B = stop_BJ[:, 0], length_B + 1
        else:
            stop_BJ &= tokens.index_P[:J] < count_B.unsqueeze(1)
            first_stop_B = torch.where(stop_BJ, tokens.index_P[:J], J).amin(1)
            count_B = torch.minimum(torch.minimum(count_B, first_stop_B + 1), limit_B - length_B)
            stopped_B, length_B = first_stop_B < count_B, length_B + count_B
        tokens.length_S[rows] = length_B
        return stopped_B | (length_B >= limit_B)

    def _retired(self, rows: list[int]) -> list[Completion]:
        """Hand out what finished in these rows."""
        done, tokens = [], self.tokens
        for row in rows:
            sequence = self._sequences[row]
            start, end = len(sequence.request.prompt), int(tokens.length[row])
            verifications, proposed, accepted = self.counter_S3[row].tolist()
            response = tokens.token_SP[row, start:end].to("cpu", torch.int32)
            done.append(Completion(
                sequence.request.request_id, sequence.sample, response, self.logprob_SP[row, start:end].cpu().clone(),
                self.version_SP[row, start:end].cpu().clone(), int(response[-1]) not in self.shape.eos_token_ids,
                verifications, proposed, accepted, sequence.started_at, at_least(self.reached_SJ[row]), at_least(self.accepted_SJ[row])))
            if self.drafter is not None:
                self.drafter.leave(row)
            self._sequences[row] = None
        self._free += rows
        self._lap("bookkeeping")
        return done

    def _close(self) -> None:
        """Move the last sequences into rows that nobody waits for."""
        for row in sorted(self._free, reverse=True):
            last = self._sequences.pop()
            if row < len(self._sequences):
                self._move(len(self._sequences), row)
                self._sequences[row] = last
        self._free.clear()

    def _move(self, source: int, target: int) -> None:
        """Copy a row, with all that belongs to it."""
        tokens = self.tokens
        self.decode.cache.copy([source], [target], int(tokens.length[source]))
        self._copy_for_drafter([source], [target])
        for tensor in (tokens.token_SP, tokens.length_S, tokens.prompt_S, tokens.length, self.limit_S, self.uniform_SPR,
                       self.logprob_SP, self.version_SP, self.counter_S3, self.reached_SJ, self.accepted_SJ, self._missed_S):
            tensor[target] = tensor[source]

    def _copy_for_drafter(self, sources: Sequence[int], rows: Sequence[int]) -> None:
        """See `Drafter.copy`. While features are not kept those there are would not serve: a copy costs as much as a hundredth of a step."""
        if self.drafter is None:
            return
        if self._keeping:
            self.drafter.copy(sources, rows)
        else:
            for row in rows:
                self.drafter.enter(row, 1)

    def _arrange(self, width: int) -> None:
        """Part the rows into groups of like length, for a pass over so many tokens of each; where that would save much, exchange rows for it first."""
        tokens, B, spare = self.tokens, self.live, self.slots
        tokens.ends = []
        if B < kv_cache.GROUP_ROWS or self.decode.attends_at_once(B * width):
            return
        length_B = tokens.length[:B].copy()
        tokens.ends, now = kv_cache.split(length_B)
        if now - int(length_B.sum()) < kv_cache.GROUP_GAIN:
            return
        order_B = np.argsort(-length_B, kind="stable")
        ends, least = kv_cache.split(length_B[order_B])
        if now - least < kv_cache.GROUP_GAIN * max(1, 1 + len(ends) - len(tokens.ends)):
            return
        group_B = np.empty(B, dtype=np.int64)  # that each row belongs to, by its length
        group_B[order_B] = np.searchsorted(ends, np.arange(B), side="right")
        for group, (start, end) in enumerate(zip([0, *ends], ends)):
            wrong, missing = start + (group_B[start:end] != group).nonzero()[0], end + (group_B[end:] == group).nonzero()[0]
            for front, back in zip(wrong.tolist(), missing.tolist()):
                for source, target in ((front, spare), (back, front), (spare, back)):
                    self._move(source, target)
                self._sequences[front], self._sequences[back] = self._sequences[back], self._sequences[front]
                group_B[front], group_B[back] = group_B[back], group_B[front]
        tokens.ends = ends

    def _calibrated(self) -> AutoLength | LookupLength:
        """Time steps of several sizes on rows without sequences, before there are any.

        Each number of live rows gets a share of what is left of CALIBRATION_S. Slow engines are measured less, and where nothing is left,
        extrapolated; every real step corrects it.
        """
        lives = sorted({n for n in (1, 4, 16, 64, 256) if n < self.slots} | {self.slots})
        lengths, table, ends = (0, 1, 2, 3, 5, LONGEST), [], time.perf_counter() + CALIBRATION_S
        measured = [(K, K) for K in lengths] + [(LONGEST, 0)] * self.drafter.looks_up  # the last: to look in vain
        for i, live in enumerate(lives):
            rounds: list[list[float]] = []
            if self.decode.graphs is not None:
                began = time.perf_counter()
                for of in measured * TIMES:  # they are captured before they are measured
                    self._time_step(live, *of)
                ends += time.perf_counter() - began
            until = (now := time.perf_counter()) + (ends - now) / (len(lives) - i)
            while len(rounds) < CALIBRATION_ROUNDS and time.perf_counter() < until or not table and not rounds:
                order = measured if len(rounds) % 2 else measured[::-1]
                took = {of: self._time_step(live, *of) for of in order}
                rounds.append([took[of] for of in measured])
            if not rounds:
                table.append(table[-1] * (live / lives[len(table) - 1]))
                continue
            times_RM = np.array(rounds)
            of_round_R1 = times_RM.mean(1, keepdims=True)  # what else the machine does slows whole rounds
            times = np.median(times_RM / of_round_R1, axis=0) * np.median(of_round_R1)
            table.append(np.append(np.interp(range(LONGEST + 1), lengths, times[: len(lengths)]), times[len(lengths) :]))
        return (LookupLength if self.drafter.looks_up else AutoLength)(lives, np.array(table))

    def _time_step(self, live: int, draft_length: int, verified: int) -> float:
        """Seconds of a step on rows without sequences, as far on as they are usually, unless the rows are too short for it."""
        self.drafter.enter(0, live)
        self.limit_S[:live] = self.tokens.positions
        self.uniform_SPR[:live] = 0.0  # which accepts every proposal
        length = self.max_prompt_tokens // 2 + 1 + min(128, self.max_response_tokens // 4)
        for _ in range(2):  # the draft reads the whole prompt in the first
            self.tokens.length_S[:live] = min(length, self.tokens.positions - LONGEST - 1)
            self.tokens.refresh(live)
            began = self._clock()
            self._advance(live, draft_length, verified)
            seconds, length = self._clock() - began, length + draft_length + 1
        return seconds
