"""Tickets and groups for tests, and the plain way to compute their logprobs."""

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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
        truncated=[False] * len(rewards),
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


def random_group(ticket_id, prompt, lengths, seed, vocabulary=6):
    """Return a group of random tokens, logprobs and rewards, and its arrays after logprob."""
    g = np.random.default_rng(seed)
    n = sum(lengths)
    ticket = ticket_of(ticket_id, prompt, list(range(len(lengths))))
    arrays = {
        "tokens": g.integers(0, vocabulary, n).astype(np.int32),
        "behavior": (-g.random(n)).astype(np.float32),
        "proximal": (-g.random(n)).astype(np.float32),
        "versions": np.zeros(n, np.int32),
        "lengths": np.array(lengths, np.int32),
    }
    return group_of(ticket, g.random(len(lengths)).tolist()), arrays


def copied(shape, model):
    """Return a copy of a policy that can be trained."""
    from asyncspec.models import policy

    copy = policy.build(shape)
    copy.load_state_dict(model.state_dict())
    return copy


def first_gradients(model, config, batches):
    """Return the gradient that the optimizer gets in a step over groups, and the step's statistics. The weights stay
    as they were.
    """
    from asyncspec.rl.accumulate import GradientAccumulator

    accumulator, grads = GradientAccumulator(model, config), {}
    accumulator.optimizers[0].register_step_pre_hook(
        lambda *_: grads.update({n: p.grad.clone() for n, p in model.named_parameters()})
    )
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    accumulate(accumulator, batches)
    stats = accumulator.step()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return grads, stats


class Largest(TorchDispatchMode):
    """Finds the number of elements of the largest tensor made in its context, of those with this last dimension."""

    def __init__(self, last):
        super().__init__()
        self.last, self.numel = last, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.ndim and tensor.shape[-1] == self.last:
                self.numel = max(self.numel, tensor.numel())
        return out
