"""Checkpoints: each is whole or ignored, the newest whole one is found, and damage is named."""

import pytest
import torch
from directories import limited_files

from asyncspec.ledger import checkpoint


def module_and_optimizer(seed=0):
    torch.manual_seed(seed)
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    return module, torch.optim.AdamW(module.parameters(), lr=1e-2)


def step(module, optimizer, seed):
    module(torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def saved(tmp_path, versions, keep=2):
    """Train a module and save a checkpoint at each version; return {version: parameters}."""
    module, optimizer = module_and_optimizer()
    checkpoints, states = checkpoint.Checkpoints(tmp_path, "trainer", keep), {}
    for version in versions:
        step(module, optimizer, version)
        checkpoints.save(version, {"learned": checkpoint.learned(module, optimizer), "version": version})
        states[version] = [p.detach().clone() for p in module.parameters()]
        step(module, optimizer, 1000)  # training continues while the checkpoint is written
        with torch.no_grad():
            for parameter, kept in zip(module.parameters(), states[version]):
                parameter.copy_(kept)
        assert checkpoints.saved(wait=True) == version
    return states


def test_a_loaded_checkpoint_continues_exactly_like_the_saved_model(tmp_path):
    module, optimizer = module_and_optimizer()
    step(module, optimizer, 1)
    checkpoints = checkpoint.Checkpoints(tmp_path, "trainer", 1)
    checkpoints.save(1, {"learned": checkpoint.learned(module, optimizer), "count": [3, 4]})
    step(module, optimizer, 2)  # after the snapshot: not in it
    assert checkpoints.saved(wait=True) == 1
    other, other_optimizer = module_and_optimizer(seed=9)
    state = {"learned": checkpoint.learned(other, other_optimizer), "count": [0, 0]}
    checkpoint.load(checkpoint.where(tmp_path, "trainer", 1), state)
    assert state["count"] == [3, 4]
    step(other, other_optimizer, 2)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters()))


def test_the_newest_checkpoints_are_kept_and_the_newest_is_found(tmp_path):
    saved(tmp_path, range(1, 5), keep=2)
    assert checkpoint.newest(tmp_path, "trainer") == (4, tmp_path / "checkpoints" / "trainer-000004")
    assert checkpoint.newest(tmp_path, "trainer", at_most=3)[0] == 3
    assert checkpoint.newest(tmp_path, "trainer", at_most=2) is None and checkpoint.newest(tmp_path, "draft") is None
    checkpoint.drop_after(tmp_path, "trainer", 3)
    assert checkpoint.newest(tmp_path, "trainer")[0] == 3


@pytest.mark.parametrize(
    "harm,named",
    [
        (
            lambda path: (path / "__0_0.distcp").write_bytes((path / "__0_0.distcp").read_bytes()[:-1]),
            "__0_0.distcp has",
        ),
        (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp: No such file"),
        (lambda path: flip(path / "__0_0.distcp"), "__0_0.distcp has changed since it was written"),
        (lambda path: flip(path / ".metadata"), ".metadata has changed since it was written"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json: No such file"),
        (lambda path: (path / "manifest.json").write_text("{"), "manifest.json is damaged"),
        (lambda path: (path / "manifest.json").write_text('{"files": 3}'), "manifest.json is damaged"),
    ],
    ids=["shortened", "missing", "bit", "metadata", "no manifest", "torn manifest", "other manifest"],
)
def test_a_damaged_checkpoint_is_skipped_and_named(tmp_path, harm, named):
    saved(tmp_path, [1, 2])
    harm(checkpoint.where(tmp_path, "trainer", 2))
    told = []
    assert checkpoint.newest(tmp_path, "trainer", told.append)[0] == 1
    assert len(told) == 1 and told[0].startswith("checkpoint trainer-000002 is skipped: ") and named in told[0]


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_an_unfinished_checkpoint_is_ignored(tmp_path):
    saved(tmp_path, [1])
    final = checkpoint.where(tmp_path, "trainer", 1)
    final.rename(final.with_name("trainer-000007.partial"))
    assert checkpoint.newest(tmp_path, "trainer") is None


def test_a_full_disk_raises_an_error_and_leaves_earlier_checkpoints_intact(tmp_path):
    module, optimizer = module_and_optimizer()
    saved(tmp_path, [1])
    checkpoints = checkpoint.Checkpoints(tmp_path, "trainer", 2)
    with limited_files(2000):
        checkpoints.save(2, {"learned": checkpoint.learned(module, optimizer)})
        with pytest.raises(OSError, match="checkpoint of version 2: .Errno 27. File too large"):
            checkpoints.saved(wait=True)
    assert checkpoint.newest(tmp_path, "trainer")[0] == 1 and not list((tmp_path / "checkpoints").glob("*.partial"))
    checkpoints.save(3, {"learned": checkpoint.learned(module, optimizer)})
    assert checkpoints.saved(wait=True) == 3


def test_a_folder_that_cannot_be_made_is_an_error_of_the_system(tmp_path):
    module, optimizer = module_and_optimizer()
    checkpoints = checkpoint.Checkpoints(tmp_path, "trainer", 2)
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(OSError, match="checkpoint of version 1: .Errno 17. File exists"):
        checkpoints.save(1, {"learned": checkpoint.learned(module, optimizer)})
    assert not checkpoints.busy


def test_a_large_checkpoint_is_chosen_by_its_sizes_and_summed_by_the_ranks_that_load_it(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SUMMED_AT_ONCE", 1000)
    module, optimizer = module_and_optimizer()
    saved(tmp_path, [1, 2])
    path = checkpoint.where(tmp_path, "trainer", 2)
    flip(path / "__0_0.distcp")  # the second of its files by name
    monkeypatch.setattr(checkpoint, "_crc", lambda file, crc=checkpoint._crc: read.append(file.name) or crc(file))
    read = []
    assert checkpoint.newest(tmp_path, "trainer")[0] == 2 and read == []
    state = {"learned": checkpoint.learned(module, optimizer), "version": 0}
    checkpoint.load(path, state, 0, 2)
    assert read == [".metadata"]
    with pytest.raises(OSError, match="trainer-000002: __0_0.distcp has changed since it was written; it is now .*ed,"):
        checkpoint.load(path, state, 1, 2)
    assert checkpoint.newest(tmp_path, "trainer")[0] == 1
