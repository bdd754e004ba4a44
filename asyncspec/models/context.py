"""Context parallelism: ranks that share the tokens of one packed row, so that each keeps a part of its activations.

The row is cut into twice as many pieces as there are ranks, and a rank has one from each end, because a later token
sees more tokens:

    2 ranks     0 0 0 | 1 1 1 | 1 1 1 | 0 0 0

In each layer the ranks gather the keys and values of the row, and each computes the attention of its own tokens. A
token may see two stretches of others that are apart, its prompt and what its response has so far. So the attention to
each stretch is computed alone, and the results are weighted by their normalizers, in the forward and in the backward
pass; that is Ring Attention's sum (arXiv 2310.01889) over stretches, without its ring. No mask is ever made. The
backward pass gathers again, so that no rank keeps keys and values of other ranks.

Shape suffixes: L positions of the row, rounded up to whole pieces; C positions of this rank; T response tokens, U those
that this rank predicts; N heads, K key-value heads, G = N / K, H head size; Q queries of a block, S keys of a stretch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from asyncspec.models.attention import Packing

Stretch = tuple[int, int, bool]  # first key, end, and whether a query sees only the keys up to its own


@dataclass(frozen=True)
class Block:
    """Consecutive queries of one document that a rank has, and what they see."""

    first: int  # index among the rank's tokens
    end: int
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True)
class SharedPacking(Packing):
    """A packing of which each rank of a group has a part."""

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1

    @classmethod
    def of_group(cls, packing: Packing, group: dist.ProcessGroup) -> SharedPacking:
        return cls(
            packing.segments, packing.device, group=group, rank=dist.get_rank(group), size=dist.get_world_size(group)
        )

    @property
    def piece(self) -> int:
        """Tokens of a piece of the row."""
        return -(-self.tokens // (2 * self.size))

    def pieces(self, rank: int) -> tuple[range, range]:
        """Return the positions in the row that a rank has."""
        return tuple(range(n * self.piece, (n + 1) * self.piece) for n in (rank, 2 * self.size - 1 - rank))

    @cached_property
    def own_C(self) -> torch.Tensor:
        """The index in the row of each token of this rank, int64. The last ones may be past the end."""
        return torch.tensor([position for piece in self.pieces(self.rank) for position in piece], device=self.device)

    @cached_property
    def order_L(self) -> torch.Tensor:
        """The index of each token of the row among the tokens of all ranks, rank by rank, int64."""
        gathered = [position for rank in range(self.size) for piece in self.pieces(rank) for position in piece]
        return torch.tensor(gathered, device=self.device).argsort()

    def part(self, values_L: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of values of the row's tokens; zeros past the end."""
        whole = values_L.new_zeros(2 * self.size * self.piece, *values_L.shape[1:])
        whole[: self.tokens] = values_L
        return whole[self.own_C]

    def own_predicting(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which response tokens this rank predicts, as indices among all of them, and the index among this
        rank's tokens of the token before each, int64.
        """
        place = torch.full((2 * self.size * self.piece,), -1, device=self.device)
        place[self.own_C] = torch.arange(len(self.own_C), device=self.device)
        place_T = place[self.predicting()]
        mine_U = (place_T >= 0).nonzero()[:, 0]
        return mine_U, place_T[mine_U]

    @cached_property
    def blocks(self) -> list[Block]:
        """The attention that this rank computes."""
        found, offset = [], 0
        for piece in self.pieces(self.rank):
            for first, end, prompt in self._documents():
                start, stop = max(first, piece.start), min(end, piece.stop)
                if start < stop:
                    seen = [(*prompt, False)] if prompt else []
                    seen += [(first, start, False)] if first < start else []
                    local = offset - piece.start
                    found.append(Block(start + local, stop + local, (*seen, (start, stop, True))))
            offset += len(piece)
        return found

    def _documents(self) -> list[tuple[int, int, tuple[int, int] | None]]:
        """Return first token and end of each document, and of a response also those of its prompt."""
        found = []
        for s in self.segments:
            if len(s.lengths) == 1:  # one response continues its prompt
                found.append((s.start, s.end, None))
                continue
            found.append((s.start, s.responses, None))
            found += [(first, first + n, (s.start, s.responses)) for first, n in zip(s.starts, s.lengths) if n]
        return [*found, (self.tokens, 2 * self.size * self.piece, None)]

    def attend(self, q_CNH, k_CKH, v_CKH, scale, enable_gqa) -> torch.Tensor:
        """Return the attention of this rank's tokens, out_CNH. Collective, also backward."""
        return _Attend.apply(self, q_CNH, k_CKH, v_CKH, q_CNH.shape[-1] ** -0.5 if scale is None else scale)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, packing, q_CNH, k_CKH, v_CKH, scale):
        k_LKH, v_LKH = _gather(packing, k_CKH, v_CKH)
        out_CNH = torch.empty_like(q_CNH)
        lse_NC = torch.empty(q_CNH.shape[1], len(q_CNH), dtype=torch.float32, device=q_CNH.device)
        grouped = q_CNH.shape[1] // k_CKH.shape[1]
        for block in packing.blocks:
            q_GKQH = _queries(q_CNH[block.first : block.end], grouped)
            parts = [
                _forward(q_GKQH, _keys(k_LKH[a:b], grouped), _keys(v_LKH[a:b], grouped), causal, scale)
                for a, b, causal in block.stretches
            ]
            lse_GKQ = torch.stack([lse for _, lse in parts]).logsumexp(0)
            out_GKQH = sum(out.float() * (lse - lse_GKQ).exp().unsqueeze(-1) for out, lse in parts)
            out_CNH[block.first : block.end] = _tokens(out_GKQH).to(q_CNH.dtype)
            lse_NC[:, block.first : block.end] = lse_GKQ.transpose(0, 1).flatten(0, 1)
        ctx.save_for_backward(q_CNH, k_CKH, v_CKH, out_CNH, lse_NC)
        ctx.packing, ctx.scale = packing, scale
        return out_CNH

    @staticmethod
    def backward(ctx, grad_CNH):
        q_CNH, k_CKH, v_CKH, out_CNH, lse_NC = ctx.saved_tensors
        packing, grouped = ctx.packing, q_CNH.shape[1] // k_CKH.shape[1]
        k_LKH, v_LKH = _gather(packing, k_CKH, v_CKH)
        grad_q_CNH = torch.empty_like(q_CNH)
        grad_k_LKH, grad_v_LKH = (torch.zeros_like(t, dtype=torch.float32) for t in (k_LKH, v_LKH))
        for block in packing.blocks:
            here = slice(block.first, block.end)
            q_GKQH, out_GKQH, grad_GKQH = (_queries(t[here], grouped) for t in (q_CNH, out_CNH, grad_CNH))
            lse_GKQ = lse_NC[:, here].unflatten(0, (-1, grouped)).transpose(0, 1).contiguous()
            total = 0.0
            for a, b, causal in block.stretches:
                keys = _keys(k_LKH[a:b], grouped), _keys(v_LKH[a:b], grouped)
                # With the result and the normalizer of all stretches, this is the gradient by each of them.
                found = _backward(grad_GKQH, q_GKQH, *keys, out_GKQH, lse_GKQ, causal, ctx.scale)
                total = total + found[0].float()
                grad_k_LKH[a:b] += found[1].float().sum(0).transpose(0, 1)
                grad_v_LKH[a:b] += found[2].float().sum(0).transpose(0, 1)
            grad_q_CNH[here] = _tokens(total).to(q_CNH.dtype)
        grads = _scatter(packing, grad_k_LKH, grad_v_LKH)
        return None, grad_q_CNH, *(grad.to(k_CKH.dtype) for grad in grads), None


