"""The supervision of a draft, from one pass of the policy: hidden states, and the distributions that are sampled from.

No gradient can reach the policy: all tensors are detached where they are made. `pack` turns supervision into the arrays
that travel to the draft adapter, `unpack` turns them back, and `size` returns their size in bytes.

Shape suffixes: B rows, L positions, R positions of all rows that a mask holds, E auxiliary features, D model dimension,
V vocabulary, M tokens kept of a distribution, N positions of all rows, T positions of all rows that predict a response
token, U distinct tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from asyncspec.models import head
from asyncspec.models.packed import Row, Scores
from asyncspec.models.policy import features, hidden_states, inputs_of
from asyncspec.wire.messages import Arrays

LEAST_REST = 1e-6  # least mass that a draft is taken to give the tokens not kept, so that its logarithm is finite


class Target(NamedTuple):
    """The distribution of the next token at each position, over the whole vocabulary or the most probable tokens only.

    logprob_BLM: float, log-probabilities of the kept tokens.
    token_BLM: int64, the kept tokens; None: the whole vocabulary, in order.
    rest_BL: float, the mass of the tokens not kept, which count as one further outcome; None: 1 minus the kept mass.
    """

    logprob_BLM: torch.Tensor
    token_BLM: torch.Tensor | None = None
    rest_BL: torch.Tensor | None = None

    def between(self, start: int, end: int) -> Target:
        return Target(*(None if t is None else t[:, start:end] for t in self))

    def at(self, mask_BL: torch.Tensor) -> Target:
        """Return the R distributions at the positions of a mask: R takes the place of B and L in all shapes."""
        return Target(*(None if t is None else t[mask_BL] for t in self))

    def within(self, t2d_V: torch.Tensor | None, d2t_U: torch.Tensor | None) -> Target:
        """Translate to a draft's smaller vocabulary. Tokens that it lacks lose their mass.

        Args:
            t2d_V: int64, the draft's number for each token, -1 for tokens it lacks; None: it has the whole vocabulary.
            d2t_U: int64, the token for each number of the draft.
        """
        if t2d_V is None:
            return self
        if self.token_BLM is None:
            return Target(self.logprob_BLM[..., d2t_U])
        token_BLM, rest_BL = t2d_V[self.token_BLM], (1 - self.logprob_BLM.exp().sum(-1)).clamp(min=0)
        return Target(self.logprob_BLM.masked_fill(token_BLM < 0, float("-inf")), token_BLM.clamp(min=0), rest_BL)

    def compared(self, logq_BLV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compare with a draft's log-distributions: return the cross-entropy and the share of proposals that would be
        accepted, both float [B, L].

        That share is the sum over outcomes of min(p, q). It is an upper bound if not all tokens were kept. Both results
        have gradients.
        """
        p_BLM = self.logprob_BLM.exp()
        if self.token_BLM is None:
            return -(p_BLM * logq_BLV).sum(-1), torch.minimum(p_BLM, logq_BLV.exp()).sum(-1)
        logq_BLM = logq_BLV.gather(-1, self.token_BLM)
        # the draft gives no mass to a token that it lacks
        q_BLM = logq_BLM.exp() * (self.logprob_BLM > float("-inf"))
        rest_BL = (1 - p_BLM.sum(-1)).clamp(min=0) if self.rest_BL is None else self.rest_BL
        q_rest_BL = (1 - q_BLM.sum(-1)).clamp(min=LEAST_REST)
        entropy_BL = -(p_BLM * logq_BLM).sum(-1) - rest_BL * q_rest_BL.log()
        return entropy_BL, torch.minimum(p_BLM, q_BLM).sum(-1) + torch.minimum(rest_BL, q_rest_BL)


class Supervision(NamedTuple):
    """The training input of a draft of any method. Each method uses the fields that it needs.

    tokens_BL: int64.
    mask_BL: bool, True at response tokens.
    target: the distribution of the token after each position.
    features_BLE, embeds_BLD: the policy's auxiliary hidden states and its embeddings of the tokens; None for a draft
        that takes tokens only.
    start_B: int64, the position of each row's first token; None: all start at 0.
    """

    tokens_BL: torch.Tensor
    mask_BL: torch.Tensor
    target: Target
    features_BLE: torch.Tensor | None
    embeds_BLD: torch.Tensor | None
    start_B: torch.Tensor | None = None


