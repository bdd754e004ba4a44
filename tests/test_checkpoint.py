"""Checkpoints: each is whole or ignored, the newest whole one is found, and damage is named."""

import json
import zlib

import pytest
import torch
from directories import limited_files

from asyncspec.errors import Damaged
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
        (lambda path: (path / "manifest.json").unlink(), "manifest.json: No such file"),
        (lambda path: (path / "manifest.json").write_text("{"), "manifest.json is damaged"),
        (lambda path: (path / "manifest.json").write_text('{"files": 3}'), "manifest.json is damaged"),
    ],
    ids=["shortened", "missing", "no manifest", "torn manifest", "other manifest"],
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
    checkpoints.save(1, {"learned": checkpoint.learned(module, optimizer)})
    with pytest.raises(OSError, match="checkpoint of version 1: .Errno 20. Not a directory"):
        checkpoints.saved(wait=True)
    assert not checkpoints.busy


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_changed_bytes_are_found_while_loading_and_the_checkpoint_before_is_the_newest(tmp_path, name):
    module, optimizer = module_and_optimizer()
    saved(tmp_path, [1, 2])
    path = checkpoint.where(tmp_path, "trainer", 2)
    flip(path / name)
    state = {"learned": checkpoint.learned(module, optimizer), "version": 0}
    assert checkpoint.newest(tmp_path, "trainer")[0] == 2  # its sizes are right
    said = f"checkpoint trainer-000002: {name} has changed since it was written; it is now trainer-000002.damaged"
    with pytest.raises(Damaged) as found:
        checkpoint.load(path, state)
    assert str(found.value) == said
    with pytest.raises(Damaged, match="another rank has found damage"):  # it read more slowly
        checkpoint.load(path, state)
    found = checkpoint.newest(tmp_path, "trainer")
    assert found[0] == 1
    checkpoint.load(found[1], state)
    assert state["version"] == 1


def test_a_checkpoint_of_an_earlier_version_is_loaded(tmp_path):
    """Its manifest has one sum for each file."""
    module, optimizer = module_and_optimizer()
    saved(tmp_path, [1])
    path = checkpoint.where(tmp_path, "trainer", 1)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"] = {name: [size, 12345] for name, (size, _) in manifest["files"].items()}
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoint.newest(tmp_path, "trainer") == (1, path)
    state = {"learned": checkpoint.learned(module, optimizer), "version": 0}
    checkpoint.load(path, state)
    assert state["version"] == 1


def test_every_byte_of_every_piece_is_summed(tmp_path):
    """A change of any tensor is found; bytes between the pieces, which nothing reads, do not exist."""
    saved(tmp_path, [1])
    path = checkpoint.where(tmp_path, "trainer", 1)
    files = json.loads((path / "manifest.json").read_text())["files"]
    assert sorted(files) == sorted(file.name for file in path.iterdir() if file.name != "manifest.json")
    for name, (size, pieces) in files.items():
        content, end = (path / name).read_bytes(), 0
        assert size == len(content) and (len(pieces) > 10 or name == ".metadata")
        for first, length, crc in pieces:
            assert first == end and zlib.crc32(content[first : first + length]) == crc
            end = first + length
        assert end == size


def test_saving_reads_nothing_back_and_loading_reads_each_file_once(tmp_path):
    """Counted by the kernel: the bytes that this process has read."""
    module, optimizer = module_and_optimizer()
    step(module, optimizer, 1)
    state = {"learned": checkpoint.learned(module, optimizer), "large": torch.zeros(4_000_000)}
    checkpoint.Checkpoints(tmp_path, "draft", 1).save(1, state)  # imports what it needs
    checkpoints = checkpoint.Checkpoints(tmp_path, "trainer", 1)
    before = bytes_read()
    checkpoints.save(1, state)
    assert checkpoints.saved(wait=True) == 1
    assert bytes_read() - before < 100_000
    before = bytes_read()
    _, path = checkpoint.newest(tmp_path, "trainer")
    assert bytes_read() - before < 100_000
    checkpoint.load(path, state)
    size = sum(file.stat().st_size for file in path.iterdir())
    assert size > 16_000_000 and size <= bytes_read() - before < size + 200_000


def bytes_read():
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])  # rchar
