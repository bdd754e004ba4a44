"""Sampling and verification as mathematics. Each statistical test fails by chance with probability ALPHA at most."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from asyncspec.speculation import counter_rng
from asyncspec.speculation.verify import Sampling, sample, sample_in_blocks, sampling_distribution, verify

ALPHA = 1e-5


def random_distributions(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(*shape, generator=generator)).softmax(-1)


def pooled(observed, expected, least=5):
    """Merge the rarest cells until each expects `least` counts; with fewer, the chi-square test is not valid."""
    expected, order = (expected * (observed.sum() / expected.sum())).sort()
    observed, rare = observed[order], int((expected.cumsum(0) < least).sum()) + 1
    return [torch.cat([x[:rare].sum()[None], x[rare:]]) for x in (observed, expected)]


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), draft_length=st.integers(1, 4), vocabulary=st.integers(2, 7))
def test_each_emitted_token_has_the_targets_distribution(seed, draft_length, vocabulary):
    # Positions are independent: if position j is emitted, its distribution is p[j] whatever came before.
    n = 20_000
    p_JV = random_distributions(seed, draft_length + 1, vocabulary)
    q_KV = random_distributions(seed + 1, draft_length, vocabulary)
    generator = torch.Generator().manual_seed(seed)
    draft_BK = torch.stack([torch.multinomial(q, n, replacement=True, generator=generator) for q in q_KV], 1)
    uniform = torch.rand(2, n, draft_length + 1, generator=generator)
    token_BJ, count_B = verify(
        p_JV.expand(n, -1, -1), q_KV.expand(n, -1, -1), draft_BK, uniform[0, :, :draft_length], uniform[1]
    )
    assert count_B.min() >= 1 and count_B.max() <= draft_length + 1
    for position in range(draft_length + 1):
        emitted = token_BJ[count_B > position, position]
        if len(emitted) < 100:
            continue
        observed = torch.bincount(emitted, minlength=vocabulary).double()
        expected = p_JV[position].double() / p_JV[position].double().sum() * len(emitted)
        observed, expected = pooled(observed, expected)
        if len(observed) > 1:
            assert chisquare(observed, expected).pvalue > ALPHA / 150  # 30 examples, at most 5 positions each


@given(
    seed=st.integers(0, 10**6),
    vocabulary=st.sampled_from([1, 2, 7, 64, 97, 150, 4096, 151936]),
    share=st.floats(0.0, 1.0),
)
def test_sampling_in_blocks_inverts_the_same_sum(seed, vocabulary, share):
    generator = torch.Generator().manual_seed(seed)
    weights = (4 * torch.randn(3, 2, vocabulary, generator=generator)).exp() * (
        torch.rand(3, 2, vocabulary, generator=generator) < share
    )
    weights[..., seed % vocabulary] += 1e-3  # at least one is positive
    uniform = torch.randint(2**23, (3, 2), generator=generator) / 2**23
    uniform[0] = torch.tensor([0.0, 1 - 2**-23])
    drawn = sample_in_blocks(weights, uniform)
    assert (weights.gather(-1, drawn.unsqueeze(-1)) > 0).all()
    end = weights.double().cumsum(-1)
    upto, threshold = end.gather(-1, drawn.unsqueeze(-1)).squeeze(-1), uniform * end[..., -1]
    before = upto - weights.gather(-1, drawn.unsqueeze(-1)).squeeze(-1)
    slack = 1e-12 * end[..., -1]
    assert ((before <= threshold + slack) & (threshold < upto + slack)).all()


def test_a_draft_equal_to_the_target_is_always_accepted():
    p_BJV = random_distributions(0, 1000, 4, 9)
    draft_BK = torch.stack([sample(p_BJV[:, j], torch.rand(1000)) for j in range(3)], 1)
    _, count_B = verify(p_BJV, p_BJV[:, :3], draft_BK, torch.rand(1000, 3), torch.rand(1000, 4))
    assert (count_B == 4).all()


def test_a_proposal_the_target_excludes_is_never_emitted():
    p_BJV = torch.tensor([0.0, 0.5, 0.5]).expand(500, 2, 3)
    q_BKV = torch.tensor([1.0, 0.0, 0.0]).expand(500, 1, 3)
    token_BJ, count_B = verify(
        p_BJV, q_BKV, torch.zeros(500, 1, dtype=torch.long), torch.rand(500, 1), torch.rand(500, 2)
    )
    assert (count_B == 1).all() and (token_BJ[:, 0] > 0).all()


@settings(max_examples=100)
@given(seed=st.integers(0, 10**6), u=st.integers(0, 2**23 - 1) | st.just(2**23 - 1))
def test_sample_never_returns_a_token_of_weight_zero(seed, u):
    weights = random_distributions(seed, 1, 8)
    weights[0, torch.randperm(8, generator=torch.Generator().manual_seed(seed))[:5]] = 0
    assert weights[0, sample(weights, torch.tensor([u * 2.0**-23]))[0]] > 0


@settings(max_examples=100)
@given(seed=st.integers(0, 10**6), temperature=st.floats(0.3, 2), top_p=st.floats(0.05, 1), top_k=st.integers(0, 9))
def test_sampling_distribution_keeps_the_most_probable_tokens(seed, temperature, top_p, top_k):
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))
    plain = (logits / temperature).softmax(-1)
    probs = sampling_distribution(logits, Sampling(temperature, top_p, top_k))
    torch.testing.assert_close(probs.sum(-1), torch.ones(3))
    for row, full in zip(probs, plain):
        kept = row > 0
        if top_k:
            assert kept.sum() <= top_k
        if (~kept).any():
            assert full[kept].min() >= full[~kept].max() - 1e-6
        # Kept tokens keep their proportions.
        torch.testing.assert_close(row[kept] / row[kept].sum(), full[kept] / full[kept].sum(), atol=1e-5, rtol=1e-4)


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert (sampling_distribution(logits, Sampling(top_p=0.75)) > 0).tolist() == [[True, True, False, False]]
    assert (sampling_distribution(logits, Sampling(top_p=0.85)) > 0).tolist() == [[True, True, True, False]]


def test_counter_rng_is_uniform_and_uncorrelated():
    seeds = torch.randint(0, 2**62, (2000,), generator=torch.Generator().manual_seed(0)).tolist()
    u = torch.from_numpy(counter_rng.uniforms(seeds, 50)).double().permute(2, 0, 1)
    assert u.min() >= 0 and u.max() < 1
    for stream in u:
        observed = torch.histc(stream.flatten(), 64, 0, 1)
        assert chisquare(observed).pvalue > ALPHA
    flat = u.reshape(3, -1)
    corr = torch.corrcoef(torch.cat([flat, u.roll(1, -1).reshape(3, -1)]))  # streams, and neighboring positions
    off = corr - torch.eye(6)
    assert off.abs().max() < 5 / flat.shape[1] ** 0.5  # 5 sigma, 15 pairs: error rate 1e-5


def test_counter_rng_does_not_depend_on_the_batch():
    together, alone = counter_rng.uniforms([5, -6, 2**63 - 1], 9), counter_rng.uniforms([-6], 12)
    assert (together[1] == alone[0, :9]).all()


def test_counter_rng_is_splitmix64():
    """The expected values are the published output of SplitMix64 from state 0. Its state grows by a constant; here the
    state is a multiple of it.
    """
    found = counter_rng._splitmix(np.arange(3, dtype=np.uint64))
    assert [hex(number) for number in found] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]
