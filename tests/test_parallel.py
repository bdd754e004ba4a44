"""A policy shared by several ranks: real processes over gloo."""

import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from groups import accumulate, group_of, ticket_of
from hypothesis import given
from hypothesis import strategies as st
from runs import SILENT, Running, events, in_ranks, rows

from asyncspec.config import Config, OptimizerConfig, RLConfig, TrainerConfig, from_yaml, load, resolve_path
from asyncspec.ledger.audit import violations
from asyncspec.models import policy as policies
from asyncspec.models.parallel import Ranks, local, share
from asyncspec.models.policy import build
from asyncspec.models.shape import Experts, PolicyShape
from asyncspec.rl.accumulate import GradientAccumulator
from asyncspec.rl.batch import Part, from_message, to_message
from asyncspec.rl.learner import Learner
from asyncspec.rl.scorer import Scorer
from asyncspec.wire import layout as layouts
from asyncspec.wire.layout import Layout

GROUPS = 5


def shape(tied, kind):
    base = PolicyShape(
        vocab_size=48,
        dim=32,
        n_layers=3,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        hidden_dim=64,
        max_positions=128,
        rope_theta=1e4,
        norm_eps=1e-6,
        tied=tied,
        eos_token_id=1,
        pad_token_id=0,
    )
    return replace(base, model_type=kind, experts=Experts(4, 2, 32, True) if kind == "qwen3_moe" else None)


def policy(tied, kind):
    torch.manual_seed(0)
    model = build(shape(tied, kind))
    model.init_states()
    return biased(model)


def biased(model):
    """Give biases values, which start as zeros."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def group(number):
    g = np.random.default_rng(number)
    lengths = g.integers(1, 20, 4)
    n = int(lengths.sum())
    ticket = ticket_of(number, g.integers(0, 48, 5).tolist(), [0, 1, 2, 3])
    # The third group has no gradient: all its samples have the same reward.
    rewards = [1.0] * 4 if number == 2 else g.random(4).tolist()
    return group_of(ticket, rewards), {
        "tokens": g.integers(0, 48, n).astype(np.int32),
        "behavior": (-4 * g.random(n)).astype(np.float32),
        "proximal": (-4 * g.random(n)).astype(np.float32),
        "versions": np.zeros(n, np.int32),
        "lengths": lengths.astype(np.int32),
    }


# (rl, optimizer's kind) by name; the others use all of a response, of a step, or of the vocabulary.
ALGORITHMS = {
    "grpo": (RLConfig(), "adamw"),
    "reinforce_plus_plus, gspo": (
        RLConfig(
            advantage_estimator="reinforce_plus_plus",
            loss_type="gspo",
            loss_aggregation="seq-mean-token-mean",
            correction_level="sequence",
            entropy_coef=0.1,
        ),
        "muon",
    ),
}


def accumulator(model, ranks=None, sync="pass", algorithm="grpo"):
    # Adam normalizes a gradient near zero to its sign, which rounding decides; a large eps keeps its steps smooth.
    rl, kind = ALGORITHMS[algorithm]
    trainer = TrainerConfig(
        optimizer=OptimizerConfig(kind=kind, lr=1e-2, warmup_steps=0, eps=1e-3),
        tokens_per_pass=1 << 20 if ranks is None else 60,
        gradient_sync=sync,
    )
    return GradientAccumulator(model, Config(rl=rl, trainer=trainer), ranks)


def alone(tied, kind, steps=2, algorithm="grpo"):
    """Take the steps in one rank; return the first step's gradients, the final weights and the last statistics."""
    model = policy(tied, kind)
    one, grads = accumulator(model, algorithm=algorithm), []
    one.optimizers[0].register_step_pre_hook(
        lambda *_: grads.append({n: p.grad.clone() for n, p in model.named_parameters()})
    )
    for _ in range(steps):
        accumulate(one, [group(number) for number in range(GROUPS)])
        stats = one.step()
    return grads[0], {n: p.detach() for n, p in model.named_parameters()}, stats


