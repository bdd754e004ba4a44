"""One pass of a policy over a packed row: the logprobs of all response tokens, and what a draft learns from.

Shape suffixes: L positions of the row, T response tokens, D model dimension, A auxiliary layers, M tokens kept of a
distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate

from asyncspec.models import experts, head
from asyncspec.models.attention import Packing
from asyncspec.models.context import SharedPacking, gathered
from asyncspec.models.policy import features, inputs_of


class Row(NamedTuple):
    """A packed row.

    tokens_1L: int64, without the last token of each response.
    packing: where prompts and responses lie.
    token_T: int64, all response tokens.
    experts_LMK: int, the experts that the generator chose for each token in each layer; None: they are not replayed.
    """

    tokens_1L: torch.Tensor
    packing: Packing
    token_T: torch.Tensor
    experts_LMK: torch.Tensor | None = None


class Scores(NamedTuple):
    """The results of a pass.

    chosen: logprobs of the response tokens, see `head.chosen`.
    features_LE: the inputs of the auxiliary layers, concatenated, float [L, A*D]; None without them.
    embeds_LD: the embeddings of the row's tokens; None without auxiliary layers.
    """

    chosen: head.Chosen
    features_LE: torch.Tensor | None = None
    embeds_LD: torch.Tensor | None = None


def row_of(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[np.ndarray]],
    device: str = "cpu",
    chosen_experts: Sequence[np.ndarray] = (),
) -> Row:
    """Pack prompts and the responses of each, at least one and none of them empty.

    Args:
        chosen_experts: of each prompt and its responses what the generator chose for the row's tokens, int [l, M, K].
    """
    sizes, tokens = [], []
    for prompt, its in zip(prompts, responses):
        sizes.append((len(prompt), [len(response) for response in its]))
        tokens += [np.asarray(prompt, np.int64), *(np.asarray(response[:-1], np.int64) for response in its)]
    chosen = np.concatenate([response for its in responses for response in its]).astype(np.int64)
    packed = torch.from_numpy(np.concatenate(tokens)).unsqueeze(0)
    replayed = torch.from_numpy(np.concatenate(chosen_experts)).to(device) if chosen_experts else None
    return Row(packed.to(device), Packing.of(sizes, device), torch.from_numpy(chosen).to(device), replayed)


def empty_row(device: str = "cpu") -> Row:
    """Return the shortest row, for a rank that only takes part in a pass."""
    return row_of([[0]], [[np.zeros(1)]], device)


def run(
    model,
    row: Row,
    temperature: float,
    keep: int | None = None,
    aux_layers=(),
    entropy: bool = False,
    context: dist.ProcessGroup | None = None,
) -> Scores:
    """Run one pass of a policy that is whole or sharded over several ranks. Collective if it is sharded.

    Args:
        temperature: the sampling temperature.
        keep: how many of the most probable tokens to keep of each distribution, see `head.chosen`.
        aux_layers: layers whose inputs are returned, detached; n_layers, one past the last, means the hidden states
            after the final norm.
        entropy: whether to compute entropies, see `head.chosen`.
        context: the ranks that share the row's tokens; each returns what is chosen for all of them, and neither `keep`
            nor `aux_layers` is given then. None: this rank has the row.
    """
    packing, tokens_1L, positions_1L = row.packing, row.tokens_1L, row.packing.positions()
    before, token_T, mine, replayed = packing.predicting(), row.token_T, None, row.experts_LMK
    if context is not None:
        packing = SharedPacking.of_group(packing, context)
        tokens_1L, positions_1L = (packing.part(each[0]).unsqueeze(0) for each in (tokens_1L, positions_1L))
        mine, before = packing.own_predicting()
        token_T = token_T[mine]
        replayed = None if replayed is None else packing.part(replayed)
    experts.replay(model, replayed)
    own = model.lm_head.__dict__.get("forward")  # torchtitan's, if the head is divided
    # The policy must be called as a whole, so the head's forward pass is replaced inside it.
    model.lm_head.forward = lambda hidden_1LD: _choose(
        model.lm_head.weight, hidden_1LD, before, token_T, temperature, keep, entropy
    )
    try:
        with inputs_of(model, {0, *aux_layers} if aux_layers else ()) as inputs:
            found = model(tokens_1L, positions_1L, packing)
    finally:
        del model.lm_head.forward
        if own is not None:
            model.lm_head.forward = own
    if mine is not None:
        logprob_T, entropy_T = (
            None if own_U is None else gathered(packing, own_U, mine, len(row.token_T))
            for own_U in (found.logprob_T, found.entropy_T)
        )
        return Scores(head.Chosen(logprob_T, entropy_T=entropy_T))
    return Scores(found, *features({layer: tensor.detach()[0] for layer, tensor in inputs.items()}, aux_layers))


def _choose(weight, hidden_1LD, before, token_T, temperature: float, keep: int | None, entropy: bool) -> head.Chosen:
    group = None
    if isinstance(weight, DTensor):
        group, weight = weight.device_mesh.get_group(), weight.to_local()
    if isinstance(hidden_1LD, DTensor):
        mesh = hidden_1LD.device_mesh
        # Each rank computes its part of the vocabulary, so the gradient that it returns is a summand.
        hidden_1LD = hidden_1LD.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Partial()])
    return head.chosen(hidden_1LD[0].index_select(0, before), weight, token_T, temperature, keep, group, entropy)
