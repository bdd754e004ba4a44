"""The entropy of the policy's distributions and its gradient, computed chunk by chunk, equal those of whole logits."""

import pytest
import torch
import torch.distributed as dist
from groups import Largest, copied, padded, random_group
from hypothesis import given
from hypothesis import strategies as st
from runs import in_ranks

from asyncspec.config import Config, RLConfig
from asyncspec.models import head, packed
from asyncspec.models.policy import hidden_states
from asyncspec.rl.batch import Part, pack

EXACT = dict(atol=1e-10, rtol=1e-10)


def inputs(seed, T=9, V=13, D=5):
    g = torch.Generator().manual_seed(seed)
    hidden_TD, weight_VD = (torch.randn(n, D, generator=g, dtype=torch.float64) for n in (T, V))
    weights = torch.randn(2, T, generator=g, dtype=torch.float64)  # of the logprobs and of the entropies
    return hidden_TD, weight_VD, torch.randint(V, (T,), generator=g), weights


def expected(seed, temperature):
    """Return logprobs, entropies, and the gradients of their weighted sum, from whole logits."""
    hidden_TD, weight_VD, token_T, weights = inputs(seed)
    hidden_TD, weight_VD = hidden_TD.requires_grad_(), weight_VD.requires_grad_()
    logprob_TV = (hidden_TD @ weight_VD.T / temperature).log_softmax(-1)
    logprob_T = logprob_TV.gather(-1, token_T.unsqueeze(-1)).squeeze(-1)
    entropy_T = torch.distributions.Categorical(logits=logprob_TV).entropy()
    ((weights[0] * logprob_T) + (weights[1] * entropy_T)).sum().backward()
    return logprob_T.detach(), entropy_T.detach(), hidden_TD.grad, weight_VD.grad


@given(st.integers(0, 10**6), st.sampled_from([0.3, 1.0, 2.0]), st.integers(1, 12), st.sampled_from([None, 0, 3]))
def test_entropy_and_gradient_are_those_of_whole_logits(seed, temperature, rows, keep):
    hidden_TD, weight_VD, token_T, weights = inputs(seed)
    hidden_TD, weight_VD = hidden_TD.requires_grad_(), weight_VD.requires_grad_()
    head.ROWS, before = rows, head.ROWS
    try:
        found = head.chosen(hidden_TD, weight_VD, token_T, temperature, keep, entropy=True)
        ((weights[0] * found.logprob_T) + (weights[1] * found.entropy_T)).sum().backward()
    finally:
        head.ROWS = before
    for one, other in zip(
        (found.logprob_T, found.entropy_T, hidden_TD.grad, weight_VD.grad), expected(seed, temperature)
    ):
        torch.testing.assert_close(one.detach(), other, **EXACT)


def test_entropy_is_right_where_one_token_is_certain():
    hidden_TD = torch.eye(2, dtype=torch.float64).requires_grad_()
    weight_VD = torch.tensor([[1000.0, 0.0], [0.0, 0.0], [-1000.0, 0.0]], dtype=torch.float64)
    found = head.chosen(hidden_TD, weight_VD, torch.tensor([0, 0]), 1.0, entropy=True)
    found.entropy_T.sum().backward()
    torch.testing.assert_close(found.entropy_T.detach(), torch.tensor([1.0, 3.0], dtype=torch.float64).log(), **EXACT)
    assert hidden_TD.grad.isfinite().all()


def in_parts(rank, seed, sizes, port, results):
    """Compute with one part of the vocabulary; tell logprobs, entropies and this part's gradients."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(sizes))
    hidden_TD, weight_VD, token_T, weights = inputs(seed)
    hidden_TD = hidden_TD.requires_grad_()
    mine_VD = weight_VD.split(sizes)[rank].clone().requires_grad_()
    found = head.chosen(hidden_TD, mine_VD, token_T, 0.7, None, dist.group.WORLD, entropy=True)
    ((weights[0] * found.logprob_T) + (weights[1] * found.entropy_T)).sum().backward()
    told = (found.logprob_T.detach(), found.entropy_T.detach(), hidden_TD.grad, mine_VD.grad)
    results.put((rank, [tensor.tolist() for tensor in told]))
    dist.barrier()
    dist.destroy_process_group()


def test_ranks_that_divide_the_vocabulary_have_the_same_entropy_and_gradient():
    said = dict(in_ranks(2, in_parts, 3, [7, 6]))
    logprob_T, entropy_T, grad_TD, grad_VD = expected(3, 0.7)
    parts = [[torch.tensor(each, dtype=torch.float64) for each in said[rank]] for rank in (0, 1)]
    for part in parts:
        torch.testing.assert_close(part[0], logprob_T, **EXACT)
        torch.testing.assert_close(part[1], entropy_T, **EXACT)
    torch.testing.assert_close(parts[0][2] + parts[1][2], grad_TD, **EXACT)  # each has a summand
    torch.testing.assert_close(torch.cat([parts[0][3], parts[1][3]]), grad_VD, **EXACT)


def test_no_tensor_of_all_positions_and_the_vocabulary_is_made():
    hidden_TD, weight_VD = torch.randn(1600, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True)
    with Largest(1000) as largest:
        found = head.chosen(hidden_TD, weight_VD, torch.arange(1600) % 1000, 1.0, entropy=True)
        (found.logprob_T.sum() + found.entropy_T.sum()).backward()
    assert largest.numel == head.ROWS * 1000


def test_a_pass_has_the_entropies_of_its_response_tokens(small_policy):
    group, arrays = random_group(0, [2, 3], [3, 9, 1], 1)
    row = pack([Part(group.ticket.prompt_tokens, {name: arrays[name] for name in ("tokens", "lengths")})])
    assert packed.run(small_policy, row, 0.8).chosen.entropy_T is None
    found_T = packed.run(small_policy, row, 0.8, entropy=True).chosen.entropy_T
    tokens_GL, mask_GL = padded(group.ticket.prompt_tokens, arrays)
    logits_GLV = small_policy.lm_head(hidden_states(small_policy, tokens_GL))[:, :-1]
    whole = torch.distributions.Categorical(logits=logits_GLV[mask_GL[:, 1:]] / 0.8)
    torch.testing.assert_close(found_T, whole.entropy(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("coef", [0.1, 1.0])
def test_an_entropy_bonus_raises_the_entropy(small_policy, small_shape, coef):
    """All rewards are equal, so that nothing else has a gradient."""
    from groups import accumulate

    from asyncspec.rl.accumulate import GradientAccumulator

    config = Config(rl=RLConfig(entropy_coef=coef))
    config.trainer.optimizer.lr, config.trainer.optimizer.warmup_steps = 1e-3, 0
    accumulator, found = GradientAccumulator(copied(small_shape, small_policy), config), []
    for _ in range(3):
        group, arrays = random_group(0, [2, 3], [3, 9, 1], 1)
        group.rewards[:] = [1.0] * 3
        accumulate(accumulator, [(group, arrays)])
        found.append(accumulator.step()["loss/entropy"])
    assert 0 < found[0] < found[1] < found[2]
