"""Causal attention over whole sequences, or over a packed row of prompts with their responses.

In a packed row every prompt stands once, and its responses follow:

    row         p p p p | a a a | b b     | q q q | c c c c c
    positions   0 1 2 3 | 4 5 6 | 4 5     | 0 1 2 | 3 4 5 6 7

A response sees its prompt and itself. So a prompt is computed once for all of its responses. A response's last token
is not in the row, because nothing follows it.

Shape suffixes: B batch, L positions, N heads, H head size; R responses of a prompt, T tokens of the longest of them, P
tokens of the prompt, S = P + T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F

from asyncspec.loading import compiling_later

with compiling_later():
    from torchtitan.protocols.module import Module


@dataclass(frozen=True)
class Segment:
    """A prompt and its responses in a packed row.

    start: index of the prompt's first token in the row.
    prompt: tokens of the prompt, at least 1.
    lengths: tokens of each response in the row, one less than the response has.
    """

    start: int
    prompt: int
    lengths: tuple[int, ...]

    @property
    def responses(self) -> int:
        """Index in the row at which the responses begin."""
        return self.start + self.prompt

    @property
    def end(self) -> int:
        return self.responses + sum(self.lengths)

    @cached_property
    def starts(self) -> list[int]:
        """Index in the row at which each response begins."""
        return list(accumulate(self.lengths, initial=self.responses))[:-1]


@dataclass(frozen=True)
class Packing:
    """How a row is packed. It goes to `CausalAttention` in the place of torchtitan's attention masks."""

    segments: Sequence[Segment]
    device: str = "cpu"
    _kept: dict = field(default_factory=dict, compare=False)  # index tensors, which all layers share

    @classmethod
    def of(cls, sizes: Sequence[tuple[int, Sequence[int]]], device: str = "cpu") -> Packing:
        """Return a packing.

        Args:
            sizes: of each prompt its tokens, and the tokens of each of its responses, at least 1.
        """
        segments, start = [], 0
        for prompt, lengths in sizes:
            segments.append(Segment(start, prompt, tuple(int(length) - 1 for length in lengths)))
            start = segments[-1].end
        return cls(segments, device)

    @property
    def tokens(self) -> int:
        """Tokens of the row."""
        return self.segments[-1].end

    def positions(self) -> torch.Tensor:
        """Return the position of each token in its sequence, int64 [1, L]."""
        pieces = [
            piece
            for s in self.segments
            for piece in (np.arange(s.prompt), *(np.arange(s.prompt, s.prompt + n) for n in s.lengths))
        ]
        return torch.from_numpy(np.concatenate(pieces)).unsqueeze(0).to(self.device)

    def predicting(self) -> torch.Tensor:
        """Return the index in the row of the token before each response token, int64, response by response."""
        pieces = [
            piece
            for s in self.segments
            for start, n in zip(s.starts, s.lengths)
            for piece in (np.array([s.responses - 1]), np.arange(start, start + n))
        ]
        return torch.from_numpy(np.concatenate(pieces)).to(self.device)

    def padded(self, segment: Segment) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return how responses are padded to the longest.

        Returns:
            For each padded token its index among the responses' tokens, int64 [R * T]; for each token its padded index,
            int64; and the mask of what a response's tokens see of prompt and response, bool [T, S].
        """
        if segment.start not in self._kept:
            lengths, T = np.array(segment.lengths), max(segment.lengths)
            index_T = np.arange(T)
            starts = np.cumsum(lengths) - lengths
            own_RT = np.minimum(index_T, (lengths - 1).clip(0)[:, None])  # padding repeats a response's last token
            spread_RT = np.minimum(starts[:, None] + own_RT, sum(lengths) - 1)
            back = np.flatnonzero(index_T < lengths[:, None])
            sees_TS = np.concatenate([np.ones((T, segment.prompt), bool), np.tri(T, dtype=bool)], 1)
            self._kept[segment.start] = tuple(
                torch.from_numpy(array).to(self.device) for array in (spread_RT.reshape(-1), back, sees_TS)
            )
        return self._kept[segment.start]

    def attend(self, q_LNH, k_LNH, v_LNH, scale, enable_gqa) -> torch.Tensor:
        """Return the attention of the row's tokens, out_LNH."""
        # Lone responses are whole sequences, which need no varlen attention.
        shared = any(len(segment.lengths) > 1 for segment in self.segments)
        attend = _by_documents if shared and q_LNH.is_cuda and q_LNH.element_size() == 2 else _by_segments
        return attend(self, q_LNH, k_LNH, v_LNH, scale, enable_gqa)

    def documents(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
        """Return the row as documents for torch's varlen attention: each prompt, and each response after its prompt.

        Returns:
            The index in the row of each document's keys, int64; the cumulative numbers of queries and of keys, int32;
            the most queries and the most keys of a document.
        """
        if "documents" not in self._kept:
            keys, queries = [], []
            for s in self.segments:
                prompt = np.arange(s.start, s.responses)
                keys.append(prompt)
                queries.append(s.prompt)
                for start, n in zip(s.starts, s.lengths):
                    if n:
                        keys.append(np.concatenate([prompt, np.arange(start, start + n)]))
                        queries.append(n)
            counts = [len(each) for each in keys]

            def cumulative(sizes):
                return torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=self.device)

            index = torch.from_numpy(np.concatenate(keys)).to(self.device)
            self._kept["documents"] = index, cumulative(queries), cumulative(counts), max(queries), max(counts)
        return self._kept["documents"]


