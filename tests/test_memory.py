"""The host memory that loading takes, of real processes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from runs import in_ranks

from asyncspec.bench.memory import SHAPES, MemoryBenchmark
from asyncspec.config import load, resolve_path
from asyncspec.launch import estimate
from asyncspec.models import sizes
from asyncspec.models.contents import policy_tensors
from asyncspec.models.hf_files import write_checkpoint
from asyncspec.models.shape import PolicyShape
from asyncspec.rl.learner import Learner
from asyncspec.rl.scorer import Scorer

TINY = resolve_path("asset:tiny/policy")
SIZES = SHAPES["untied"] | {"n_layers": 12}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """A tiny policy and one of 125 million parameters, both in bfloat16, as published models are."""
    found = []
    for name, changes in ("tiny", {}), ("large", SIZES):
        shape = replace(PolicyShape.from_hf(TINY), **changes)
        tensors = {name: torch.full(size, 0.01, dtype=torch.bfloat16) for name, size in policy_tensors(shape).items()}
        found.append(tmp_path_factory.mktemp("policies") / name)
        write_checkpoint(found[-1], shape.to_hf(), tensors, TINY)
    return found


def resident(field="VmRSS"):
    """Bytes of this process's memory: VmRSS at present, VmHWM at most since `forget_peak`."""
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(status[field].split()[0])


def forget_peak():
    Path("/proc/self/clear_refs").write_text("5")


def learner_or_scorer(actor, rank, overrides, run_dir):
    config = load("tiny", overrides)
    return Learner(config, run_dir, "cpu", rank) if actor == "trainer" else Scorer(config, "cpu", actor, rank)


def loaded(one, port):
    one.load()
    one.join("127.0.0.1", port, 60)


def exported(learner, port):
    loaded(learner, port)
    dist.barrier()
    forget_peak()
    before = resident()
    if learner.ranks.rank:
        learner.snapshot(export=True).begin()
        dist.barrier()
    else:
        learner.save_policy(lambda: learner.snapshot(export=True))
        dist.barrier()
    return before


def measured(rank, act, actor, overrides, run_dir, port, results):
    """Do something as a rank of an actor; tell the bytes at the peak."""
    torch.set_num_threads(1)
    one = learner_or_scorer(actor, rank, overrides, run_dir)
    forget_peak()
    before = resident()
    before = act(one, port) or before
    results.put(resident("VmHWM") - before)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def peak(act, actor, ranks, directory, overrides):
    """Return the bytes at the peak of the rank that takes most."""
    overrides, run_dir = [*overrides, f"model.path={directory}"], directory.parent / "run"
    return max(in_ranks(ranks, measured, act, actor, overrides, run_dir))


@pytest.mark.slow
@pytest.mark.parametrize(
    "actor, ranks, dtype, kept",
    [("trainer", 1, "float32", 4), ("logprob", 1, "bfloat16", 2), ("trainer", 2, "float32", 2)],
)
def test_loading_takes_little_more_memory_than_what_is_kept(directories, actor, ranks, dtype, kept):
    overrides = [f"model.dtype={dtype}", "speculation.method=ngram", f"{actor}.ranks={ranks}"]
    tiny, large = (peak(loaded, actor, ranks, directory, overrides) for directory in directories)
    described = PolicyShape.from_hf(directories[1]).to_hf()
    P = sizes.parameters(described)
    assert kept < (large - tiny) / P < kept + 0.5
    block = estimate.loaded(load("tiny", overrides), described, actor, estimate.MAPPED)
    assert large - tiny == pytest.approx(kept * P + block, rel=0.1)


@pytest.mark.slow
def test_an_export_takes_a_snapshot_and_a_few_buckets(directories):
    """Of two ranks a snapshot in 16 bits takes one byte a parameter. A whole copy in float32 would take four more. The
    estimate is of a version that is published, in float32.
    """
    overrides = ["speculation.method=ngram", "trainer.ranks=2", "checkpoint.export_dtype=bfloat16"]
    described = PolicyShape.from_hf(directories[1]).to_hf()
    P = sizes.parameters(described)
    found = peak(exported, "trainer", 2, directories[1], overrides)
    assert P < found < 5 * P
    assert found < 2 * P + estimate.gathered(load("tiny", overrides), described, "trainer")


@pytest.mark.slow
def test_actors_hold_what_doctor_says_within_a_tenth():
    """One run of `bench memory`, which has ten others."""
    benchmark = MemoryBenchmark()
    try:
        found = benchmark.measure("two trainer ranks", 0)
    finally:
        benchmark.close()
    ratios = {name: value for name, value in found.items() if name.endswith("_ratio")}
    assert ratios.keys() == {"trainer_ratio", "logprob_ratio", "generator_ratio"}
    assert all(0.9 < ratio < 1.1 for ratio in ratios.values()), found
