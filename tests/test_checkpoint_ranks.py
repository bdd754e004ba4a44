"""Checkpoints of several ranks: real processes over gloo. A rank that is slow or cannot write costs no run."""

import errno
import json
import time
import zlib

import pytest
import torch
import torch.distributed as dist
from runs import Running, events, in_ranks, rows

from asyncspec.config import load
from asyncspec.ledger import checkpoint
from asyncspec.ledger.audit import violations
from asyncspec.models import policy
from asyncspec.rl.learner import Learner

OVERRIDES = ["speculation.method=ngram", "checkpoint.keep=5"]
LATE, FULL, TOO_LATE, WELL = 1, 2, 3, 4  # versions, by what rank 1 does
COLLECTIVE_S, LATE_S, PATIENCE_S = 5, 7, 12


def full():
    raise OSError(errno.ENOSPC, "No space left on device")


def work(rank, run_dir, port, results):
    """Write checkpoints as one of two ranks; rank 0 tells how each of them ended."""
    torch.set_num_threads(1)
    learner = Learner(load("tiny", [*OVERRIDES, "trainer.ranks=2"]), run_dir, "cpu", rank)
    learner.load()
    learner.join("127.0.0.1", port, COLLECTIVE_S)
    checkpoints = learner.checkpoints
    checkpoints._patience_s = PATIENCE_S
    for version in LATE, FULL, TOO_LATE, WELL:
        with torch.no_grad():
            for parameter in learner.model.parameters():
                parameter.add_(1)
        behavior = {
            LATE: lambda: time.sleep(LATE_S),
            FULL: full,
            TOO_LATE: lambda: time.sleep(PATIENCE_S + LATE_S),
        }
        learner.visit = behavior.get(version, lambda: None) if rank else lambda: None
        learner.ranks.meet(f"begin {version}", 60)
        learner.save(version)
        begun, late = checkpoints.busy, checkpoints.late
        if rank == 0:
            try:
                said = checkpoints.saved(wait=True)
            except OSError as error:
                said = str(error)
            results.put((version, begun, late, said, checkpoints.busy))
        while checkpoints.busy:
            time.sleep(0.05)
        learner.ranks.meet(f"ended {version}", 60)
        if rank:  # as in a run: the result is taken when the next checkpoint begins
            try:
                assert checkpoints.saved() == version and version in (LATE, WELL)
            except OSError as error:  # rank 0 has removed what it gave up
                assert {FULL: "No space left", TOO_LATE: "No such file"}[version] in str(error)
    if rank:
        learner.snapshot(export=True).begin()
    else:
        learner.save_policy(lambda: learner.snapshot(export=True))
    learner.ranks.meet("end", 60)
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_rank_that_is_slow_or_full_costs_at_most_one_checkpoint(tmp_path):
    """Two ranks write checkpoints and an export; one rank resumes from them."""
    run_dir = tmp_path / "run"
    told = {version: rest for version, *rest in in_ranks(2, work, run_dir, told=2)}
    assert all(begun and 1 in late for begun, late, *_ in (told[LATE], told[TOO_LATE]))
    assert told[LATE][2:] == [LATE, False]
    assert told[FULL][2:] == ["checkpoint of version 2: rank 1: [Errno 28] No space left on device", False]
    # Rank 1 still writes: the next checkpoint has to wait.
    said = f"checkpoint of version 3: rank 1: has not written its part within {PATIENCE_S} s"
    assert told[TOO_LATE][2:] == [said, True]
    assert told[WELL][2:] == [WELL, False]
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["trainer-000001", "trainer-000004"]
    _check_sums(checkpoint.where(run_dir, "trainer", WELL))
    _check_resuming(run_dir)


def _check_sums(path):
    """Each rank has summed its own files while it wrote them."""
    files = json.loads((path / "manifest.json").read_text())["files"]
    assert sorted(files) == sorted(file.name for file in path.iterdir() if file.name != "manifest.json")
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata"} <= set(files)
    for name, (size, pieces) in files.items():
        content = (path / name).read_bytes()
        assert size == len(content) == sum(length for _, length, _ in pieces)
        assert all(zlib.crc32(content[first : first + length]) == crc for first, length, crc in pieces)


def _check_resuming(run_dir):
    """One rank resumes from what two have written, and loads what they have exported."""
    assert checkpoint.newest(run_dir, "trainer") == (WELL, checkpoint.where(run_dir, "trainer", WELL))
    learner = Learner(load("tiny", OVERRIDES), run_dir, "cpu")
    learner.load()
    learner.join("", 0, 1.0)
    before = [parameter.detach().clone() for parameter in learner.model.parameters()]
    learner.restore(WELL)
    for old, new in zip(before, learner.model.parameters()):
        torch.testing.assert_close(new.detach(), old + 4, atol=1e-5, rtol=0)
    exported, _ = policy.load(run_dir / "checkpoint" / "policy")
    assert all(map(torch.equal, exported.parameters(), learner.model.parameters()))


@pytest.mark.slow
def test_a_run_survives_the_full_disk_of_one_rank(tmp_path):
    run_dir = tmp_path / "run"
    run = Running.new(
        run_dir,
        "--steps",
        "5",
        "trainer.ranks=2",
        "checkpoint.every=1",
        "deployment.faults=trainer_rank1:checkpoint:1:full",
    )
    output = run.end()
    said = "checkpoint of version 1: rank 1: [Errno 28] No space left on device; the run continues"
    assert output.count(said) == 1 and len(rows(run_dir)) == 5
    assert checkpoint.newest(run_dir, "trainer")[0] == 5
    Running.resumed(run_dir, "steps=6").end()
    assert [row["step"] for row in rows(run_dir)] == list(range(6))
    assert violations(events(run_dir), 1, 4, 6) == []


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_run_continues_from_the_one_before(tmp_path):
    """The damage is found by the ranks that load it: one of them reads the byte that has changed."""
    run_dir = tmp_path / "run"
    fields = ("trainer.ranks=2", "checkpoint.every=1", "checkpoint.keep=3")
    Running.new(run_dir, "--steps", "3", *fields).end()
    file = checkpoint.where(run_dir, "trainer", 3) / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    output = Running.resumed(run_dir, "steps=4").end()
    said = "checkpoint trainer-000003: __1_0.distcp has changed since it was written; it is now trainer-000003.damaged"
    assert said in output and "all actors restart from the last checkpoint" in output, output
    assert "resuming from version 2, with 2 steps trained" in output
    assert checkpoint.newest(run_dir, "trainer")[0] == 4
    assert [row["step"] for row in rows(run_dir)] == list(range(4))
    assert violations(events(run_dir), 1, 4, 4) == []
