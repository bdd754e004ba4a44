"""Prefill: each prompt once for all its samples, before these get their slots.

Prompts are prefilled into cache rows of their own. A sample that gets a slot copies from there.

Shape suffixes: U distinct prompts, L positions of a pass, V vocabulary, D model dimension, E draft features.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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


class PromptReader:
    def __init__(self, decode: DecodeModel, target: Target, drafter: Drafter, first_row: int) -> None:
        """
        Args:
            first_row: the first of the `PROMPT_ROWS` cache rows for prompts.
        """
        self.decode, self.drafter = decode, drafter
        _, self.tokens, self.sampling, self.backend = target
        self.first_row, self.aux_layers = first_row, drafter.aux_layers
        self.forget()

    def forget(self) -> None:
        """Discard all prefilled prompts."""
        self._index: dict[int, int] = {}  # id of a request -> index of its prompt
        self._requests: tuple[Request, ...] = ()  # kept alive, so that no other request gets one of their ids
        self._p_UV = None  # distribution of each prompt's first response token

    def has(self, request: Request) -> bool:
        return id(request) in self._index

    def row(self, request: Request) -> int:
        """Return the cache row of a prefilled prompt."""
        return self.first_row + self._index[id(request)]

    def first_token_distribution(self, row_B: torch.Tensor) -> torch.Tensor:
        """Return the distributions of the first response token, [B, V], of the prompts in these rows."""
        return self._p_UV[row_B - self.first_row]

    def read(self, waiting: Iterable[Request], drafting: bool) -> int:
        """Prefill the next prompts, those of similar length together.

        Args:
            waiting: the requests of the waiting samples, in order, one entry per sample.
            drafting: whether the drafter prefills the prompts too, in a pass of its own.

        Returns:
            The number of tokens in these prompts, plus those of the next prompt if it did not fit.
        """
        ahead: dict[int, Request] = {}
        total = 0
        for request in waiting:
            if id(request) not in ahead:
                total += len(request.prompt)
                if ahead and (len(ahead) == PROMPT_ROWS or total > READ_AHEAD_TOKENS):
                    break
                ahead[id(request)] = request
        requests = sorted(ahead.values(), key=lambda request: -len(request.prompt))
        logits, read = [], 0
        lengths = [len(request.prompt) for request in requests]
        for count in rows_of_passes(lengths, self.backend.packs, self.backend.pass_tokens):
            prompts = [request.prompt for request in requests[read : read + count]]
            logits.append(self._read_alike(self.first_row + read, prompts, drafting))
            read += count
        self._p_UV = sampling_distributions(torch.cat(logits), [r.sampling or self.sampling for r in requests])
        self._index, self._requests = {id(request): i for i, request in enumerate(requests)}, tuple(requests)
        return total

    def _read_alike(self, first_row: int, prompts: list, drafting: bool) -> torch.Tensor:
        """Prefill prompts in one pass, the longest first; return the logits after each, [U, V]."""
        tokens, rows, longest = self.tokens, slice(first_row, first_row + len(prompts)), len(prompts[0])
        if self.decode.graphs is not None:
            longest = min(-(-longest // GRAPH_STEP) * GRAPH_STEP, tokens.positions)
        token_UL = torch.tensor([[*p, *[0] * (longest - len(p))] for p in prompts], device=tokens.device)
        length_U = torch.tensor([len(p) for p in prompts], device=tokens.device)
        tokens.token_SP[rows, :longest] = token_UL
        tokens.length_S[rows] = tokens.prompt_S[rows] = length_U
        tokens.refresh(rows.stop)
        self.drafter.enter(first_row, len(prompts))
        logits_UV = self.fill(first_row, token_UL, length_U, True)
        if drafting:
            self.drafter.prefill(first_row, len(prompts))
        return logits_UV

    def fill(self, first_row: int, token_UL, length_U, wanted: bool = False) -> torch.Tensor | None:
        """Fill the cache with the first length_U tokens of each row, in chunks.

        Returns:
            The logits after the last of these tokens in each row, [U, V], if `wanted`.
        """
        hidden_UD = None
        for start in range(0, token_UL.shape[1], PREFILL_CHUNK):
            chunk_UL = token_UL[:, start : start + PREFILL_CHUNK]
            U, L = chunk_UL.shape
            position_UL = self.tokens.index_P[start : start + L].expand(U, -1)
            last_U, packed = (length_U - 1 - start).clamp(0, L - 1), None
            index_U = torch.arange(U, device=last_U.device) * L + last_U
            if self.backend.packs:
                _, packed, of_UL = packing(last_U.numpy() + 1, L)
                if packed is not None:
                    index_U = torch.from_numpy(of_UL[np.arange(U), last_U])
            hidden_ULD, features_ULD = self.decode.hidden_states(
                first_row, chunk_UL, position_UL, [(U, start + L)], self.aux_layers, packed
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
