"""The embedded engine: continuous batching over a slot KV cache, autoregressive or speculative, in plain torch.

One `poll` is one engine step: admit waiting sequences into free slots (prefill, see prompts.py), choose a draft length,
propose, verify, commit, hand out what finished. What belongs to a sequence meanwhile lies in a row (rows.py); the host
waits for the device once a step.

Shape suffixes: S slots, P positions, B live rows, K draft length, J = K + 1, V vocabulary, D model dimension.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from asyncspec import clock
from asyncspec.engine import kv_cache
from asyncspec.engine.decode import DecodeModel
from asyncspec.engine.graphs import TIMES, Graphs
from asyncspec.engine.numpy_cache import packing
from asyncspec.engine.prompts import PROMPT_ROWS, PromptReader
from asyncspec.engine.protocol import Completion, Request, check_request
from asyncspec.engine.rows import Rows, Sample
from asyncspec.models.policy import PolicyShape, build, cast
from asyncspec.speculation import counter_rng
from asyncspec.speculation.calibration import calibration
from asyncspec.speculation.draft_length import LONGEST, AutoLength, FixedLength
from asyncspec.speculation.drafter import Drafter, Slots
from asyncspec.speculation.lookup_length import LookupLength
from asyncspec.speculation.verify import sample, sampling_distribution, verify

PREFILL_TOKENS = 4096  # prompt tokens read in one engine step; more would hold up the sequences that are live
# a response's mean length, for all that is known before there are any: the first at most
USUAL_TOKENS, LIMIT_OVER_USUAL = 64, 16
# Positions by which rows are moved to learn what these cost: a share of the limit, but no fewer than the first and no
# more than the last.
FARTHER, LIMIT_OVER_FARTHER, FARTHEST = 96, 4, 256
CALIBRATION_S = 4.0  # at most
# of each number of live rows, whichever takes longer: what disturbs lasts for many short steps
CALIBRATION_ROUNDS, LEAST_CALIBRATION_S = 6, 0.4


class TorchEngine:
    def __init__(
        self,
        shape: PolicyShape,
        make_drafter: Callable[..., Drafter] | None = None,
        *,
        slots: int,
        max_prompt_tokens: int,
        max_response_tokens: int,
        draft_length: int | str = "auto",
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        kv_at_swap: str = "keep",
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """
        Args:
            make_drafter: callable(model, slots, settings) -> Drafter; None generates autoregressively.
            draft_length: k, tokens proposed per verification, or "auto": chosen for each step, see
                speculation/draft_length.py.
            kv_at_swap: what becomes of the KV cache of live sequences at a weight swap: "keep" goes on with it,
                "recompute" fills it again under the new weights.
            dtype: what policy and draft are computed in, float32 or bfloat16; distributions and logprobs always in
                float32.
        """
        self.slots, self.shape = slots, shape
        self.settings = (temperature, top_p, top_k)
        self.kv_at_swap, self.device = kv_at_swap, device
        self.max_prompt_tokens, self.max_response_tokens = max_prompt_tokens, max_response_tokens
        self.version = self.draft_version = -1
        self._longest = longest = (
            0 if make_drafter is None else LONGEST if draft_length == "auto" else int(draft_length)
        )
        positions = max_prompt_tokens + max_response_tokens + longest + 1
        self.model = cast(build(shape, positions).to(device), dtype).requires_grad_(False)
        # One row more than slots, for exchanging two; behind it rows for prompts.
        rows = slots + 1 + PROMPT_ROWS
        self.decode = DecodeModel(self.model, shape, rows, positions, device)
        self.tokens = Slots(rows, positions, device)
        self.drafter = None if make_drafter is None else make_drafter(self.model, self.tokens, self.settings)
        self.aux_layers = () if self.drafter is None else self.drafter.aux_layers
        # What steps cost beside one another: on processors their own time, which others that share them (the trainer,
        # say) do not lengthen.
        self._clock = time.thread_time if torch.device(device).type == "cpu" else time.perf_counter
        # auto: made by the calibration
        self.lengths = None if draft_length == "auto" and longest else FixedLength(longest)
        # Elsewhere rows are attended to at once or in groups, as the width of a step has it, or what that costs was not
        # tried.
        self._attended = self.tokens.attended if self.decode.packs else None
        self._prompts = PromptReader(self.decode, self.tokens, self.drafter, self.settings, slots + 1)
        self._drafting = longest > 0
        self._keeping = True  # features for the draft
        self.rows = Rows(shape, slots, self.tokens, longest, self._copy)
        self._row_S1 = torch.arange(slots, device=device).unsqueeze(1)
        self._queue: deque[Sample] = deque()
        self.entered = 0  # sequences, whose number salts their seeds where a drafter remembers
        self.laps: dict[str, float] | None = None  # seconds by part of a step, for benchmarks: a dict switches it on
        self.launch_by(Graphs.of(slots, device))

    @property
    def live(self) -> int:
        return self.rows.live

    @property
    def begun_tokens(self) -> int:
        """How many tokens the live sequences have emitted."""
        return self.rows.begun_tokens

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
        self._queue.extend(Sample(request, i) for i in range(len(request.seeds)))

    def abandon(self) -> None:
        """Forget all sequences, waiting and live; nothing comes of them."""
        self._queue.clear()
        self.rows.forget()
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
        if self.live:
            done += self._step()
        return done

    @torch.no_grad()
    def load_policy(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Take over a policy's weights (names as in `named_parameters`); tokens sampled from now on carry `version`."""
        for name, parameter in self.model.named_parameters():
            parameter.copy_(tensors[name])
        self.decode.reload()
        if self.drafter is not None:
            self.drafter.reload()
        self.version = version
        self._prompts.forget()
        if self.kv_at_swap == "recompute" and self.live:
            self.rows.close()
            longest = int(self.tokens.length[: self.live].max())
            if self.aux_layers:
                self.drafter.enter(0, self.live)  # what it has read is of the old weights
            self._prompts.fill(
                0, self.tokens.token_SP[: self.live, : longest - 1], self.tokens.length_S[: self.live] - 1
            )
            if self.drafter is not None:
                self.drafter.catch_up()
            self.rows.missed_S[: self.live] = False

    @torch.no_grad()
    def load_draft(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Take over a draft's weights."""
        for name, parameter in self.drafter.draft.named_parameters():
            parameter.copy_(tensors[name])
        self.drafter.reload()
        self.draft_version = version

    def launch_by(self, graphs: Graphs | None) -> None:
        """Launch passes over few tokens, the policy's and the draft's, by these from now on; None: kernel by kernel."""
        self.decode.launch_by(graphs)
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
        self.rows.close()
        return done

    def _enter(self, new: list[Sample]) -> list[Completion]:
        """Put samples whose prompts were read into free rows and sample their first tokens."""
        state, prompts, tokens, now = self.rows, self._prompts, self.tokens, clock.now()
        rows = state.assign([Sample(s.request, s.number, now) for s in new])
        sources = [prompts.row(s.request) for s in new]
        lengths = tokens.length[sources].tolist()
        limits = [length + s.request.max_response_tokens for length, s in zip(lengths, new)]
        row_B, source_B, limit_B = torch.tensor([rows, sources, limits], device=self.device).unbind()
        self._copy(sources, rows, longest := max(lengths))
        length_B, p_BV = tokens.length_S[source_B], prompts.first_token_distribution(source_B)
        tokens.token_SP[row_B, :longest] = tokens.token_SP[source_B, :longest]
        tokens.prompt_S[row_B], tokens.length_S[row_B] = length_B, length_B + 1
        state.limit_S[row_B] = limit_B
        seeds = [s.request.seeds[s.number] for s in new]
        if self.drafter is not None and self.drafter.remembers:
            # Proposals may be tokens that the same seed sampled before: verifying them takes numbers that never were
            # used.
            seeds = [hash((seed, self.entered + i)) for i, seed in enumerate(seeds)]
            self.entered += len(new)
        needed = max(limits) + self._longest  # a draft may lead beyond the limit
        state.uniform_SPR[row_B, :needed] = uniform_BPR = torch.from_numpy(counter_rng.uniforms(seeds, needed)).to(
            self.device
        )
        state.counter_S3[rows] = state.reached_SJ[rows] = state.accepted_SJ[rows] = 0
        state.missed_S[rows], state.run_S[rows] = not self._keeping, 0
        token_B = sample(p_BV, uniform_BPR[..., counter_rng.TARGET].gather(1, length_B.unsqueeze(1)).squeeze(1))
        tokens.token_SP[row_B, length_B] = token_B
        state.logprob_SP[row_B, length_B] = p_BV.gather(1, token_B.unsqueeze(1)).squeeze(1).log_()
        state.version_SP[row_B, length_B] = self.version
        tokens.refresh(len(state.samples))
        self._lap("admit")
        finished_B = state.stops_V[token_B] | (length_B + 1 >= limit_B)
        return self._retired([row for row, finished in zip(rows, finished_B.cpu().tolist()) if finished])

    def _step(self) -> list[Completion]:
        B = self.live
        if self.drafter is None:
            self._arrange(B, 1)
            _, finished_B, _ = self._advance(B, 0)
            return self._retired(finished_B.nonzero()[0].tolist())
        lengths, missed_S, run_B = self.lengths, self.rows.missed_S, self.rows.run_S[:B]
        K = lengths.choose(B, missed_S, self._attended)
        self._drafting = K > 0
        self._keeping = K > 0 or lengths.keeps or not self.aux_layers
        if K:  # not this step's own work
            self.drafter.catch_up()
        start = self._clock() if lengths.watches else 0.0
        self._arrange(B, K + 1)
        # A step that must first read much it has missed, or capture its passes, says nothing about what such a step
        # usually costs.
        usual, graphs = K == 0 or self.drafter.unread(B) <= LONGEST + 1, self.decode.graphs
        early = graphs and graphs.came_early
        span = self._attended(B) if lengths.watches and self._attended else None
        kept_B, finished_B, found_B = self._advance(B, K)
        if not self._keeping:
            missed_S[:B] = True
        if lengths.watches:
            usual = usual and early == (graphs and graphs.came_early)
            lengths.observe(B, K, self._clock() - start, kept_B, run_B.copy(), found_B, usual, missed_S[:B], span)
        run_B[:] = np.where(kept_B == K, run_B + K + 1, 0) if K else 0
        return self._retired(finished_B.nonzero()[0].tolist())

    def _advance(
        self, B: int, K: int, verified_B: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """One verification of every live row: accepted proposals and who finished, on the host; how many proposals were
        read, see `AutoLength.observe`.

        Args:
            verified_B: how many proposals of each row are verified, whatever they are; None: all that may be needed.
        """
        tokens, rows = self.tokens, self.rows
        length_B1 = tokens.length_S[:B].unsqueeze(1)
        token_B1 = tokens.token_SP[:B].gather(1, length_B1 - 1)
        position_BJ = length_B1 + tokens.index_P[: K + 1]  # written to
        draft_BJ, accept_BJ, target_BJ = rows.uniform_SPR[self._row_S1[:B], position_BJ].unbind(-1)
        proposal = found_B = None
        self._lap("bookkeeping")
        if K:
            proposal = self.drafter.propose(B, K, draft_BJ[:, :K])
            if proposal.count_B is not None:
                found_B = proposal.count_B.cpu().numpy()
            read = int(verified_B.max()) if verified_B is not None else K if found_B is None else int(found_B.max())
            if read < K:
                K, proposal = read, proposal.first(read)
                accept_BJ, target_BJ, position_BJ = (
                    accept_BJ[:, : K + 1],
                    target_BJ[:, : K + 1],
                    position_BJ[:, : K + 1],
                )
        self._lap("draft")
        if K:
            token_B1 = torch.cat([token_B1, proposal.draft_BK], 1)
        read_BL, needed_B, packed, of_BJ = position_BJ - 1, None, None, None
        if K and self.decode.packs:
            needed_B = self._needed(proposal.draft_BK, found_B) if verified_B is None else verified_B + 1
            if needed_B is not None:
                L, packed, of_BJ = packing(needed_B, K + 1)
                token_B1, read_BL = token_B1[:, :L], read_BL[:, :L]
        spans, layers = tokens.spans(0, B, read_BL.shape[1] - 1), self.aux_layers if self._keeping else ()
        hidden_BLD, features_BLD = self.decode.hidden_states(0, token_B1, read_BL, spans, layers, packed)
        logits_BLV = self.decode.logits(hidden_BLD)
        self._lap("target")
        p_BJV = sampling_distribution(logits_BLV, *self.settings)
        if of_BJ is not None:
            p_BJV = p_BJV.flatten(0, 1)[torch.from_numpy(of_BJ)]
        if K:
            token_BJ, count_B = verify(
                p_BJV, proposal.q_BKV, proposal.draft_BK, accept_BJ[:, :K], target_BJ, proposal.count_B
            )
        else:
            token_BJ, count_B = sample(p_BJV, target_BJ), None
        self._lap("verify and sample")
        before_B = tokens.length[:B].copy()
        finished_B = rows.commit(token_BJ, p_BJV, count_B, self.version).cpu().numpy()
        tokens.refresh(B)
        if self.drafter is not None and self._keeping:
            self.drafter.observe(0, features_BLD, read_BL, packed)
        rows.counter_S3[:B, 0] += 1
        kept_B = np.zeros(B, dtype=np.int64)
        if K:
            kept_B, offered_B = count_B.cpu().numpy() - 1, K if found_B is None else found_B
            if needed_B is not None:
                # A row that has kept its end has kept all that was offered: what would come behind was never read.
                kept_B = np.where(kept_B >= needed_B, offered_B, kept_B)
            rows.count(before_B, kept_B, offered_B)
            if found_B is None:
                kept_B, found_B = (
                    np.minimum(kept_B, tokens.length[:B] - before_B - 1),
                    None if needed_B is None else needed_B - 1,
                )
        return kept_B, finished_B, found_B

    def _needed(self, draft_BK: torch.Tensor, found_B: np.ndarray | None) -> np.ndarray | None:
        """How many tokens of each row are to be read, int64 [B]: its last one, and its proposals before the first that
        would end it, by being a stop token or by the limit. What would come behind that never does. None: all.
        """
        B, K = draft_BK.shape
        needed_B = self.rows.limit_S.numpy()[:B] - self.tokens.length[:B]
        stop_BK = self.rows.stops_V.numpy()[draft_BK.numpy()]
        if stop_BK.any():
            needed_B = np.minimum(needed_B, np.where(stop_BK.any(1), stop_BK.argmax(1), K) + 1)
        elif found_B is None and needed_B.min() > K:
            return None
        return np.minimum(needed_B, K + 1 if found_B is None else found_B + 1)

    def _retired(self, rows: list[int]) -> list[Completion]:
        """Hand out what finished in these rows."""
        done = self.rows.retire(rows)
        if self.drafter is not None:
            for row in rows:
                self.drafter.leave(row)
        self._lap("bookkeeping")
        return done

    def _arrange(self, live: int, width: int) -> None:
        """Before a pass over so many tokens of each row: see `Rows.part`."""
        self.tokens.ends = []
        if live >= kv_cache.GROUP_ROWS and not self.decode.attends_at_once(live * width):
            self.rows.part(live)

    def _copy(self, sources: Sequence[int], rows: Sequence[int], length: int) -> None:
        """Fill these rows of the KV cache, and the drafter's, with so many positions of their sources.

        While features are not kept those there are would not serve: a copy costs as much as a hundredth of a step.
        """
        self.decode.cache.copy(sources, rows, length)
        if self.drafter is None:
            return
        if self._keeping:
            self.drafter.copy(sources, rows)
        else:
            for row in rows:
                self.drafter.enter(row, 1)

    def _calibrated(self) -> AutoLength | LookupLength:
        """Time steps of several sizes on rows without sequences, before there are any.

        Each number of live rows gets at most a share of what is left of CALIBRATION_S. Slow engines are measured less,
        and where nothing is left, extrapolated; every real step corrects it.
        """
        lives = sorted({n for n in (1, 4, 16, 64, 256) if n < self.slots} | {self.slots})
        # All that are considered but 4, which lies between its neighbours.
        lengths, table, read, spans, ends = (
            (0, 1, 2, 3, 5, 7, 10, LONGEST),
            [],
            [],
            [],
            time.perf_counter() + CALIBRATION_S,
        )
        farther = min(max(FARTHER, self.max_response_tokens // LIMIT_OVER_FARTHER), FARTHEST)
        for i, live in enumerate(lives):
            last = 0 if self.drafter.looks_up else LONGEST if self.decode.packs else LONGEST // 2
            usually = [self._usually_read(live, K) for K in lengths]
            measured = [*zip(lengths, usually), (LONGEST, np.full(live, last))]
            read.append([*np.interp(range(LONGEST + 1), lengths, [read_B.mean() for read_B in usually]), last])
            if self._attended:
                measured.append((LONGEST, usually[-1], farther))
                spans.append([self._place(live, far) for far in (farther, 0)])
            rounds: list[list[float]] = []
            if self.decode.graphs is not None:
                began = time.perf_counter()
                for of in measured * TIMES:  # they are captured before they are measured
                    self._time_step(live, *of)
                ends += time.perf_counter() - began
            began = time.perf_counter()
            until, least = began + (ends - began) / (len(lives) - i), began + LEAST_CALIBRATION_S
            while (
                (now := time.perf_counter()) < until
                and (len(rounds) < CALIBRATION_ROUNDS or now < least)
                or not table
                and not rounds
            ):
                way = slice(None, None, 1 if len(rounds) % 2 else -1)  # there and back
                rounds.append([self._time_step(live, *of) for of in measured[way]][way])
            if not rounds:
                table.append(table[-1] * (live / lives[len(table) - 1]))
                continue
            table.append(calibration(lengths, np.array(rounds)))
        times = np.array(table)
        seconds, far = times[:, : LONGEST + 2], np.column_stack([times[:, -1], spans]) if self._attended else None
        if self.drafter.looks_up:
            return LookupLength(lives, seconds, self.decode.packs, far)
        return AutoLength(lives, seconds, np.array(read), far)

    def _usual_lengths(self, count: int) -> np.ndarray:
        """Of so many responses, descending: exponentially distributed, their mean far below the limit."""
        return -min(USUAL_TOKENS, self.max_response_tokens / LIMIT_OVER_USUAL) * np.log(
            (np.arange(count) + 0.5) / count
        )

    def _usually_read(self, live: int, draft_length: int) -> np.ndarray:
        """How many of so many proposals are read, int64 [live]: where only some may be, those before the ends of rows,
        the fewest of the first.
        """
        if self.drafter.looks_up or not self.decode.packs:
            return np.full(live, draft_length)
        read_BN = np.minimum(draft_length, self._usual_lengths(16 * live)[::-1]).reshape(live, 16)
        return read_BN.mean(1).round().astype(int)

    def _place(self, live: int, farther: int, before: int = 0) -> float:
        """Put rows without sequences so many positions farther on than usual, less those before; returns what
        `Slots.attended` does once they are parted.
        """
        # the longest first: they need no exchange
        length_B = self.max_prompt_tokens // 8 + 2 + torch.from_numpy(self._usual_lengths(live)).long()
        self.tokens.length_S[:live] = (length_B + farther - before).clamp(2, self.tokens.positions - LONGEST - 1)
        self.tokens.refresh(live)
        self._arrange(live, 1)
        return self.tokens.attended(live)

    def _time_step(self, live: int, draft_length: int, verified_B: np.ndarray, farther: int = 0) -> float:
        """Seconds of a step on rows without sequences."""
        self.drafter.enter(0, live)
        self.rows.limit_S[:live] = self.tokens.positions
        self.rows.uniform_SPR[:live] = 0.0  # which accepts every proposal
        # the draft reads in the first step all, in the second what is usually emitted
        for before in (1 + draft_length * 2 // 3, 0):
            self._place(live, farther, before)
            began = self._clock()
            self._arrange(live, draft_length + 1)
            self._advance(live, draft_length, verified_B)
            seconds = self._clock() - began
        return seconds
