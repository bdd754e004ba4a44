"""Groups are divided into passes: every response in exactly one, and the passes full."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.rl.batch import Part, Pool, divide, from_message, to_message

parts = st.builds(
    lambda number, prompt, lengths: Part(
        [number] * prompt,
        {"lengths": np.array(lengths, np.int32), "tokens": np.arange(sum(lengths)), "advantages": np.array(lengths)},
    ),
    st.integers(0, 99),
    st.integers(1, 6),
    st.lists(st.integers(1, 30), min_size=1, max_size=9),
)


def responses(parts):
    """Return all responses with their prompts, in no order."""
    found = [
        (tuple(part.prompt), tuple(tokens), int(advantage))
        for part in parts
        for tokens, advantage in zip(
            np.split(part.arrays["tokens"], np.cumsum(part.arrays["lengths"])[:-1]), part.arrays["advantages"]
        )
    ]
    assert all(len(tokens) == advantage for _, tokens, advantage in found)
    return Counter(found)


@given(parts, st.integers(1, 200))
def test_a_group_is_divided_into_passes_that_cover_it_within_the_limit(part, most):
    divided = divide(part, most)
    assert np.concatenate([p.arrays["tokens"] for p in divided]).tolist() == part.arrays["tokens"].tolist()
    assert responses(divided) == responses([part])
    assert all(len(p.arrays["lengths"]) == 1 or p.tokens <= most for p in divided)


@given(st.lists(parts, max_size=8), st.integers(1, 4), st.integers(1, 200))
def test_a_pool_hands_out_each_response_once_in_passes_within_the_limit(added, ranks, most):
    pool = Pool(ranks, most)
    rounds = [each for part in added for each in pool.add(part)]
    rounds += pool.flush()
    handed = [part for passes in rounds for each in passes for part in each]
    assert responses(handed) == sum((responses([part]) for part in added), Counter()) and not pool.flush()
    for passes in rounds:
        assert len(passes) == ranks and passes[0]  # rank 0 has work in every round
        for each in passes:
            assert sum(part.tokens for part in each) <= most or [len(part.arrays["lengths"]) for part in each] == [1]
            assert responses(from_message(*to_message(3, each))) == responses(each)


def test_passes_are_full_when_lengths_differ_much():
    """Lengths are log-normal, with median 6,000, sigma 0.6 and at most 16,384. Sixteen ranks train 1,024 responses."""
    rng, pool = np.random.default_rng(0), Pool(16, 32768)
    lengths = np.minimum(rng.lognormal(np.log(6000), 0.6, (64, 16)), 16384).astype(np.int32)
    added = [Part([0] * 300, {"lengths": each, "tokens": np.zeros(each.sum(), np.int32)}) for each in lengths]
    rounds = [each for part in added for each in pool.add(part)] + pool.flush()
    time = sum(max(sum(part.tokens for part in each) for each in passes) for passes in rounds)
    assert lengths.sum() / (16 * time) > 0.85
