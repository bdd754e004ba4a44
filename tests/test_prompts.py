"""How prompts are divided into prefill passes."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from asyncspec.engine import prompts


@given(st.lists(st.integers(1, 400), min_size=1, max_size=8), st.booleans(), st.sampled_from([48, 2048]))
def test_a_prefill_pass_takes_rows_until_padding_costs_more_than_another_pass(lengths, packs, pass_tokens):
    lengths.sort(reverse=True)
    counts = prompts.rows_of_passes(lengths, packs, pass_tokens)
    ends = list(itertools.accumulate(counts))
    assert ends[-1] == len(lengths) and min(counts) > 0

    def cost(start, end):
        padding = (end - start) * lengths[start] - sum(lengths[start:end])
        return padding * lengths[start] / prompts.ATTENDED_TOKEN if packs else padding

    for start, end in zip([0, *ends], ends):
        assert cost(start, end) <= pass_tokens
        assert end == len(lengths) or cost(start, end + 1) > pass_tokens
