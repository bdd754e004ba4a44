"""The rows of an engine's batch: the state of each live sequence, and how sequences enter, grow, move and leave.

In a step live sequences occupy rows 0..live-1: a row that becomes free goes to a waiting sequence, or else to the last
live one. All per-token state lies in tensors; Python touches a sequence only when it enters and when it leaves.

Shape suffixes: S rows, P positions, B live rows, J positions of a verification, R streams of random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from asyncspec.engine import kv_cache
from asyncspec.engine.protocol import Completion, Partial, Sample, at_least
from asyncspec.engine.routes import Routes
from asyncspec.models.shape import PolicyShape
from asyncspec.speculation import counter_rng
from asyncspec.speculation.drafter import Slots
from asyncspec.speculation.verify import Sampling


class Rows:
    def __init__(
        self,
        shape: PolicyShape,
        slots: int,
        tokens: Slots,
        longest: int,
        copy: Callable[[Sequence[int], Sequence[int], int], None],
    ) -> None:
        """
        Args:
            tokens: tokens of all rows: the slots, then one for exchanging two rows, then those for prompts.
            longest: the longest draft length.
            copy: callable(sources, rows, positions) that copies what others keep for rows.
        """
        self.slots, self.tokens, self._copy, device = slots, tokens, copy, tokens.device

        self.eos_token_ids = shape.eos_token_ids
        self.stops_V = torch.zeros(shape.vocab_size, dtype=torch.bool, device=device)
        self.stops_V[list(shape.eos_token_ids)] = True
        # All tensors and arrays that belong to rows, and move with them.
        self._by_row = [tokens.token_SP, tokens.length_S, tokens.prompt_S, tokens.length]

        def on_device(*size: int, dtype=torch.int64) -> torch.Tensor:
            self._by_row.append(torch.zeros(slots + 1, *size, dtype=dtype, device=device))
            return self._by_row[-1]

        def on_host(*size: int, dtype=np.int64) -> np.ndarray:
            self._by_row.append(np.zeros((slots + 1, *size), dtype=dtype))
            return self._by_row[-1]

        self.limit_S = on_device()
        # Uniform random numbers for every position of a row, made when its sequence enters.
        self.uniform_SPR = on_device(tokens.positions, counter_rng.STREAMS, dtype=torch.float32)
        self.logprob_SP = on_device(tokens.positions, dtype=torch.float32)
        self.version_SP = on_device(tokens.positions, dtype=torch.int32)
        self.missed_S = on_host(dtype=bool)  # rows for which not all features were kept for the draft
        self.counter_S3 = on_host(3)  # verifications, proposed, accepted
        # How many verifications reached j proposals, and how many accepted j.
        self.reached_SJ, self.accepted_SJ = on_host(longest + 1), on_host(longest + 1)
        self.samples: list[Sample | None] = []  # by row; None: the row is free
        self._free: list[int] = []  # rows whose sequences finished in the last step

    @property
    def live(self) -> int:
        return len(self.samples) - len(self._free)

    @property
    def begun_tokens(self) -> int:
        """The number of tokens that the live sequences have emitted."""
        rows = [row for row, sample in enumerate(self.samples) if sample is not None]
        return int((self.tokens.length_S[rows] - self.tokens.prompt_S[rows]).sum())

    @property
    def begun_verifications(self) -> int:
        """The number of verifications of the live sequences."""
        rows = [row for row, sample in enumerate(self.samples) if sample is not None]
        return int(self.counter_S3[rows, 0].sum())

    def forget(self) -> None:
        self.samples.clear()
        self._free.clear()

    @property
    def samplings(self) -> list[Sampling | None]:
        """How each live sequence is sampled, by row; None: as the engine does. Call it when no row is free."""
        return [sample.request.sampling for sample in self.samples if sample is not None]

    def of(self, request_id: int, number: int | None = None) -> list[int]:
        """Return the rows of a request's samples, or of the one with this number."""
        return [
            row
            for row, sample in enumerate(self.samples)
            if sample is not None and sample.request.request_id == request_id and number in (None, sample.number)
        ]

    def partials(self, rows: Sequence[int]) -> list[Partial]:
        """Return what these rows have so far."""
        token_BP, logprob_BP = self.tokens.token_SP[rows].cpu(), self.logprob_SP[rows].cpu()
        found = []
        for row, token_P, logprob_P in zip(rows, token_BP, logprob_BP):
            sample = self.samples[row]
            start, end = len(sample.request.prompt), int(self.tokens.length[row])
            found.append(
                Partial(sample.request.request_id, sample.number, token_P[start:end].int(), logprob_P[start:end])
            )
        return found

    def assign(self, new: Sequence[Sample]) -> list[int]:
        """Assign rows to new samples, free rows first; return the rows."""
        rows, self._free = sorted(self._free)[: len(new)], sorted(self._free)[len(new) :]
        rows += range(len(self.samples), len(self.samples) + len(new) - len(rows))
        self.samples += [None] * (rows[-1] + 1 - len(self.samples))
        for row, sample in zip(rows, new):
            self.samples[row] = sample
        return rows

    def needed(self, draft_BK: torch.Tensor, found_B: np.ndarray | None) -> np.ndarray | None:
        """Return how many tokens of each row the policy must run over, int64 [B]; None: all.

        These are the row's last token, and its proposals before the first one that would end the row, as a stop token
        or at the limit. Nothing is sampled after that one.
        """
        B, K = draft_BK.shape
        needed_B = self.limit_S.numpy()[:B] - self.tokens.length[:B]
        stop_BK = self.stops_V.numpy()[draft_BK.numpy()]
        if stop_BK.any():
            needed_B = np.minimum(needed_B, np.where(stop_BK.any(1), stop_BK.argmax(1), K) + 1)
        elif found_B is None and needed_B.min() > K:
            return None
        return np.minimum(needed_B, K + 1 if found_B is None else found_B + 1)

    def commit(self, token_BJ, p_BJV, count_B, version: int) -> torch.Tensor:
        """Append the first count_B tokens of each row, cut at the stop token and the length limit.

        Args:
            p_BJV: the distributions they were sampled from.
            count_B: int64; None: each row has one token.

        Returns:
            finished_B, bool.
        """
        B, J = token_BJ.shape
        rows, tokens = slice(0, B), self.tokens
        length_B, limit_B = tokens.length_S[rows], self.limit_S[rows]
        position_BJ = length_B.unsqueeze(1) + tokens.index_P[:J]
        # Entries past the count mean nothing. They lie past the row's length, and the next tokens overwrite them.
        tokens.token_SP[rows].scatter_(1, position_BJ, token_BJ)
        self.logprob_SP[rows].scatter_(1, position_BJ, p_BJV.gather(-1, token_BJ.unsqueeze(-1)).squeeze(-1).log_())
        self.version_SP[rows].scatter_(1, position_BJ, version)
        stop_BJ = self.stops_V[token_BJ]
        if count_B is None:
            stopped_B, length_B = stop_BJ[:, 0], length_B + 1
        else:
            stop_BJ &= tokens.index_P[:J] < count_B.unsqueeze(1)
            first_stop_B = torch.where(stop_BJ, tokens.index_P[:J], J).amin(1)
            count_B = torch.minimum(torch.minimum(count_B, first_stop_B + 1), limit_B - length_B)
            stopped_B, length_B = first_stop_B < count_B, length_B + count_B
        tokens.length_S[rows] = length_B
        return stopped_B | (length_B >= limit_B)

    def count(self, before_B: np.ndarray, kept_B: np.ndarray, offered: int | np.ndarray) -> None:
        """Count one verification of each row.

        Args:
            before_B: int64, lengths before it.
            kept_B: int64, accepted proposals.
            offered: proposals that were verified.
        """
        B = len(before_B)
        counter_B3, emitted_B, row_B = self.counter_S3[:B], self.tokens.length[:B] - before_B, np.arange(B)
        accepted_B = np.minimum(kept_B, emitted_B)
        counter_B3[:, 1] += offered
        counter_B3[:, 2] += accepted_B
        self.reached_SJ[row_B, np.minimum(offered, emitted_B)] += 1
        self.accepted_SJ[row_B, accepted_B] += 1

    def retire(self, rows: Sequence[int], routes: Routes | None = None) -> list[Completion]:
        """Return the completions of these rows, with the experts that `routes` has, and free the rows."""
        held, at = (self.tokens.token_SP, self.logprob_SP, self.version_SP), rows
        if rows and self.tokens.device.type != "cpu":
            # fetch the rows together, so that the host does not wait for each one
            held, at = [tensor[rows].cpu() for tensor in held], range(len(rows))
        return [self._completion(routes, row, *(tensor[i] for tensor in held)) for row, i in zip(rows, at)]

    def _completion(
        self,
        routes: Routes | None,
        row: int,
        token_P: torch.Tensor,
        logprob_P: torch.Tensor,
        version_P: torch.Tensor,
    ) -> Completion:
        sample = self.samples[row]
        start, end = len(sample.request.prompt), int(self.tokens.length[row])
        verifications, proposed, accepted = self.counter_S3[row].tolist()
        response = token_P[start:end].int()
        self.samples[row] = None
        self._free.append(row)
        return Completion(
            request_id=sample.request.request_id,
            sample=sample.number,
            tokens=response,
            logprobs=logprob_P[start:end].clone(),
            versions=version_P[start:end].clone(),
            truncated=int(response[-1]) not in self.eos_token_ids,
            verifications=verifications,
            proposed=proposed,
            accepted=accepted,
            started_at=sample.started_at,
            reached_at=at_least(self.reached_SJ[row]),
            accepted_at=at_least(self.accepted_SJ[row]),
            experts=None if routes is None else routes.of(row, end - 1),
        )

    def close(self) -> None:
        """Move the last sequences into the rows that are still free."""
        for row in sorted(self._free, reverse=True):
            last = self.samples.pop()
            if row < len(self.samples):
                self.move(len(self.samples), row)
                self.samples[row] = last
        self._free.clear()

    def move(self, source: int, target: int) -> None:
        """Copy a row with everything that belongs to it, except its entry in `samples`."""
        tokens = self.tokens
        self._copy([source], [target], int(tokens.length[source]))
        for tensor in self._by_row:
            tensor[target] = tensor[source]

    def part(self, B: int) -> None:
        """Split rows 0..B-1 into groups of similar length for attention. Exchange rows first where that saves much."""
        tokens, spare = self.tokens, self.slots
        length_B = tokens.length[:B].copy()
        tokens.ends, now = kv_cache.split(length_B)
        if now - int(length_B.sum()) < kv_cache.GROUP_GAIN:
            return
        order_B = np.argsort(-length_B, kind="stable")
        ends, least = kv_cache.split(length_B[order_B])
        if now - least < kv_cache.GROUP_GAIN * max(1, 1 + len(ends) - len(tokens.ends)):
            return
        group_B = np.empty(B, dtype=np.int64)  # the group to which each row belongs by its length
        group_B[order_B] = np.searchsorted(ends, np.arange(B), side="right")
        for group, (start, end) in enumerate(zip([0, *ends], ends)):
            wrong = start + (group_B[start:end] != group).nonzero()[0]
            missing = end + (group_B[end:] == group).nonzero()[0]
            for front, back in zip(wrong.tolist(), missing.tolist()):
                for source, target in ((front, spare), (back, front), (spare, back)):
                    self.move(source, target)
                self.samples[front], self.samples[back] = self.samples[back], self.samples[front]
                group_B[front], group_B[back] = group_B[back], group_B[front]
        tokens.ends = ends