def work(rank, config, tied, kind, steps, dtype, algorithm, port, results):
    """Take the same steps as one of several ranks. A rank without a group of its own adds nothing."""
    torch.set_num_threads(1)
    layouts.BUCKET_BYTES = 16000
    sizes = config.ranks, config.tensor_parallel, dtype, config.replicas, config.reduce_dtype
    ranks = Ranks("trainer", rank, *sizes, config.expert_parallel, config.context_parallel)
    ranks.join("127.0.0.1", port, "cpu", 60, 60)
    model, gathered = policy(tied, kind), {}
    ranks.shard(model, trained=True, recompute=config.recompute)
    share = accumulator(model, ranks, config.gradient_sync, algorithm)
    layout = Layout.of(dict(model.named_parameters()))

    def whole(tensors):
        pieces = list(ranks.snapshot(layout, tensors, lambda: None).begin())
        return {n: v.numpy() for n, v in layout.views(torch.cat(pieces)).items()} if rank == 0 else None

    def keep_first(*_):
        if "grads" not in gathered:
            gathered["grads"] = whole({n: p.grad for n, p in model.named_parameters()})

    share.optimizers[0].register_step_pre_hook(keep_first)
    share.run([Part([1, 2], group(0)[1] | {"advantages": np.ones(4, np.float32)})], last=False)
    share.clear()  # no trace is left of this pass
    for _ in range(steps):
        if rank == 0:
            rounds = [each for number in range(GROUPS) for each in share.add(*group(number))]
            rounds += share.flush() + [[[]] * ranks.data_size]
            handed = [[to_message(0, each, passes is rounds[-1]) for each in passes] for passes in rounds]
        shared = [handed if rank == 0 else None]
        dist.broadcast_object_list(shared)
        for passes in shared[0]:
            message, arrays = passes[ranks.data_rank]
            share.run(from_message(message, arrays), message.last)
        stats = share.step()
    held = sum(p.to_local().numel() for p in model.parameters())
    published, kept = (
        whole(dict(model.named_parameters())),
        {n: p.full_tensor().detach() for n, p in model.named_parameters()},
    )
    moments = [
        tensor
        for one in share.optimizers
        for state in one.state.values()
        for name, tensor in state.items()
        if name != "step"
    ]
    assert len(moments) >= len(kept)
    dtypes = {str(tensor.dtype) for tensor in [*model.parameters(), *moments, *kept.values()]}
    assert rank or all(np.array_equal(published[n], kept[n].numpy()) for n in kept)
    results.put((rank, gathered["grads"], published, stats, held, len(layout.buckets), dtypes))
    dist.barrier()
    dist.destroy_process_group()


def worked(config, tied, kind, steps=2, dtype="float32", algorithm="grpo"):
    """Run `work` in each rank; return {rank: result}."""
    said = in_ranks(config.ranks, work, config, tied, kind, steps, dtype, algorithm)
    return {rank: rest for rank, *rest in said}


@pytest.mark.parametrize(
    "kind, tied, trainer",
    [
        ("qwen3", True, TrainerConfig(ranks=3)),  # which divide no tensor evenly
        ("qwen3", False, TrainerConfig(ranks=2, tensor_parallel=2)),
        ("qwen3", True, TrainerConfig(ranks=4, tensor_parallel=2, replicas=2, recompute=True)),
        ("llama", False, TrainerConfig(ranks=4, replicas=2, gradient_sync="step")),
        ("qwen2", True, TrainerConfig(ranks=4, tensor_parallel=2)),
        ("llama", True, TrainerConfig(ranks=4, tensor_parallel=2, gradient_sync="step")),
        ("qwen3_moe", False, TrainerConfig(ranks=2, recompute=True, gradient_sync="step")),
        ("qwen3_moe", True, TrainerConfig(ranks=2, expert_parallel=2)),
        ("qwen3_moe", False, TrainerConfig(ranks=4, expert_parallel=2, gradient_sync="step")),
        ("qwen3_moe", True, TrainerConfig(ranks=4, expert_parallel=2, replicas=2, recompute=True)),
        ("qwen3_moe", False, TrainerConfig(ranks=4, expert_parallel=4)),
        ("qwen3", True, TrainerConfig(ranks=2, context_parallel=2)),
        ("llama", False, TrainerConfig(ranks=4, context_parallel=2, recompute=True, gradient_sync="step")),
        ("qwen2", True, TrainerConfig(ranks=4, tensor_parallel=2, context_parallel=2)),
        ("qwen3", False, TrainerConfig(ranks=4, context_parallel=4)),
        ("qwen3_moe", True, TrainerConfig(ranks=2, context_parallel=2, expert_parallel=2)),
    ],
)
@pytest.mark.slow
def test_several_ranks_take_the_same_steps_as_one(kind, tied, trainer):
    """Tolerance, for float32 sums in another order: 1e-5 of the largest gradient, and 1e-3 of a step of Adam."""
    said = worked(trainer, tied, kind)
    grads, parameters, stats = alone(tied, kind)
    total, largest = sum(p.numel() for p in parameters.values()), max(float(g.abs().max()) for g in grads.values())
    for name in parameters:
        torch.testing.assert_close(torch.from_numpy(said[0][0][name]), grads[name], atol=1e-5 * largest, rtol=0)
        torch.testing.assert_close(torch.from_numpy(said[0][1][name]), parameters[name], atol=1e-3 * 1e-2, rtol=0)
    # Passes of other sizes count other prompts twice, and a rank without responses counts a token.
    roughly = {name: pytest.approx(value, abs=0.1) for name, value in stats.items() if name.startswith("experts/")}
    for _, (_, _, found, held, buckets, _) in said.items():
        assert {name: found.pop(name) for name in roughly} == roughly
        assert found == pytest.approx({n: v for n, v in stats.items() if n not in roughly}, rel=1e-4, abs=1e-6)
        assert buckets > 3
        assert held < 1.2 * total * trainer.replicas / trainer.ranks + 200  # all tensor-parallel ranks hold the norms