def _queries(t_QNH, grouped: int) -> torch.Tensor:
    """Return queries with the heads that share keys in the batch, [G, K, Q, H]."""
    return t_QNH.unflatten(1, (-1, grouped)).permute(2, 1, 0, 3)


def _tokens(t_GKQH) -> torch.Tensor:
    return t_GKQH.permute(2, 1, 0, 3).flatten(1, 2)


def _keys(t_SKH, grouped: int) -> torch.Tensor:
    return t_SKH.transpose(0, 1).expand(grouped, -1, -1, -1)


def _gather(packing: SharedPacking, k_CKH: torch.Tensor, v_CKH: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the keys and values of the whole row, in order."""
    part = torch.cat([k_CKH, v_CKH], -1)
    found = part.new_empty(packing.size * len(part), *part.shape[1:])
    dist.all_gather_single(found, part, group=packing.group)
    return found.index_select(0, packing.order_L).chunk(2, -1)


def _scatter(packing: SharedPacking, grad_k_LKH: torch.Tensor, grad_v_LKH: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the sums over ranks of the gradients, for this rank's tokens."""
    whole = torch.cat([grad_k_LKH, grad_v_LKH], -1)
    by_rank = torch.empty_like(whole).index_copy_(0, packing.order_L, whole)
    found = whole.new_empty(len(whole) // packing.size, *whole.shape[1:])
    dist.reduce_scatter_single(found, by_rank, group=packing.group)
    return found.chunk(2, -1)


def _forward(q_GKQH, k_GKSH, v_GKSH, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention, in the dtype of the queries, and the logarithms of its normalizers, float32 [G, K, Q]."""
    aten = torch.ops.aten
    if q_GKQH.is_cuda:
        return aten._scaled_dot_product_flash_attention(q_GKQH, k_GKSH, v_GKSH, 0.0, causal, False, scale=scale)[:2]
    return aten._scaled_dot_product_flash_attention_for_cpu(q_GKQH, k_GKSH, v_GKSH, 0.0, causal, scale=scale)


def _backward(grad_GKQH, q_GKQH, k_GKSH, v_GKSH, out_GKQH, lse_GKQ, causal: bool, scale: float):
    """Return the gradients of queries, keys and values."""
    aten = torch.ops.aten
    given = grad_GKQH, q_GKQH, k_GKSH, v_GKSH, out_GKQH, lse_GKQ
    if not q_GKQH.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, causal, scale=scale)
    state = torch.empty(2, dtype=torch.uint64, device=q_GKQH.device)  # of a random number generator that is not used
    sizes = q_GKQH.shape[2], k_GKSH.shape[2]
    return aten._scaled_dot_product_flash_attention_backward(
        *given, None, None, *sizes, 0.0, causal, state, torch.empty(0, device=q_GKQH.device), scale=scale
    )


def gathered(packing: SharedPacking, own_U: torch.Tensor, mine_U: torch.Tensor, count: int) -> torch.Tensor:
    """Return the values of all response tokens, [T], from those that each rank has. Collective.

    All ranks go on to compute the same loss, so each one's gradient is that of its own values.
    """
    return _Gathered.apply(packing, own_U, mine_U, count)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, packing, own_U, mine_U, count):
        ctx.save_for_backward(mine_U)
        found_T = own_U.new_zeros(count).index_copy_(0, mine_U, own_U)
        dist.all_reduce(found_T, group=packing.group)
        return found_T

    @staticmethod
    def backward(ctx, grad_T):
        return None, grad_T[ctx.saved_tensors[0]], None, None
