"""Tickets and groups for tests, and the plain way to compute their logprobs."""

import numpy as np
import torch

from asyncspec.wire import messages as m


def ticket_of(ticket_id=0, prompt_tokens=(3, 12, 4, 13), seeds=(0, 1), step=0, min_version=0):
    return m.Ticket(
        ticket_id=ticket_id,
        step=step,
        min_version=min_version,
        prompt="1+2=",
        answer="3",
        prompt_tokens=list(prompt_tokens),
        seeds=list(seeds),
        issued=0.0,
    )


def group_of(ticket, rewards):
    return m.Group(
        ticket=ticket,
        generator="generator0",
        rewards=list(rewards),
        truncated=0,
        verifications=1,
        proposed=3,
        accepted=1,
        draft_version=0,
        phases=[],
    )


def padded(prompt, arrays):
    """Return tokens_GL, int64, and mask_GL, True at response tokens; it selects them in the order of `arrays`."""
    lengths = arrays["lengths"]
    tokens_GL = np.zeros((len(lengths), len(prompt) + int(lengths.max())), dtype=np.int64)
    tokens_GL[:, : len(prompt)] = prompt
    index_L = np.arange(tokens_GL.shape[1])
    mask_GL = (index_L >= len(prompt)) & (index_L < len(prompt) + lengths[:, None])
    tokens_GL[mask_GL] = arrays["tokens"]
    return torch.from_numpy(tokens_GL), torch.from_numpy(mask_GL)


def plain_logprobs(model, prompt, arrays, temperature=1.0):
    """Return the logprobs of a group's response tokens, from a padded pass and whole logits."""
    from asyncspec.models.policy import hidden_states

    tokens_GL, mask_GL = padded(prompt, arrays)
    logits_GLV = model.lm_head(hidden_states(model, tokens_GL))[:, :-1]
    logprobs_TV = (logits_GLV[mask_GL[:, 1:]] / temperature).log_softmax(-1)
    return logprobs_TV.gather(-1, tokens_GL[:, 1:][mask_GL[:, 1:]].unsqueeze(-1)).squeeze(-1)


def accumulate(accumulator, batches):
    """Add groups, and run all their passes in this rank. Return what the passes return."""
    rounds = [each for group, arrays in batches for each in accumulator.add(group, arrays)]
    return [accumulator.run(passes[0]) for passes in (*rounds, *accumulator.flush())]
