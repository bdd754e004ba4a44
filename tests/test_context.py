"""Rows that several ranks share. That their gradients are those of one rank: test_parallel.py."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.models.attention import Packing
from asyncspec.models.context import SharedPacking

PACKINGS = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 12), min_size=1, max_size=4)), min_size=1, max_size=4
)


def shared(sizes, size):
    whole = Packing.of(sizes)
    return whole, [SharedPacking(whole.segments, whole.device, rank=rank, size=size) for rank in range(size)]


def seen_by_definition(packing):
    """bool [L, L]: a prompt sees itself up to each token; a response sees its prompt and itself."""
    sees = torch.zeros(packing.tokens, packing.tokens, dtype=torch.bool)
    for s in packing.segments:
        for start, n in [(s.start, s.prompt), *zip(s.starts, s.lengths)]:
            sees[start : start + n, s.start : s.responses] = start != s.start
            sees[start : start + n, start : start + n] = torch.ones(n, n).tril().bool()
    return sees


@given(PACKINGS, st.integers(1, 5))
def test_the_ranks_blocks_are_the_rows_attention(sizes, size):
    whole, parts = shared(sizes, size)
    padded = 2 * size * parts[0].piece
    count = torch.zeros(padded, padded, dtype=torch.int64)
    for part in parts:
        for block in part.blocks:
            rows = part.own_C[block.first : block.end]
            for first, end, causal in block.stretches:
                for offset, row in enumerate(rows):
                    count[row, first : first + offset + 1 if causal else end] += 1
    assert torch.equal(count[: whole.tokens, : whole.tokens], seen_by_definition(whole).long())
    assert not count[: whole.tokens, whole.tokens :].any() and count.diagonal().eq(1).all()


@given(PACKINGS, st.integers(1, 5))
def test_every_token_is_one_rank_s_and_every_response_token_is_predicted_once(sizes, size):
    whole, parts = shared(sizes, size)
    assert torch.equal(torch.cat([part.own_C for part in parts])[parts[0].order_L], torch.arange(len(parts[0].order_L)))
    predicted = []
    for part in parts:
        mine_U, before_U = part.own_predicting()
        assert torch.equal(part.own_C[before_U], whole.predicting()[mine_U])
        predicted.append(mine_U)
        values = torch.arange(whole.tokens) + 1
        assert torch.equal(part.part(values), torch.where(part.own_C < whole.tokens, part.own_C + 1, 0))
    assert torch.equal(torch.cat(predicted).sort()[0], torch.arange(len(whole.predicting())))


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_the_ranks_have_equal_parts_of_a_long_sequence_s_attention(size):
    """Within 5%: the last piece is filled up, here with 13 tokens that see hardly anything."""
    _, parts = shared([(100, [6000])], size)
    work = [
        sum(
            (block.end - block.first) * (b - a) / (1 + causal)
            for block in part.blocks
            for a, b, causal in block.stretches
        )
        for part in parts
    ]
    assert max(work) < 1.05 * min(work)