@pytest.mark.parametrize(
    "trainer",
    [
        TrainerConfig(ranks=2),
        pytest.param(TrainerConfig(ranks=2, tensor_parallel=2), marks=pytest.mark.slow),
        TrainerConfig(ranks=2, context_parallel=2),
    ],
)
def test_ranks_take_the_same_step_with_an_algorithm_of_responses_steps_and_entropies(trainer):
    """Tolerance of the gradient as above. Muon computes in bfloat16, which rounds by 2**-8 of a step."""
    name = "reinforce_plus_plus, gspo"
    said = worked(trainer, False, "qwen3", steps=1, algorithm=name)
    grads, parameters, stats = alone(False, "qwen3", steps=1, algorithm=name)
    largest, before = max(float(g.abs().max()) for g in grads.values()), dict(policy(False, "qwen3").named_parameters())
    for each in parameters:
        torch.testing.assert_close(torch.from_numpy(said[0][0][each]), grads[each], atol=1e-5 * largest, rtol=0)
        step = parameters[each] - before[each].detach()
        error = torch.from_numpy(said[0][1][each]) - parameters[each]
        assert error.norm() < 2**-5 * step.norm() + 1e-5, each
    assert all(found == pytest.approx(stats, rel=1e-4, abs=1e-6) for _, _, found, *_ in said.values())


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_layers_have_the_same_gradient(recompute):
    """Tolerance, for float32 sums in another order: 1e-5 of the largest gradient."""
    model = policy(True, "qwen3")
    Ranks("trainer", 0).shard(model, trained=True, recompute=recompute, compiled=True)
    accumulate(accumulator(model), [group(number) for number in range(GROUPS)])
    tokens = sum(int(group(number)[1]["lengths"].sum()) for number in range(GROUPS))
    for name, expected in alone(True, "qwen3", steps=1)[0].items():
        found = model.get_parameter(name).grad / tokens
        torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.abs().max()) + 1e-6, rtol=0)


@pytest.mark.parametrize(
    "trainer",
    [
        TrainerConfig(),
        TrainerConfig(ranks=2, reduce_dtype="bfloat16"),
        pytest.param(TrainerConfig(ranks=2, context_parallel=2), marks=pytest.mark.slow),
    ],
)
def test_ranks_compute_in_16_bits_but_keep_and_publish_32(trainer):
    """Tolerance: bfloat16 rounds by up to 2**-8 of a number. A hundred such roundings, forward and backward through
    three layers, change the gradient by a few hundredths (measured: 0.033) and Adam's step a little more (0.046,
    because small elements weigh more there). The test allows 0.08. It also requires more than 2**-12, a difference
    that float32 would not reach.
    """
    said = worked(trainer, True, "qwen3", steps=1, dtype="bfloat16")
    grads, parameters, _ = alone(True, "qwen3", steps=1)
    before = {n: p.detach() for n, p in policy(True, "qwen3").named_parameters()}
    found_grads, published = ({n: torch.from_numpy(array) for n, array in arrays.items()} for arrays in said[0][:2])

    def apart(found, expected):
        error, size = (
            torch.cat([t.flatten() for t in tensors]).norm()
            for tensors in ([found[n] - expected[n] for n in expected], expected.values())
        )
        return float(error / size)

    assert 2**-12 < apart(found_grads, grads) < 0.08
    assert apart({n: published[n] - before[n] for n in before}, {n: parameters[n] - before[n] for n in before}) < 0.08
    # parameters, both moments, and published weights
    assert {dtype for *_, dtypes in said.values() for dtype in dtypes} == {"torch.float32"}
    assert all((tensor.bfloat16() != tensor).any() for tensor in published.values())


def test_a_rank_has_no_memory_for_weights_before_it_knows_its_share(tmp_path, monkeypatch):
    monkeypatch.setattr(Ranks, "join", lambda *_: None)
    monkeypatch.setattr(
        Ranks, "shard", lambda self, model, **_: seen.append({p.device.type for p in model.parameters()})
    )
    seen, learner = [], Learner(load("tiny", ["trainer.ranks=2"]), tmp_path, "cpu")
    monkeypatch.setattr(learner, "_hold", lambda: None)
    learner.load()
    learner.join("", 0, 1.0)
    whole, _ = policies.load(resolve_path("asset:tiny/policy"))
    assert seen == [{"meta"}] and all(map(torch.equal, learner.model.parameters(), whole.parameters()))


