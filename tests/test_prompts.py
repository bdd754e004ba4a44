"""Reading prompts: in which passes."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from asyncspec.engine import prompts


@given(st.lists(st.integers(1, 400), min_size=1, max_size=8), st.booleans(), st.sampled_from([48, 2048]))
def test_prompts_are_read_in_the_passes_that_cost_least(lengths, packs, pass_tokens):
    lengths.sort(reverse=True)

    def cost(counts):
        ends = itertools.accumulate(counts)
        parts = [lengths[end - count : end] for end, count in zip(ends, counts)]
        padded = [len(part) * part[0] for part in parts]
        attended = [n * part[0] / prompts.ATTENDED_TOKEN for n, part in zip(padded, parts)]
        return pass_tokens * len(parts) + (sum(lengths) + sum(attended) if packs else sum(padded))

    def ways(count):
        return [[first, *rest] for first in range(1, count + 1) for rest in ways(count - first)] if count else [[]]

    assert cost(prompts.rows_of_passes(lengths, packs, pass_tokens)) <= min(map(cost, ways(len(lengths)))) + 1e-6
