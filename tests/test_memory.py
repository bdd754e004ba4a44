"""The host memory that loading takes, of real processes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from runs import forking

from asyncspec.config import load, resolve_path
from asyncspec.launch import estimate
from asyncspec.models import policy
from asyncspec.models.hf_files import write_checkpoint
from asyncspec.models.shape import PolicyShape

TINY = resolve_path("asset:tiny/policy")
SIZES = {
    "dim": 768,
    "n_layers": 12,
    "n_heads": 12,
    "n_kv_heads": 4,
    "head_dim": 64,
    "hidden_dim": 2048,
    "vocab_size": 32768,
    "tied": False,
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """A tiny policy and one of 125 million parameters, both in bfloat16, as published models are."""
    found = []
    for name, changes in ("tiny", {}), ("large", SIZES):
        shape = replace(PolicyShape.from_hf(TINY), **changes)
        skeleton = policy.skeleton(shape)
        tensors = {
            name: torch.full(p.shape, 0.01, dtype=torch.bfloat16)
            for name, p in policy.to_hf(skeleton, dict(skeleton.named_parameters())).items()
        }
        found.append(tmp_path_factory.mktemp("policies") / name)
        write_checkpoint(found[-1], shape.to_hf(), tensors, TINY)
    return found


def resident(field="VmRSS"):
    """Bytes of this process's memory: VmRSS at present, VmHWM at most since `forget_peak`."""
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(status[field].split()[0])


def forget_peak():
    Path("/proc/self/clear_refs").write_text("5")


def loaded(actor, rank, overrides, port, results):
    """Load as a rank of an actor does; tell the bytes at the peak."""
    torch.set_num_threads(1)
    from asyncspec.rl.learner import Learner
    from asyncspec.rl.scorer import Scorer

    config = load("tiny", overrides)
    one = (
        Learner(config, Path("/nonexistent"), "cpu", rank) if actor == "trainer" else Scorer(config, "cpu", actor, rank)
    )
    forget_peak()
    before = resident()
    one.load()
    one.join("127.0.0.1", port, 60)
    results.put(resident("VmHWM") - before)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def peak(actor, ranks, directory, overrides):
    """Return the bytes at the peak of the rank that takes most."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context, overrides = forking(), [*overrides, f"model.path={directory}"]
    results = context.Queue()
    children = [
        context.Process(target=loaded, args=(actor, rank, overrides, store.port, results)) for rank in range(ranks)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    return max(results.get(timeout=10) for _ in children)


@pytest.mark.slow
@pytest.mark.parametrize(
    "actor, ranks, dtype, kept",
    [("trainer", 1, "float32", 4), ("logprob", 1, "bfloat16", 2), ("trainer", 2, "float32", 2)],
)
def test_loading_takes_little_more_memory_than_what_is_kept(directories, actor, ranks, dtype, kept):
    overrides = [f"model.dtype={dtype}", "speculation.method=ngram", f"{actor}.ranks={ranks}"]
    tiny, large = (peak(actor, ranks, directory, overrides) for directory in directories)
    described = PolicyShape.from_hf(directories[1]).to_hf()
    P = estimate.parameters(described)
    assert kept < (large - tiny) / P < kept + 0.5
    block = estimate.loaded(load("tiny", overrides), described, actor, estimate.MAPPED)
    assert large - tiny == pytest.approx(kept * P + block, rel=0.1)