def filled(rank, directory, ranks, tensor_parallel, expert_parallel, port, results):
    """Load a policy as one of several ranks; tell how far its logits are from those of the whole policy."""
    torch.set_num_threads(1)
    sizes = [
        f"{actor}.{n}"
        for actor in ("trainer", "logprob")
        for n in (f"ranks={ranks}", f"tensor_parallel={tensor_parallel}", f"expert_parallel={expert_parallel}")
    ]
    config = load("tiny", [*sizes, f"model.path={directory}", "speculation.method=ngram"])
    whole, _ = policies.load(directory, positions=config.positions)
    tokens_BL, apart = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(0)), []
    for one in Learner(config, directory, "cpu", rank), Scorer(config, "cpu", "logprob", rank):
        one.load()
        one.join("127.0.0.1", port, 60)
        parameters = dict(one.model.named_parameters())
        for name, tensor in whole.named_parameters():
            assert torch.equal(local(parameters[name]), tensor[share(parameters[name])]), name
        with torch.no_grad():
            apart.append(float((policies.whole(one.model(tokens_BL)) - whole(tokens_BL)).abs().max()))
    results.put((rank, apart))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "kind, ranks, tensor_parallel, expert_parallel, tied",
    [
        ("llama", 4, 2, 1, True),
        ("qwen3", 3, 1, 1, True),
        ("qwen2", 4, 2, 1, False),
        ("qwen3_moe", 2, 1, 1, False),
        ("qwen3_moe", 4, 1, 2, True),
    ],
)
@pytest.mark.slow
def test_each_rank_loads_its_share_of_a_file(tmp_path, kind, ranks, tensor_parallel, expert_parallel, tied):
    """Tolerance: float32 sums in another order."""
    torch.manual_seed(0)
    of_file = replace(shape(tied, kind), vocab_size=64, max_positions=1024)
    model = build(of_file)
    model.init_states()
    biased(model)
    policies.save(model, of_file, tmp_path, resolve_path("asset:tiny/policy"))
    found = in_ranks(ranks, filled, tmp_path, ranks, tensor_parallel, expert_parallel)
    assert all(max(differences) < 1e-4 for _, differences in found)


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), min_size=1, max_size=12), st.integers(1, 300))
def test_buckets_hold_whole_tensors_and_leave_none_out(shapes, most):
    layout = Layout.of({str(i): torch.empty(s) for i, s in enumerate(shapes)})
    layouts.BUCKET_BYTES, before = 4 * most, layouts.BUCKET_BYTES
    try:
        buckets = layout.buckets
    finally:
        layouts.BUCKET_BYTES = before
    assert [end for _, _, end in buckets[:-1]] == [first for _, first, _ in buckets[1:]]
    if layout.elements:
        assert buckets[0][1] == 0 and buckets[-1][2] == layout.elements
    sizes = {name: torch.Size(s).numel() for name, s, _ in layout.entries}
    assert all(end - first == sum(sizes[n] for n in names) for names, first, end in buckets)
    assert all(end - first < most + max(sizes.values()) for _, first, end in buckets)


@pytest.mark.slow
def test_a_run_with_two_ranks_survives_the_loss_of_one_and_resumes_with_one(tmp_path):
    run_dir = tmp_path / "run"
    run = Running.new(run_dir, "--steps", "8", "trainer.ranks=2", "checkpoint.every=2", SILENT)
    run.wait_for_steps(2)
    run.signal("trainer_rank1", signal.SIGSTOP)
    run.wait_for(
        lambda: "trainer_rank1 is frozen" in run.output and run.output.count(" actors ready: ") >= 2, "another start"
    )
    run.wait_for_steps(4)
    run.signal("trainer_rank1", signal.SIGKILL)
    output = run.end()
    assert "started again from the last checkpoint" in output or "trainer_rank1 died" in output
    assert [row["step"] for row in rows(run_dir)] == list(range(8)) and max(
        row["lag/max"] for row in rows(run_dir)
    ) <= 1
    assert any(event["event"] == "resumed" for event in events(run_dir))
    Running.resumed(run_dir, "steps=10", "trainer.ranks=1").end()
    assert [
        from_yaml((run_dir / name).read_text()).trainer.ranks for name in ("config-until-step-8.yaml", "config.yaml")
    ] == [2, 1]
    assert [row["step"] for row in rows(run_dir)] == list(range(10))
    assert violations(events(run_dir), 1, 4, 10) == []
    assert (run_dir / "checkpoint" / "policy" / "model.safetensors").is_file() and os.listdir(run_dir / "checkpoints")
