"""The form in which weights travel: snapshots, their parts by name, and checksums."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from versions import tensors

from asyncspec.wire.layout import Layout, checksum


def test_a_snapshot_is_a_copy_and_views_name_its_parts():
    live = tensors(3)
    layout = Layout.of(live)
    flat = layout.snapshot(live, "cpu")
    live["a"].zero_()
    views = layout.views(flat)
    assert flat.numel() == sum(t.numel() for t in live.values()) and views.keys() == live.keys()
    assert all((v == 3).all() for v in views.values())


@given(st.integers(1, 30_000), st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]), st.randoms())
def test_a_checksum_finds_a_changed_bit_and_swapped_rows(count, dtype, random):
    flat = torch.randn(count).to(dtype) if dtype.is_floating_point else torch.randint(0, 256, (count,), dtype=dtype)
    before, changed = checksum(flat), flat.clone()
    data = changed.view(torch.uint8)
    data[random.randrange(data.numel())] ^= 1 << random.randrange(8)
    assert checksum(changed) != before == checksum(flat.clone())
    rows = flat[: count // 8192 * 8192].view(-1, 4096)
    if len(rows) > 1 and not torch.equal(rows[0].view(torch.uint8), rows[1].view(torch.uint8)):
        assert checksum(torch.cat([rows[1], rows[0], flat[8192:]])) != before
