"""Prefill: each prompt once for all its samples, before these get their slots.

Prompts are prefilled into cache rows of their own. A sample that gets a slot copies from there. Of a conversation that
goes on, only what is new is prefilled, if the row of its last turn was kept:

    the row that was kept      p p p p a a a e
    the request that follows   p p p p a a a e | t t t        the t, and the e, whose keys nobody has needed yet

Shape suffixes: U distinct prompts, L positions of a pass, V vocabulary, D model dimension, E draft features.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np
import torch

from asyncspec.engine import PROMPT_ROWS
from asyncspec.engine.backend import Target
from asyncspec.engine.decode import DecodeModel
from asyncspec.engine.numpy_cache import packing
from asyncspec.engine.protocol import Request
from asyncspec.speculation.drafter import Drafter
from asyncspec.speculation.verify import sampling_distributions

PREFILL_CHUNK = 512  # positions prefilled in one pass
READ_AHEAD_TOKENS = 512  # most prompt tokens that are prefilled together; a single prompt may have more
GRAPH_STEP = 16  # with CUDA graphs, prompts are padded to multiples of this many positions
ATTENDED_TOKEN = 512  # attending to this many positions costs as much as computing one token


class Kept:
    """The rows of conversations between two turns: of the last ones that ended a turn, as many as there are rows."""

    def __init__(self, first_row: int, count: int) -> None:
        self._free = list(range(first_row, first_row + count))
        self._rows: dict[int, int] = {}  # by the id of the request; the oldest first
        self.missed: set[int] = set()  # requests for which not all features were kept for the draft

    def row(self, request_id: int | None) -> int | None:
        """Return the row of a request; None: it has none, or no longer."""
        return None if request_id is None else self._rows.get(request_id)

    def add(self, request_id: int, missed: bool) -> int | None:
        """Give a request a row, if need be that of the oldest; return the row. None: there are no rows."""
        if not self._free and self._rows:
            self.drop(next(iter(self._rows)))
        if not self._free:
            return None
        row = self._rows[request_id] = self._free.pop()
        if missed:
            self.missed.add(request_id)
        return row

    def drop(self, request_id: int | None) -> None:
        if request_id in self._rows:
            self._free.append(self._rows.pop(request_id))
            self.missed.discard(request_id)

    def clear(self) -> None:
        for request_id in list(self._rows):
            self.drop(request_id)


class PromptReader:
    def __init__(self, decode: DecodeModel, target: Target, drafter: Drafter, first_row: int, kept: Kept) -> None:
        """
        Args:
            first_row: the first of the `PROMPT_ROWS` cache rows for prompts.
        """
        self.decode, self.drafter, self.kept = decode, drafter, kept
        _, self.tokens, self.sampling, self.backend = target
        self.first_row, self.aux_layers = first_row, drafter.aux_layers
        self.forget()

    def forget(self) -> None:
        """Discard all prefilled prompts."""
        self._index: dict[Hashable, int] = {}  # `Request.read_as` -> index of its prompt
        self._known: dict[int, int] = {}  # request -> what `held` has found
        self._p_UV = None  # distribution of each prompt's first response token

    def has(self, request: Request) -> bool:
        return request.read_as in self._index

    def row(self, request: Request) -> int:
        """Return the cache row of a prefilled prompt."""
        return self.first_row + self._index[request.read_as]

    def first_token_distribution(self, row_B: torch.Tensor) -> torch.Tensor:
        """Return the distributions of the first response token, [B, V], of the prompts in these rows."""
        return self._p_UV[row_B - self.first_row]

    def held(self, request: Request) -> int:
        """Return how many of a prompt's positions are in the cache, in the row of the request before it: as far as that
        has the same tokens, but for the last, whose keys nobody has needed yet.
        """
        row = self.kept.row(request.follows)
        return 0 if row is None else self._held(request, row)

    def _held(self, request: Request, row: int) -> int:
        if (known := self._known.get(request.request_id)) is None:
            size = min(int(self.tokens.length[row]), len(request.prompt)) - 1
            same_P = self.tokens.token_SP[row, :size].cpu().numpy() == np.asarray(request.prompt[:size])
            known = self._known[request.request_id] = size if same_P.all() else int(same_P.argmin())
        return known

    def read(self, waiting: Iterable[Request], drafting: bool) -> int:
        """Prefill the next prompts, those with similarly many new tokens together.

        Args:
            waiting: the requests of the waiting samples, in order, one entry per sample.
            drafting: whether the drafter prefills the prompts too, in a pass of its own.

        Returns:
            The number of new tokens in these prompts, plus those of the next prompt if it did not fit.
        """
        ahead: dict[Hashable, tuple[int, Request]] = {}
        total = 0
        for request in waiting:
            if request.read_as not in ahead:
                new = len(request.prompt) - self.held(request)
                total += new
                if ahead and (len(ahead) == PROMPT_ROWS or total > READ_AHEAD_TOKENS):
                    break
                ahead[request.read_as] = new, request
        chosen = sorted(ahead.values(), key=lambda each: -each[0])
        requests, lengths = [request for _, request in chosen], [new for new, _ in chosen]
        logits, read = [], 0
        for count in rows_of_passes(lengths, self.backend.packs, self.backend.pass_tokens):
            logits.append(self._read_alike(self.first_row + read, requests[read : read + count], drafting))
            read += count
        self._p_UV = sampling_distributions(torch.cat(logits), [r.sampling or self.sampling for r in requests])
        self._index = {request.read_as: i for i, request in enumerate(requests)}
        self._known = {r.request_id: self._known[r.request_id] for r in requests if r.request_id in self._known}
        return total

    def _read_alike(self, first_row: int, requests: Sequence[Request], drafting: bool) -> torch.Tensor:
        """Prefill prompts in one pass, that with the most new tokens first; return the logits after each, [U, V]."""
        tokens, rows, prompts = self.tokens, slice(first_row, first_row + len(requests)), [r.prompt for r in requests]
        starts = [self.held(request) for request in requests]
        width, longest = len(prompts[0]) - starts[0], max(map(len, prompts))
        if self.decode.graphs is not None:
            width = min(-(-width // GRAPH_STEP) * GRAPH_STEP, tokens.positions)

        def padded(rows_of_tokens, size: int) -> torch.Tensor:
            return torch.tensor([[*row, *[0] * (size - len(row))] for row in rows_of_tokens], device=tokens.device)

        start_U, length_U = torch.tensor([starts, [len(p) for p in prompts]], device=tokens.device).unbind()
        tokens.token_SP[rows, :longest] = padded(prompts, longest)
        tokens.length_S[rows] = tokens.prompt_S[rows] = length_U
        tokens.refresh(rows.stop)
        self.drafter.enter(first_row, len(prompts))
        for row, (request, start) in enumerate(zip(requests, starts), first_row):
            if start:
                source = self.kept.row(request.follows)
                self.decode.copy([source], [row], start)
                self.drafter.copy([source], [row])
        new_UL = padded([prompt[start:] for prompt, start in zip(prompts, starts)], width)
        logits_UV = self.fill(first_row, new_UL, length_U - start_U, True, start_U if any(starts) else None)
        if drafting:
            self.drafter.prefill(first_row, len(prompts))
        return logits_UV

    def fill(
        self, first_row: int, token_UL, length_U, wanted: bool = False, start_U: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Fill the cache with the first length_U tokens of each row, in chunks.

        Args:
            start_U: the position of each row's first token; None: 0.

        Returns:
            The logits after the last of these tokens in each row, [U, V], if `wanted`.
        """
        hidden_UD, last_position, latest = None, self.tokens.positions - 1, 0 if start_U is None else int(start_U.max())
        for start in range(0, token_UL.shape[1], PREFILL_CHUNK):
            chunk_UL = token_UL[:, start : start + PREFILL_CHUNK]
            U, L = chunk_UL.shape
            position_UL = self.tokens.index_P[start : start + L].expand(U, -1)
            if start_U is not None:  # padding may reach past the end, where nothing is read
                position_UL = (position_UL + start_U.unsqueeze(1)).clamp_(max=last_position)
            last_U, packed = (length_U - 1 - start).clamp(0, L - 1), None
            index_U = torch.arange(U, device=last_U.device) * L + last_U
            if self.backend.packs:
                _, packed, of_UL = packing(last_U.numpy() + 1, L)
                if packed is not None:
                    index_U = torch.from_numpy(of_UL[np.arange(U), last_U])
            hidden_ULD, features_ULD = self.decode.hidden_states(
                first_row,
                chunk_UL,
                position_UL,
                [(U, min(latest + start + L, last_position + 1))],
                self.aux_layers,
                packed,
            )
            self.drafter.observe(first_row, features_ULD, position_UL, packed)
            if wanted:
                here_UD = hidden_ULD.flatten(0, 1)[index_U]
                hidden_UD = here_UD if not start else torch.where((length_U > start).unsqueeze(1), here_UD, hidden_UD)
        return self.decode.logits(hidden_UD) if wanted else None


def rows_of_passes(lengths: Sequence[int], packs: bool, pass_tokens: int) -> list[int]:
    """Return how many rows to prefill in each pass. A pass takes rows until their padding costs more than another pass.

    Args:
        lengths: the rows' lengths, the longest first.
        packs: whether padding is only attended to, not computed.
        pass_tokens: what another pass costs, in tokens.
    """
    counts, longest, padding = [], 0, 0
    for length in lengths:
        padding += longest - length
        if not counts or padding * (longest / ATTENDED_TOKEN if packs else 1) > pass_tokens:
            counts.append(0)
            longest, padding = length, 0
        counts[-1] += 1
    return counts