class CausalAttention(Module):
    """Causal attention over whole sequences from position 0, padded at their right, or over a packed row."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks=None, scale=None, enable_gqa=False):
        """Return out_BLNH.

        Args:
            attention_masks: a `Packing`, for a batch of one packed row; None: whole sequences.
        """
        if attention_masks is None:
            return _attend(q_BLNH, k_BLNH, v_BLNH, scale, enable_gqa, is_causal=True)
        return attention_masks.attend(q_BLNH[0], k_BLNH[0], v_BLNH[0], scale, enable_gqa).unsqueeze(0)


def _attend(q_BLNH, k_BLNH, v_BLNH, scale, enable_gqa, **masked):
    q_BNLH, k_BNLH, v_BNLH = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
    return F.scaled_dot_product_attention(
        q_BNLH, k_BNLH, v_BNLH, scale=scale, enable_gqa=enable_gqa, **masked
    ).transpose(1, 2)


def _by_segments(packing: Packing, q_LNH, k_LNH, v_LNH, scale, enable_gqa):
    """Attend prompt by prompt: the prompt causally, then its responses, padded, to the prompt and to themselves."""
    whole = scale, enable_gqa
    out = []
    for s in packing.segments:
        only = len(s.lengths) == 1  # one response continues its prompt
        first = s.end if only else s.responses
        q_1PNH, k_1PNH, v_1PNH = (t[s.start : first].unsqueeze(0) for t in (q_LNH, k_LNH, v_LNH))
        out.append(_attend(q_1PNH, k_1PNH, v_1PNH, *whole, is_causal=True)[0])
        if only or s.end == s.responses:
            continue
        spread, back, sees_TS = packing.padded(s)
        R, even = len(s.lengths), len(set(s.lengths)) == 1

        def padded(t_LNH):
            part = t_LNH[s.responses : s.end]
            return (part if even else part.index_select(0, spread)).unflatten(0, (R, -1))

        k_RSNH, v_RSNH = (
            torch.cat([prompt_1PNH.expand(R, -1, -1, -1), padded(t_LNH)], 1)
            for prompt_1PNH, t_LNH in ((t[s.start : s.responses].unsqueeze(0), t) for t in (k_LNH, v_LNH))
        )
        found = _attend(padded(q_LNH), k_RSNH, v_RSNH, *whole, attn_mask=sees_TS).flatten(0, 1)
        out.append(found if even else found.index_select(0, back))
    return torch.cat(out)


def _by_documents(packing: Packing, q_LNH, k_LNH, v_LNH, scale, enable_gqa):
    """Attend with torch's varlen attention. Its causal mask is aligned lower right: the last query sees all keys."""
    from torch.nn.attention.varlen import varlen_attn

    index, queries, keys, most_queries, most_keys = packing.documents()
    return varlen_attn(
        q_LNH,
        k_LNH.index_select(0, index),
        v_LNH.index_select(0, index),
        queries,
        keys,
        most_queries,
        most_keys,
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=enable_gqa,
    )