@torch.no_grad()
def supervise(model, aux_layers, tokens_BL, mask_BL, temperature: float, keep: int = 0) -> Supervision:
    """Make supervision by one pass of the policy over rollouts.

    Args:
        model: the policy, whole.
        aux_layers: the policy's layers whose inputs the draft takes; () for a draft that takes tokens only.
        temperature: temperature of the sampling; the draft learns the distribution that is sampled from.
        keep: how many of the most probable tokens to keep of each distribution; 0: the whole vocabulary.
    """
    with inputs_of(model, {0, *aux_layers} if aux_layers else ()) as inputs:
        hidden_BLD = inputs[len(model.layers)] = hidden_states(model, tokens_BL)
    predicts_BL = F.pad(mask_BL[:, 1:], (0, 1))
    token_T = tokens_BL[:, 1:][mask_BL[:, 1:]]
    chosen = head.chosen(hidden_BLD[predicts_BL], model.lm_head.weight, token_T, temperature, keep)
    token_BLM = None if chosen.token_TM is None else _spread(chosen.token_TM, predicts_BL)
    target = Target(_spread(chosen.kept_TM, predicts_BL), token_BLM)
    found = features(inputs, aux_layers)
    return Supervision(tokens_BL, mask_BL, target, *map(_float, found))


def _spread(values_T: torch.Tensor, where_BL: torch.Tensor) -> torch.Tensor:
    """Return values [T, ...] at the places of the mask, in their order, and zeros elsewhere: [B, L, ...]."""
    out = values_T.new_zeros(*where_BL.shape, *values_T.shape[1:])
    out[where_BL] = values_T
    return out


@torch.no_grad()
def from_pass(row: Row, scores: Scores, index: int = 0) -> Supervision:
    """Make supervision from a pass that was made for another reason. It has one row for each response of a prompt.

    Args:
        row: a packed row.
        scores: what `models.packed.run` returned for it, with `keep`.
        index: which prompt of the row.
    """
    segment, device = row.packing.segments[index], row.tokens_1L.device
    lengths = np.array(segment.lengths)
    P, L = segment.prompt, segment.prompt + 1 + max(segment.lengths)
    index_L = np.arange(L)
    mask = (index_L >= P) & (index_L <= P + lengths[:, None])
    # Index in the packed row; a response's last token is not there.
    at = np.where(index_L < P, segment.start + index_L, np.array(segment.starts)[:, None] + index_L - P)
    held = index_L < P + lengths[:, None]
    at_BL, held_BL, mask_BL = (torch.from_numpy(a).to(device) for a in (np.where(held, at, 0), held, mask))
    first = sum(sum(s.lengths) + len(s.lengths) for s in row.packing.segments[:index])
    rows = slice(first, first + int(mask.sum()))

    def gathered(values_L):
        return None if values_L is None else _float(values_L[at_BL] * held_BL.unsqueeze(-1))

    tokens_BL = row.tokens_1L[0][at_BL] * held_BL
    tokens_BL[mask_BL] = row.token_T[rows]
    predicts_BL = F.pad(mask_BL[:, 1:], (0, 1))
    chosen = scores.chosen
    token_BLM = None if chosen.token_TM is None else _spread(chosen.token_TM[rows], predicts_BL)
    target = Target(_spread(chosen.kept_TM[rows], predicts_BL), token_BLM)
    return Supervision(tokens_BL, mask_BL, target, gathered(scores.features_LE), gathered(scores.embeds_LD))


