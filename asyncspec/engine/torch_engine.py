"""The embedded engine: continuous batching over a slot KV cache, autoregressive or speculative, in plain torch.

One `poll` is one engine step: admit waiting sequences into free slots (prefill, see prompts.py), choose a draft length,
propose, verify, commit, and return the samples that finished. The state of a live sequence lies in a row (rows.py). The
host waits for the device once a step.

Shape suffixes: S slots, P positions, B live rows, K draft length, J = K + 1, V vocabulary, D model dimension.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch

from asyncspec import clock
from asyncspec.engine import PROMPT_ROWS, kv_cache
from asyncspec.engine.backend import Target, backend_for
from asyncspec.engine.calibrate import Calibrator
from asyncspec.engine.decode import DecodeModel
from asyncspec.engine.graphs import Graphs
from asyncspec.engine.numpy_cache import packing
from asyncspec.engine.prompts import Kept, PromptReader
from asyncspec.engine.protocol import Completion, Partial, QueueingEngine, Sample
from asyncspec.engine.round_log import RoundLog
from asyncspec.engine.rows import Rows
from asyncspec.models.policy import PolicyShape, build, cast
from asyncspec.speculation import counter_rng
from asyncspec.speculation.draft_length import LONGEST, FixedLength, Observation
from asyncspec.speculation.drafter import Drafter, NoDrafter, Packed, Proposal, Slots
from asyncspec.speculation.verify import AS_IS, Sampling, sample, sampling_distribution, sampling_distributions, verify
from asyncspec.wire.facts import Rounds

PREFILL_TOKENS = 4096  # prompt tokens prefilled in one engine step; more would delay the live sequences


class TorchEngine(QueueingEngine):
    samples_as_asked = True

    def __init__(
        self,
        shape: PolicyShape,
        make_drafter: Callable[[Target], Drafter] | None = None,
        *,
        slots: int,
        max_prompt_tokens: int,
        max_response_tokens: int,
        draft_length: int | str = "auto",
        sampling: Sampling = AS_IS,
        kv_at_swap: str = "keep",
        kept: int = 0,
        routing: bool = False,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """
        Args:
            make_drafter: returns the drafter for a target; None: generate autoregressively.
            draft_length: k, tokens proposed per verification, or "auto": chosen for each step, see
                speculation/draft_length.py.
            kv_at_swap: what happens to the KV cache of live sequences at a weight swap: "keep" continues with it,
                "recompute" fills it again under the new weights.
            kept: of how many conversations the KV cache is kept between two turns. A turn of another one begins with
                prefilling all of it.
            routing: whether completions tell the experts of each token.
            dtype: dtype of the policy and the draft, float32 or bfloat16. Distributions and logprobs are always
                computed in float32.
        """
        super().__init__(shape, slots, max_prompt_tokens, max_response_tokens)
        self.kv_at_swap, self.sampling = kv_at_swap, sampling
        self.version = self.draft_version = -1
        auto = draft_length == "auto" and make_drafter is not None
        self._longest = longest = LONGEST if auto else 0 if make_drafter is None else int(draft_length)
        positions = max_prompt_tokens + max_response_tokens + longest + 1
        self.model = cast(build(shape, positions).to(device), dtype).requires_grad_(False)
        # One row more than slots, for exchanging two rows; after it the rows for prompts, and those that are kept.
        rows = slots + 1 + PROMPT_ROWS + kept
        self.backend, self.tokens = backend_for(device, dtype), Slots(rows, positions, device)
        self.decode = DecodeModel(self.model, shape, rows, positions, self.backend, routing)
        target = Target(self.model, self.tokens, sampling, self.backend)
        self.drafter = NoDrafter() if make_drafter is None else make_drafter(target)
        self.aux_layers = self.drafter.aux_layers
        # Chooses the draft length of each step. None: a calibration makes it before the first step.
        self.chooser = None if auto else FixedLength(longest)
        self.kept = Kept(slots + 1 + PROMPT_ROWS, kept)
        self._prompts = PromptReader(self.decode, target, self.drafter, slots + 1, self.kept)
        self._drafting = longest > 0
        self._keeping = True  # whether features are kept for the draft
        self.rows = Rows(shape, slots, self.tokens, longest, self._copy)
        self._row_S1 = torch.arange(slots, device=device).unsqueeze(1)
        self.log = RoundLog()
        self.launch_by(Graphs.of(slots, device))

    @property
    def live(self) -> int:
        return self.rows.live

    def parameters(self, kind: str) -> Mapping[str, torch.Tensor]:
        return dict((self.model if kind == "policy" else self.drafter.draft).named_parameters())

    def use(self, chooser) -> None:
        """Choose draft lengths with this chooser from now on, a `FixedLength` or one from a `Calibrator`. None:
        calibrate before the next step.
        """
        self.chooser = chooser
        self.drafter.learn = getattr(chooser, "learn", None)

    def cancel(self, request_id: int, number: int | None = None) -> int:
        """Drop the samples of a request, waiting and live, or the one with this number; return how many there were.
        They have no completions, and the next poll gives their slots to others. Call it between two polls.
        """
        before = len(self._queue)
        self._queue = deque(
            sample
            for sample in self._queue
            if sample.request.request_id != request_id or number not in (None, sample.number)
        )
        return before - len(self._queue) + len(self._retired(self.rows.of(request_id, number)))

    def progress(self, request_ids: Iterable[int]) -> list[Partial]:
        """Return the samples of these requests that have a slot, as far as they are. Call it between two polls."""
        rows = [row for request_id in request_ids for row in self.rows.of(request_id)]
        return self.rows.partials(rows) if rows else []

    def abandon(self) -> None:
        """Drop all sequences, waiting, live and kept; they have no completions."""
        self._queue.clear()
        self.rows.forget()
        self._prompts.forget()
        self.kept.clear()

    def forget(self, request_id: int) -> None:
        self.kept.drop(request_id)

    @torch.inference_mode()
    def poll(self) -> list[Completion]:
        """Do one engine step; return the samples that finished in it."""
        if self.chooser is None:
            self.use(Calibrator(self).chooser())
        began, waiting = self.backend.clock(), self.waiting
        done = self._admit()
        entered = self.backend.clock()
        if self.waiting < waiting:
            self.log.entered(waiting - self.waiting, entered - began)
        return done + (self._step() if self.live else [])

    def rounds(self) -> list[Rounds]:
        return self.log.drain()

    @torch.no_grad()
    def load_policy(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Load a policy's weights (names as in `named_parameters`); tokens sampled from now on carry `version`."""
        for name, parameter in self.model.named_parameters():
            parameter.copy_(tensors[name])
        self.decode.reload()
        self.drafter.reload()
        self.version = version
        self._prompts.forget()
        if self.kv_at_swap == "recompute":
            self.kept.clear()
        if self.kv_at_swap == "recompute" and self.live:
            self.rows.close()
            longest = int(self.tokens.length[: self.live].max())
            if self.aux_layers:
                self.drafter.enter(0, self.live)  # its features are of the old weights
            self._prompts.fill(
                0, self.tokens.token_SP[: self.live, : longest - 1], self.tokens.length_S[: self.live] - 1
            )
            self.rows.missed_S[: self.live] = False

    @torch.no_grad()
    def load_draft(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Load a draft's weights."""
        for name, parameter in self.drafter.draft.named_parameters():
            parameter.copy_(tensors[name])
        self.drafter.reload()
        self.draft_version = version

    def launch_by(self, graphs: Graphs | None) -> None:
        """From now on launch small passes of the policy and the draft as these graphs; None: kernel by kernel."""
        self.decode.launch_by(graphs)
        self.drafter.launch_by(graphs)

    def _admit(self) -> list[Completion]:
        """Give free slots to waiting sequences; return the samples that finished at their first token."""
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
        """Put samples with prefilled prompts into free rows, and sample their first tokens."""
        state, prompts, tokens, now = self.rows, self._prompts, self.tokens, clock.now()
        rows = state.assign([Sample(s.request, s.number, now) for s in new])
        sources = [prompts.row(s.request) for s in new]
        prompt_lengths = tokens.length[sources].tolist()
        limits = [length + s.request.max_response_tokens for length, s in zip(prompt_lengths, new)]
        row_B, source_B, limit_B = torch.tensor([rows, sources, limits], device=tokens.device).unbind()
        self._copy(sources, rows, longest := max(prompt_lengths))
        length_B, p_BV = tokens.length_S[source_B], prompts.first_token_distribution(source_B)
        tokens.token_SP[row_B, :longest] = tokens.token_SP[source_B, :longest]
        tokens.prompt_S[row_B], tokens.length_S[row_B] = length_B, length_B + 1
        state.limit_S[row_B] = limit_B
        seeds = self.drafter.seeds([s.request.seeds[s.number] for s in new])
        needed = max(limits) + self._longest  # a draft may extend past the limit
        uniform_BPR = torch.from_numpy(counter_rng.uniforms(seeds, needed)).to(tokens.device)
        state.uniform_SPR[row_B, :needed] = uniform_BPR
        state.counter_S3[rows] = state.reached_SJ[rows] = state.accepted_SJ[rows] = 0
        state.missed_S[rows] = [not self._keeping or s.request.follows in self.kept.missed for s in new]
        token_B = sample(p_BV, uniform_BPR[..., counter_rng.TARGET].gather(1, length_B.unsqueeze(1)).squeeze(1))
        tokens.token_SP[row_B, length_B] = token_B
        state.logprob_SP[row_B, length_B] = p_BV.gather(1, token_B.unsqueeze(1)).squeeze(1).log_()
        state.version_SP[row_B, length_B] = self.version
        tokens.refresh(len(state.samples))
        for row, s in zip(rows, new):
            if s.request.follows is not None:
                self.drafter.extended(row, self._prompts.held(s.request))
                self.kept.drop(s.request.follows)
        finished_B = state.stops_V[token_B] | (length_B + 1 >= limit_B)
        return self._retired([row for row, finished in zip(rows, finished_B.cpu().tolist()) if finished])

    def _step(self) -> list[Completion]:
        B, began = self.live, self.backend.clock()
        chooser, missed_S = self.chooser, self.rows.missed_S
        K = chooser.choose(B, missed_S, self.tokens.attended)
        self._drafting = K > 0
        self._keeping = K > 0 or chooser.keeps or not self.aux_layers
        if K:  # work put off by earlier steps, which is not timed
            self.drafter.catch_up()
        start = self.backend.clock() if chooser.watches else 0.0
        self.arrange(B, K + 1)
        # A step whose draft is far behind, or whose passes have no graphs yet, does not show the usual cost.
        usual, graphs = K == 0 or self.drafter.behind(B) <= LONGEST + 1, self.decode.graphs
        early = graphs and graphs.came_early
        span = self.tokens.attended(B) if chooser.watches else None
        kept_B, finished_B, found_B = self.advance(B, K)
        if not self._keeping:
            missed_S[:B] = True
        if chooser.watches:
            seconds = self.backend.clock() - start
            usual = usual and early == (graphs and graphs.came_early)
            chooser.observe(
                Observation(
                    live=B,
                    draft_length=K,
                    seconds=seconds,
                    kept_B=kept_B,
                    found_B=found_B,
                    usual=usual,
                    missed_B=missed_S[:B].copy(),
                    span=span,
                )
            )
        positions = float(self.tokens.length[:B].sum())
        finished = self._retired(finished_B.nonzero()[0].tolist())
        self.log.add(B, K, self.backend.clock() - began, B + float(kept_B.sum()), positions)
        return finished

    def advance(
        self, B: int, K: int, verified_B: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Propose, verify and commit for every live row.

        Args:
            verified_B: how many proposals of each row to verify, whatever they are; None: all that may be needed.

        Returns:
            On the host, for each row: how many proposals were accepted; whether it finished; and how many proposals
            were found or verified, None: K.
        """
        tokens, rows = self.tokens, self.rows
        length_B1 = tokens.length_S[:B].unsqueeze(1)
        token_BJ, position_BJ = tokens.token_SP[:B].gather(1, length_B1 - 1), length_B1 + tokens.index_P[: K + 1]
        draft_BJ, accept_BJ, target_BJ = rows.uniform_SPR[self._row_S1[:B], position_BJ].unbind(-1)
        proposal = found_B = needed_B = None
        if K:
            proposal, found_B = self._propose(B, K, draft_BJ[:, :K])
            found = K if found_B is None else int(found_B.max())
            verified = found if verified_B is None else int(verified_B.max())
            if verified < K:
                K, proposal = verified, proposal.first(verified)
                accept_BJ, target_BJ = accept_BJ[:, : K + 1], target_BJ[:, : K + 1]
        if K:
            token_BJ = torch.cat([token_BJ, proposal.draft_BK], 1)
            if self.backend.packs:
                needed_B = self.rows.needed(proposal.draft_BK, found_B) if verified_B is None else verified_B + 1
        p_BJV, observed = self._read(token_BJ, length_B1, needed_B)
        if K:
            token_BJ, count_B = verify(
                p_BJV, proposal.q_BKV, proposal.draft_BK, accept_BJ[:, :K], target_BJ, proposal.count_B
            )
        else:
            token_BJ, count_B = sample(p_BJV, target_BJ), None
        before_B = tokens.length[:B].copy()
        finished_B = rows.commit(token_BJ, p_BJV, count_B, self.version).cpu().numpy()
        tokens.refresh(B)
        if self._keeping:
            self.drafter.observe(0, *observed)
        rows.counter_S3[:B, 0] += 1
        if not K:
            return np.zeros(B, dtype=np.int64), finished_B, found_B
        kept_B, offered_B = count_B.cpu().numpy() - 1, K if found_B is None else found_B
        if needed_B is not None:
            # A row that accepted all proposals up to its end counts as accepting all: later ones were not verified.
            kept_B = np.where(kept_B >= needed_B, offered_B, kept_B)
        rows.count(before_B, kept_B, offered_B)
        if found_B is None:
            kept_B = np.minimum(kept_B, tokens.length[:B] - before_B - 1)
            found_B = None if needed_B is None else needed_B - 1
        return kept_B, finished_B, found_B

    def _propose(self, B: int, K: int, uniform_BK: torch.Tensor) -> tuple[Proposal, np.ndarray | None]:
        """Return proposals and, on the host, how many were found for each row; None: K."""
        proposal = self.drafter.propose(B, K, uniform_BK)
        return proposal, None if proposal.count_B is None else proposal.count_B.cpu().numpy()

    def _read(self, token_BJ, length_B1, needed_B: np.ndarray | None) -> tuple[torch.Tensor, tuple]:
        """Run the policy over each row's last token and its proposals.

        Args:
            needed_B: how many of the J tokens of each row are needed; None: all.

        Returns:
            p_BJV, the distribution after each token, and the arguments for `Drafter.observe`.
        """
        (B, J), packed, of_BJ = token_BJ.shape, None, None
        position_BJ = length_B1 + (self.tokens.index_P[:J] - 1)
        if needed_B is not None:
            L, packed, of_BJ = packing(needed_B, J)
            token_BJ, position_BJ = token_BJ[:, :L], position_BJ[:, :L]
        spans = self.tokens.spans(0, B, position_BJ.shape[1] - 1)
        aux_layers = self.aux_layers if self._keeping else ()
        hidden_BLD, features_BLD = self.decode.hidden_states(0, token_BJ, position_BJ, spans, aux_layers, packed)
        p_BJV = self._distributions(self.decode.logits(hidden_BLD), packed, position_BJ.shape[1])
        if of_BJ is not None:
            p_BJV = p_BJV.flatten(0, 1)[torch.from_numpy(of_BJ)]
        return p_BJV, (features_BLD, position_BJ, packed)

    def _distributions(self, logits: torch.Tensor, packed: Packed | None, L: int) -> torch.Tensor:
        """Turn the logits of L tokens of live rows, or of the T packed ones, into the distributions to sample from."""
        own_B = self.rows.samplings
        if not any(own_B):
            return sampling_distribution(logits, self.sampling)
        row_N = range(len(own_B)) if packed is None else (packed.at_T // L).tolist()
        return sampling_distributions(logits, [own_B[row] or self.sampling for row in row_N])

    def _retired(self, rows: list[int]) -> list[Completion]:
        """Return the completions of these rows and free the rows."""
        for row in rows:
            if (sample := self.rows.samples[row]) is not None and sample.request.keeps:
                self._keep(row, sample.request.request_id)
        done = self.rows.retire(rows, self.decode.routes)
        for row in rows:
            self.drafter.leave(row)
        return done

    def _keep(self, row: int, request_id: int) -> None:
        """Copy a row that has finished to a row that is kept."""
        tokens = self.tokens
        if (place := self.kept.add(request_id, bool(self.rows.missed_S[row]))) is None:
            return
        for tensor in (tokens.token_SP, tokens.length_S, tokens.prompt_S, tokens.length):
            tensor[place] = tensor[row]
        self._copy([row], [place], int(tokens.length[row]) - 1)

    def arrange(self, live: int, width: int) -> None:
        """Group the live rows for a pass over `width` tokens of each row, see `Rows.part`."""
        self.tokens.ends = []
        if live >= kv_cache.GROUP_ROWS and not self.decode.attends_at_once(live * width):
            self.rows.part(live)

    def _copy(self, sources: Sequence[int], rows: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of each source to its row, in the KV cache and in the drafter.

        While features are not kept, the drafter's rows are reset instead: a copy would be useless, and costs as much
        as a hundredth of a step.
        """
        self.decode.copy(sources, rows, length)
        if self._keeping:
            self.drafter.copy(sources, rows)
        else:
            for row in rows:
                self.drafter.enter(row, 1)
