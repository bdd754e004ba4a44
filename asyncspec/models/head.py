"""The head of a policy, applied to some rows at a time, so that logits of all positions never exist at once.

Logits are float32, also if the weights are bfloat16. A head that tensor-parallel ranks divide by its vocabulary stays
divided.

Shape suffixes: T rows, D model dimension, V vocabulary of this rank, C rows of a chunk, M tokens kept of a row's
distribution.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from asyncspec.models import HEAD_ROWS

ROWS = HEAD_ROWS


class Chosen(NamedTuple):
    """What a head says of the tokens that were chosen.

    logprob_T: float32, with a gradient.
    kept_TM, token_TM: the logprobs of the most probable tokens, float32, and these tokens, int64; both None if none are
        kept. token_TM is None if the whole vocabulary is kept, in order.
    entropy_T: the entropies of the distributions, in nats, float32, with a gradient; None if they were not asked for.
        The gradient costs something only if it is used.
    """

    logprob_T: torch.Tensor
    kept_TM: torch.Tensor | None = None
    token_TM: torch.Tensor | None = None
    entropy_T: torch.Tensor | None = None


def chosen(
    hidden_TD, weight_VD, token_T, temperature: float, keep: int | None = None, group=None, entropy: bool = False
) -> Chosen:
    """Return logprobs of tokens at the sampling temperature.

    Args:
        hidden_TD: the trunk's output before each token. Its gradient is this rank's summand if ranks divide the head.
        weight_VD: the head, or this rank's part of its vocabulary. All parts have the same size, but for the last.
        token_T: int64.
        keep: how many of the most probable tokens to keep of each distribution; 0: the whole vocabulary; None: none.
        group: the process group of the ranks that divide the head, in the order of their parts; None: it is whole.
        entropy: whether to compute the distributions' entropies.
    """
    return Chosen(*_Chosen.apply(hidden_TD, weight_VD, token_T, temperature, keep, group, entropy))


class _Chosen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, token_T, temperature, keep, group, entropy):
        ctx.set_materialize_grads(False)  # the gradient of entropies that are only looked at is None, not zeros
        V, sizes = len(weight_VD), _sizes(len(weight_VD), group, hidden_TD.device)
        first = 0 if group is None else sum(sizes[: dist.get_rank(group)])
        token_T = token_T - first
        mine_T = (token_T >= 0) & (token_T < V)
        token_T = token_T.clamp(0, V - 1)
        computed_VD = _computed(hidden_TD, weight_VD)
        dtype = torch.promote_types(hidden_TD.dtype, torch.float32)
        logit_T, lse_T = (torch.empty(len(token_T), dtype=dtype, device=hidden_TD.device) for _ in range(2))
        entropy_T = torch.empty_like(lse_T) if entropy else None
        kept, every = [], keep is not None and not 0 < keep < sum(sizes)
        for rows in _chunks(len(token_T)):
            logit_CV = _logits(hidden_TD[rows], computed_VD, temperature)
            logit_T[rows] = logit_CV.gather(-1, token_T[rows].unsqueeze(-1)).squeeze(-1)
            lse_T[rows] = logit_CV.logsumexp(-1)
            if keep is not None:
                kept.append((logit_CV, None) if every else logit_CV.topk(min(keep, V)))
            if entropy_T is not None:
                lse_C1 = lse_T[rows].unsqueeze(-1)
                logprob_CV = logit_CV - lse_C1 if every else logit_CV.sub_(lse_C1)
                entropy_T[rows] = -logprob_CV.exp().mul_(logprob_CV).sum(-1)
        if group is not None:
            logit_T = torch.where(mine_T, logit_T, 0)
            dist.all_reduce(logit_T, group=group)
            most_T = lse_T.clone()
            dist.all_reduce(most_T, dist.ReduceOp.MAX, group=group)
            sum_T = (lse_T - most_T).exp()
            dist.all_reduce(sum_T, group=group)
            own_T, lse_T = lse_T, most_T + sum_T.log()
            if entropy_T is not None:
                # Of a distribution in parts: each part's own entropy, and that of which part it is.
                part_T = own_T - lse_T
                entropy_T = part_T.exp() * (entropy_T - part_T)
                dist.all_reduce(entropy_T, group=group)
        ctx.save_for_backward(hidden_TD, weight_VD, token_T, mine_T, lse_T, entropy_T)
        ctx.temperature = temperature
        if keep is None:
            return logit_T - lse_T, None, None, entropy_T
        kept_TM = torch.cat([values for values, _ in kept])
        token_TM = None if kept[0][1] is None else torch.cat([tokens for _, tokens in kept]) + first
        if group is not None:
            kept_TM, token_TM = _most_of_all(kept_TM, token_TM, keep, sizes, group)
        kept_TM = kept_TM - lse_T.unsqueeze(-1)
        ctx.mark_non_differentiable(*(t for t in (kept_TM, token_TM) if t is not None))
        return logit_T - lse_T, kept_TM, token_TM, entropy_T

    @staticmethod
    def backward(ctx, grad_T, _kept, _token, grad_entropy_T):
        hidden_TD, weight_VD, token_T, mine_T, lse_T, entropy_T = ctx.saved_tensors
        grad_TD = torch.empty_like(hidden_TD) if ctx.needs_input_grad[0] else None
        grad_VD = torch.zeros_like(weight_VD, dtype=lse_T.dtype) if ctx.needs_input_grad[1] else None
        computed_VD = _computed(hidden_TD, weight_VD)
        grad_T = torch.zeros_like(lse_T) if grad_T is None else grad_T
        for rows in _chunks(len(token_T)):
            # d logprob / d logit is 1 at the token, minus the probability of each token.
            logit_CV = _logits(hidden_TD[rows], computed_VD, ctx.temperature)
            scaled_C = grad_T[rows] / ctx.temperature
            logprob_CV = logit_CV.sub_(lse_T[rows].unsqueeze(-1))
            if grad_entropy_T is None:
                grad_CV = logprob_CV.exp_().mul_(-scaled_C.unsqueeze(-1))
            else:
                # d entropy / d logit is -p (logprob + entropy).
                scaled_entropy_C = grad_entropy_T[rows] / ctx.temperature
                factor_CV = (logprob_CV + entropy_T[rows].unsqueeze(-1)).mul_(scaled_entropy_C.unsqueeze(-1))
                grad_CV = logprob_CV.exp_().mul_(factor_CV.add_(scaled_C.unsqueeze(-1)).neg_())
            grad_CV.scatter_add_(-1, token_T[rows].unsqueeze(-1), torch.where(mine_T[rows], scaled_C, 0).unsqueeze(-1))
            if grad_CV.is_cuda:
                grad_CV = grad_CV.to(hidden_TD.dtype)
            if grad_TD is not None:
                grad_TD[rows] = grad_CV @ computed_VD
            if grad_VD is not None:
                _add_product(grad_VD, grad_CV, hidden_TD[rows])
        return grad_TD, None if grad_VD is None else grad_VD.to(weight_VD.dtype), None, None, None, None, None


def _chunks(rows: int) -> list[slice]:
    return [slice(first, min(first + ROWS, rows)) for first in range(0, rows, ROWS)]


def _computed(hidden_TD, weight_VD) -> torch.Tensor:
    """Return the head in the dtype of its products: 16 bits stay 16 bits on a GPU, which sums them in float32."""
    if hidden_TD.is_cuda and hidden_TD.element_size() == 2:
        return weight_VD.to(hidden_TD.dtype)
    return weight_VD.to(torch.promote_types(hidden_TD.dtype, torch.float32))


def _logits(hidden_CD, computed_VD, temperature: float) -> torch.Tensor:
    """Return logits over the temperature, at least float32."""
    if computed_VD.element_size() == 2:
        return torch.mm(hidden_CD, computed_VD.T, out_dtype=torch.float32).div_(temperature)
    return (hidden_CD.to(computed_VD.dtype) @ computed_VD.T).div_(temperature)


def _add_product(grad_VD, grad_CV, hidden_CD) -> None:
    """Add grad^T times hidden, summed in float32."""
    if grad_CV.dtype != grad_VD.dtype:
        grad_VD += torch.mm(grad_CV.T, hidden_CD.to(grad_CV.dtype), out_dtype=grad_VD.dtype)
    else:
        grad_VD.addmm_(grad_CV.T, hidden_CD.to(grad_CV.dtype))


def _sizes(vocabulary: int, group, device) -> list[int]:
    """Return the size of each rank's part of the vocabulary."""
    if group is None:
        return [vocabulary]
    mine = torch.tensor([vocabulary], device=device)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, mine, group=group)
    return torch.cat(found).tolist()


def _most_of_all(kept_TM, token_TM, keep: int, sizes: list[int], group) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the logits of the most probable tokens of all ranks, and these tokens; None: all tokens, in order."""
    widths = sizes if token_TM is None else [min(keep, size) for size in sizes]

    def gathered(tensor_TM):
        mine = torch.nn.functional.pad(tensor_TM, (0, max(widths) - tensor_TM.shape[1])).contiguous()
        parts = [torch.empty_like(mine) for _ in sizes]
        dist.all_gather(parts, mine, group=group)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths)], -1)

    logit_TM = gathered(kept_TM)
    if token_TM is None:
        return logit_TM, None
    kept_TM, at_TM = logit_TM.topk(keep)
    return kept_TM, gathered(token_TM).gather(-1, at_TM)
