"""Reading prompts: in which passes."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from asyncspec.engine import prompts


@given(st.lists(st.integers(1, 400), min_size=1, max_size=8), st.booleans())
def test_prompts_are_read_in_the_passes_that_cost_least(lengths, packs):
    lengths.sort(reverse=True)

    def cost(counts):
        ends = itertools.accumulate(counts)
        parts = [lengths[end - count : end] for end, count in zip(ends, counts)]
        padded = [len(part) * part[0] for part in parts]
        attended = [n * part[0] / prompts.ATTENDED_TOKEN for n, part in zip(padded, parts)]
        return prompts.PASS_TOKENS * len(parts) + (sum(lengths) + sum(attended) if packs else sum(padded))

    def ways(count):
        return [[first, *rest] for first in range(1, count + 1) for rest in ways(count - first)] if count else [[]]

    assert cost(prompts.passes(lengths, packs)) <= min(map(cost, ways(len(lengths)))) + 1e-6