def _float(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().float()


def pack(supervision: Supervision, top: int = 0, window: int = 0, rng: np.random.Generator | None = None) -> Arrays:
    """Turn supervision into arrays to send, without padding.

    Args:
        top: keep this many tokens of each distribution, the most probable ones; 0, or the vocabulary's size: all.
        window: keep this many positions of each row, a stretch chosen at random among those that hold response tokens;
            0: all.
        rng: chooses the stretches; None: a new generator.

    Returns:
        Arrays by name. tokens: int32 [N]. start, length, response: int32 [B], each row's first position, the number of
        its positions, and the index among them of the first response token. target_logprobs: float16 [T, M].
        target_tokens: int32 [T, M], absent if all are kept. For drafts that need them also features: float16 [N, E],
        embeds: float16 [U, D], and embedded: int32 [U], the tokens that embeds belong to.
    """
    tokens_BL, mask_BL, target, features_BLE, embeds_BLD, _ = supervision
    B, L = tokens_BL.shape
    index_L = torch.arange(L, device=tokens_BL.device)
    end_B = torch.where(mask_BL, index_L + 1, 0).amax(1)
    first_B = torch.where(mask_BL, index_L, L).amin(1).minimum(end_B)
    start_B = torch.zeros_like(end_B)
    if window:
        # The window begins before the last response token and ends after the first.
        low_B, high_B = (first_B - 2).clamp(min=0), (end_B - window).clamp(min=0)
        low_B = low_B.minimum(high_B)
        uniform_B = torch.from_numpy((rng or np.random.default_rng()).random(B)).to(tokens_BL.device)
        start_B = low_B + (uniform_B * (high_B - low_B + 1)).long()
        end_B = end_B.minimum(start_B + window)
    kept_BL = (index_L >= start_B.unsqueeze(1)) & (index_L < end_B.unsqueeze(1))
    predicts_BL = F.pad(mask_BL[:, 1:] & kept_BL[:, 1:], (0, 1)) & kept_BL
    logprob_TM = target.logprob_BLM[predicts_BL]
    arrays = {
        "tokens": tokens_BL[kept_BL].to(torch.int32),
        "start": start_B.to(torch.int32),
        "length": (end_B - start_B).to(torch.int32),
        "response": (first_B - start_B).clamp(min=0).to(torch.int32),
    }
    token_TM = None if target.token_BLM is None else target.token_BLM[predicts_BL]
    if 0 < top < logprob_TM.shape[-1]:
        logprob_TM, at_TM = logprob_TM.topk(top)
        token_TM = at_TM if token_TM is None else token_TM.gather(-1, at_TM)
    if token_TM is not None:
        arrays["target_tokens"] = token_TM.to(torch.int32)
    arrays["target_logprobs"] = _half(logprob_TM)
    if features_BLE is not None:
        embedded, inverse = tokens_BL[kept_BL].unique(return_inverse=True)
        embeds_ND = embeds_BLD[kept_BL]
        embeds_UD = embeds_ND.new_zeros(len(embedded), embeds_ND.shape[-1])
        embeds_UD[inverse] = embeds_ND  # equal tokens have equal embeddings
        arrays |= {
            "features": _half(features_BLE[kept_BL]),
            "embedded": embedded.to(torch.int32),
            "embeds": _half(embeds_UD),
        }
    return {name: tensor.cpu().numpy() for name, tensor in arrays.items()}


def unpack(arrays: Arrays, device: str = "cpu") -> Supervision:
    """Turn the arrays that `pack` made back into supervision, padded again.

    Raises:
        KeyError, ValueError, RuntimeError, IndexError: the arrays do not fit together.
    """

    def tensor(name: str) -> torch.Tensor:
        array = arrays[name]
        return torch.from_numpy(array.astype(np.float32 if array.dtype == np.float16 else np.int64)).to(device)

    start_B, length_B, response_B = tensor("start"), tensor("length"), tensor("response")
    L = int(length_B.max())
    index_L = torch.arange(L, device=device)
    kept_BL = index_L < length_B.unsqueeze(1)
    mask_BL = kept_BL & (index_L >= response_B.unsqueeze(1))
    # No kept position comes before the first one of a window, so nothing can predict its token.
    predicts_BL = F.pad(mask_BL[:, 1:], (0, 1))

    tokens_N = tensor("tokens")
    target = Target(
        _spread(tensor("target_logprobs"), predicts_BL),
        _spread(tensor("target_tokens"), predicts_BL) if "target_tokens" in arrays else None,
    )
    features_BLE = embeds_BLD = None
    if "features" in arrays:
        features_BLE = _spread(tensor("features"), kept_BL)
        embeds_BLD = _spread(tensor("embeds")[torch.searchsorted(tensor("embedded"), tokens_N)], kept_BL)
    return Supervision(_spread(tokens_N, kept_BL), mask_BL, target, features_BLE, embeds_BLD, start_B)


def size(arrays: Arrays) -> int:
    """Return the size of the arrays in bytes."""
    return sum(array.nbytes for array in arrays.values())


def _half(tensor: torch.Tensor) -> torch.Tensor:
    limit = torch.finfo(torch.float16).max
    return tensor.clamp(-limit, limit).to(torch.float16)
