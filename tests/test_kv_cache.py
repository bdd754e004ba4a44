"""The slot KV caches: which rows are grouped for attention, which tokens are computed, and what each attends to."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.engine import kv_cache, numpy_cache
from asyncspec.engine.backend import CpuBackend, TorchBackend
from asyncspec.engine.workspace import LayerShape


@given(st.lists(st.integers(1, 400), min_size=1, max_size=64))
def test_rows_are_split_into_groups_only_where_less_is_read(lengths):
    length_B = np.array(lengths)
    ends, read = kv_cache.split(length_B)
    groups = np.split(length_B, ends[:-1])
    assert ends[-1] == len(lengths) and all(map(len, groups)) and read == sum(len(g) * g.max() for g in groups)
    assert read + kv_cache.GROUP_GAIN * (len(groups) - 1) <= len(lengths) * max(lengths)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=20))
def test_a_packing_contains_the_needed_tokens_and_their_positions(counts):
    J, count_B = 8, np.array(counts)
    L, packed, of_BJ = numpy_cache.packing(count_B, J)
    B, token_BL = len(counts), np.arange(len(counts))[:, None] * 100 + np.arange(L)
    computed = token_BL.reshape(-1) if packed is None else token_BL.reshape(-1)[packed.at_T]
    found_BJ = token_BL if of_BJ is None else computed[of_BJ]
    needed_BJ = np.arange(J) < count_B[:, None]
    assert L == max(counts) and found_BJ.shape == (B, J)
    assert (found_BJ[needed_BJ] == (np.arange(B)[:, None] * 100 + np.arange(J))[needed_BJ]).all()
    assert (found_BJ // 100 == np.arange(B)[:, None]).all()  # tokens that are not needed come from the same row
    if packed is not None:
        assert (
            len(packed.at_T) % numpy_cache.PACKED == 0
            and sum(counts) <= len(packed.at_T) < sum(counts) + numpy_cache.PACKED
        )
        assert (computed[packed.of_N].reshape(B, L)[needed_BJ[:, :L]] == token_BL[needed_BJ[:, :L]]).all()


@pytest.mark.parametrize("kind", [CpuBackend, TorchBackend])
@pytest.mark.parametrize(
    "B,L,G,Q,P", [(1, 1, 1, 1, 40), (5, 1, 2, 3, 40), (4, 3, 2, 2, 512), (3, 4, 1, 5, 40), (2, 7, 3, 1, 40)]
)
def test_each_position_attends_to_all_cached_positions_up_to_itself(kind, B, L, G, Q, P):
    """Passes of L positions over rows of several lengths in two groups, then L passes of one position."""
    H, first, layers, R = 8, 2, 2, Q + 2
    shape, g = LayerShape(16, G, Q, H, 8, 1e-6, False), torch.Generator().manual_seed(0)
    backend = kind("cpu", torch.float32)
    cache = backend.cache(layers, first + B, P, shape)
    heads = torch.randn(B, P, G, R, H, generator=g)  # of the first layer; the second layer has them negated
    start_B = torch.arange(B) % 3

    def attended(access, position_BL):
        space = backend.workspaces(shape)(B, position_BL.shape[1])
        for layer in range(layers):
            now = heads.gather(1, position_BL.view(*position_BL.shape, 1, 1, 1).expand(-1, -1, G, R, H)) * (
                1 - 2 * layer
            )
            space.heads.tensor.copy_(now.reshape(-1, G * R * H))
            cache.write(layer, access, space)
            cache.attend(layer, access, space)
            out_BLGQH = space.attended.tensor.view(*position_BL.shape, G, Q, H)
            for row in range(B):
                for i, position in enumerate(position_BL[row].tolist()):
                    seen = (1 - 2 * layer) * heads[row, start_B[row] : position + 1]  # earlier positions hold zeros
                    q, k, v = (
                        (1 - 2 * layer) * heads[row, position, :, :Q],
                        seen[:, :, Q].transpose(0, 1),
                        seen[:, :, Q + 1].transpose(0, 1),
                    )
                    k, v = (torch.cat([t.new_zeros(G, int(start_B[row]), H), t], 1) for t in (k, v))
                    torch.testing.assert_close(
                        out_BLGQH[row, i], (q @ k.transpose(1, 2)).softmax(-1) @ v, atol=1e-5, rtol=1e-4
                    )

    def spans(last_B):
        half = max(1, B // 2)
        return [(end, int(last_B[begin:end].max()) + 1) for begin, end in ((0, half), (half, B)) if begin < end]

    for pass_ in range(2):
        position_BL = start_B.unsqueeze(1) + pass_ * L + torch.arange(L)
        attended(cache.at(first, position_BL, spans(position_BL[:, -1])), position_BL)
    position_BL = start_B.unsqueeze(1) + 2 * L + torch.arange(L)
    for i, access in enumerate(cache.at(first, position_BL, spans(position_BL[:, -1])).each()):
        attended(access, position_BL[:, i : i + 1])


@pytest.mark.parametrize("positions", [1, 417, 432, 500, 512, 1024])
def test_keys_start_at_cache_lines_that_do_not_alias(positions):
    keys = numpy_cache.NumpyKVCache(2, 3, positions, LayerShape(8, 2, 1, 4, 8, 1e-6, True)).keys
    assert keys.data_ptr() % 64 == 0 and all(stride % 16 == 0 for stride in keys.stride()[:-1])
    assert keys.stride(-2) >= positions and keys.stride(-2) % 512
