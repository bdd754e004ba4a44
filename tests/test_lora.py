"""Low-rank adapters: what they compute, how they travel, and what a run with them leaves behind."""

import json
import subprocess
import sys
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from groups import accumulate, group_of, ticket_of
from runs import check_finished, in_ranks, rows, train
from safetensors.torch import load_file
from test_parallel import group as numbered_group
from test_parallel import shape as shape_of

from asyncspec.config import Config, TrainerConfig, load, resolve_path
from asyncspec.errors import ConfigError
from asyncspec.launch import estimate
from asyncspec.models import frozen, lora, lora_files, policy, sizes
from asyncspec.models.parallel import Ranks
from asyncspec.models.shape import Lora
from asyncspec.rl.accumulate import GradientAccumulator
from asyncspec.rl.batch import from_message, to_message
from asyncspec.rl.observed import adapter_gaps, without_adapters, wrong_generators
from asyncspec.rl.scorer import Scorer
from asyncspec.wire.layout import Layout

TINY = resolve_path("asset:tiny/policy")
ALL = Lora(4, 8.0, "all-linear")
FAMILIES = ["qwen3", "qwen2", "llama"]


def moved(model, seed=1):
    """Give adapters values as after some training."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in lora.trained(model).items():
            if name.endswith(lora.B):
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=g))
    return model


def saved(kind, directory, tied=False):
    """Write a random policy of a family; return the directory and the shape."""
    torch.manual_seed(0)
    shape = replace(shape_of(tied, kind), vocab_size=64, max_positions=1024)
    model = policy.build(shape)
    model.init_states()
    policy.save(model, shape, directory, TINY)
    return directory, shape


def tokens(seed=0):
    return torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
@pytest.mark.parametrize("targets", ["all-linear", "attention", "mlp"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_merged_policy_computes_what_policy_and_adapters_do_apart(tmp_path, kind, targets):
    """Tolerance: float32 sums in another order."""
    directory, _ = saved(kind, tmp_path)
    of = Lora(3, 6.0, targets)
    apart, _ = policy.load(directory, adapters=of)
    before, _ = policy.load(directory)
    assert torch.equal(apart(tokens()), before(tokens()))  # new adapters change nothing
    moved(apart)
    expected = apart(tokens())
    assert (expected - before(tokens())).abs().max() > 0.1
    with lora.disabled(apart):
        assert torch.equal(apart(tokens()), before(tokens()))
    tensors = frozen.Base(directory, of, torch.float32).merged(lora.trained(apart))
    assert set(tensors) == {name for name, _ in before.named_parameters()}
    whole, _ = policy.load(directory)
    for version in range(3):  # each version is made of the frozen weights, so nothing adds up
        for name, parameter in whole.named_parameters():
            parameter.copy_(tensors[name])
        torch.testing.assert_close(whole(tokens()), expected, atol=1e-4, rtol=0, msg=f"version {version}")


@torch.no_grad()
@pytest.mark.parametrize("kind", FAMILIES)
def test_peft_loads_the_files(tmp_path, kind):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    directory, shape = saved(kind, tmp_path / "policy", tied=kind == "qwen2")
    ours = moved(policy.load(directory, adapters=ALL)[0])
    lora_files.write(tmp_path / "adapter", lora.trained(ours), ALL, shape, torch.float32, str(directory))
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(directory), tmp_path / "adapter")
    torch.testing.assert_close(theirs(tokens()).logits, ours(tokens()), atol=1e-4, rtol=0)


def optimizer_step(model, ranks=None, recompute=False):
    trainer = TrainerConfig(tokens_per_pass=1 << 20 if ranks is None else 60)
    trainer.optimizer.lr, trainer.optimizer.warmup_steps, trainer.optimizer.eps = 1e-2, 0, 1e-3
    return GradientAccumulator(model, Config(trainer=trainer), ranks)


def adapted(kind="qwen3", tied=True):
    torch.manual_seed(0)
    model = policy.build(shape_of(tied, kind), adapters=ALL)
    model.init_states()
    for parameter in lora.trained(model).values():
        parameter.data.normal_(0, 0.1)
    return model


def work(rank, config, port, results):
    """Take a step as one of several ranks; tell the gathered gradients, adapters and what this rank holds."""
    torch.set_num_threads(1)
    ranks = Ranks("trainer", rank, config.ranks, config.tensor_parallel, "float32", config.replicas)
    ranks.join("127.0.0.1", port, "cpu", 60, 60)
    model, gathered = adapted(), {}
    ranks.shard(model, trained=True, recompute=config.recompute)
    share = optimizer_step(model, ranks)
    layout = Layout.of(lora.trained(model))

    def whole(tensors):
        pieces = list(ranks.snapshot(layout, tensors, lambda: None).begin())
        return {n: v.numpy() for n, v in layout.views(torch.cat(pieces)).items()} if rank == 0 else None

    share.optimizers[0].register_step_pre_hook(
        lambda *_: gathered.update(grads=whole({n: p.grad for n, p in lora.trained(model).items()}))
    )
    handed = None
    if rank == 0:
        rounds = [each for number in range(4) for each in share.add(*numbered_group(number))] + share.flush()
        handed = [[to_message(0, each, passes is rounds[-1]) for each in passes] for passes in rounds]
    shared = [handed]
    dist.broadcast_object_list(shared)
    for passes in shared[0]:
        message, arrays = passes[ranks.data_rank]
        share.run(from_message(message, arrays), message.last)
    share.step()
    held = sum(p.to_local().numel() for p in model.parameters())
    results.put((rank, gathered["grads"], whole(lora.trained(model)), held))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "trainer",
    [
        TrainerConfig(ranks=2),
        pytest.param(TrainerConfig(ranks=4, tensor_parallel=2, recompute=True), marks=pytest.mark.slow),
    ],
)
def test_several_ranks_train_adapters_like_one(trainer):
    """Tolerance, for float32 sums in another order: 1e-5 of the largest gradient, and 1e-3 of a step of Adam."""
    said = {rank: rest for rank, *rest in in_ranks(trainer.ranks, work, trainer)}
    model, grads = adapted(), {}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    one = optimizer_step(model)
    one.optimizers[0].register_step_pre_hook(
        lambda *_: grads.update({n: p.grad.clone() for n, p in lora.trained(model).items()})
    )
    accumulate(one, [numbered_group(number) for number in range(4)])
    one.step()
    largest = max(float(grad.abs().max()) for grad in grads.values())
    for name, parameter in model.named_parameters():
        if name in grads:
            assert not torch.equal(parameter, before[name])
            torch.testing.assert_close(torch.from_numpy(said[0][0][name]), grads[name], atol=1e-5 * largest, rtol=0)
            torch.testing.assert_close(torch.from_numpy(said[0][1][name]), parameter.detach(), atol=1e-5, rtol=0)
        else:
            assert torch.equal(parameter, before[name]) and parameter.grad is None  # frozen
    total = sum(p.numel() for p in model.parameters())
    assert all(held < 1.3 * total / trainer.ranks + 400 for *_, held in said.values())


def scorer_of(*settings):
    scorer = Scorer(load("tiny", ["model.lora.rank=4", "model.lora.alpha=8", *settings]), "cpu")
    scorer.load()
    scorer.join("", 0, 0)
    return scorer


def sampled_group(number=0):
    g = np.random.default_rng(number)
    lengths = g.integers(3, 20, 6)
    return group_of(ticket_of(number, g.integers(0, 16, 5).tolist(), list(range(6))), [0.0] * 6), {
        "tokens": g.integers(0, 16, int(lengths.sum())).astype(np.int32),
        "lengths": lengths.astype(np.int32),
    }


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_the_reference_of_an_adapted_policy_is_the_policy_without_adapters(kl_coef):
    group, arrays = sampled_group()
    plain, scorer = Scorer(load("tiny"), "cpu"), scorer_of(f"rl.kl_coef={kl_coef}")
    plain.load()
    assert scorer.reference is None  # no second model in memory
    adapters = {name: parameter.clone() for name, parameter in lora.trained(moved(scorer.model)).items()}
    scorer.swap(adapters)
    scorer.comparing = True
    names, count = scorer.scores, len(arrays["tokens"])
    assert names == ["proximal", "reference" if kl_coef else "base"]
    scorer.add(group, arrays)
    found = dict(zip(names, scorer.collect(count)[0]))
    plain.add(group, arrays)
    expected = plain.collect(count)[0][0]
    np.testing.assert_allclose(found[names[1]], expected, atol=1e-5)
    assert np.abs(found["proximal"] - expected).mean() > 0.05
    assert scorer.scores == (["proximal", "reference"] if kl_coef else ["proximal"])  # the next groups are not compared


@pytest.mark.parametrize("scale", [1.0, 0.02])
def test_a_generator_without_its_adapters_is_named_however_little_was_learned(scale):
    group, arrays = sampled_group()
    scorer = scorer_of()
    moved(scorer.model)
    scorer.swap(
        {n: p * (scale if n.endswith(lora.B) else 1) for n, p in lora.trained(scorer.model).items()},
    )
    scorer.comparing, count = True, len(arrays["tokens"])
    scorer.add(group, arrays)
    proximal, base = scorer.collect(count)[0]
    rounding = np.random.default_rng(0).normal(0, 1e-6, count).astype(np.float32)
    scored = arrays | {"versions": np.full(count, 3, np.int32), "proximal": proximal, "base": base}
    group = msgspec.structs.replace(group, proximal_version=3)
    for sampled, wrong in ((proximal, False), (base, True)):
        gaps = adapter_gaps([(group, scored | {"behavior": sampled + rounding})])["generator0"]
        assert without_adapters(*gaps) is wrong, gaps
        said = wrong_generators([(group, scored | {"behavior": sampled + rounding})])
        assert ("generator0" in said and "its engine has no adapters" in said["generator0"]) is wrong
    older = scored | {"behavior": base, "versions": np.full(count, 2, np.int32)}
    assert adapter_gaps([(group, older)]) == {}  # nothing is said of tokens of another version


def test_adapters_are_less_than_a_tenth_of_the_policy_on_the_wire():
    model, shape = policy.load(TINY, adapters=Lora(4, 32.0, "all-linear"))
    adapters = Layout.of(lora.trained(model)).elements
    assert adapters == sizes.adapter_parameters(shape.to_hf(), Lora(4, 32.0, "all-linear"))
    assert adapters < 0.1 * sizes.parameters(shape.to_hf())


@pytest.mark.parametrize("targets", ["all-linear", "attention", "mlp"])
@pytest.mark.parametrize("kind", [*FAMILIES, "qwen3_moe"])
def test_the_number_of_adapters_follows_from_config_json(kind, targets):
    if (kind, targets) == ("qwen3_moe", "mlp"):
        return  # refused
    shape, of = shape_of(False, kind), Lora(3, 6.0, targets)
    model = policy.skeleton(shape, 1, of)
    assert sizes.adapter_parameters(shape.to_hf(), of) == sum(p.numel() for p in lora.trained(model).values())


def test_an_actor_needs_memory_for_what_is_trained_and_what_is_frozen():
    policy_8b = {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "vocab_size": 151936,
        "model_type": "qwen3",
    }
    config, whole = load("tiny", ["model.lora.rank=16", "rl.kl_coef=0.1"]), load("tiny", ["rl.kl_coef=0.1"])
    adapters, all_of_it = sizes.adapter_parameters(policy_8b, config.lora), sizes.parameters(policy_8b)
    trainer = estimate.of_actor(config, policy_8b, "trainer")
    assert trainer["optimizer"] == 8 * adapters and trainer["snapshot"] == 4 * adapters
    assert trainer["weights and gradients"] == 4 * all_of_it + 8 * adapters
    logprob, both = (estimate.of_actor(each, policy_8b, "logprob") for each in (config, whole))
    assert logprob["weights"] == 4 * (all_of_it + adapters) and both["weights"] == 8 * all_of_it  # with a reference
    assert estimate.of_actor(config, policy_8b, "generator")["arriving weights"] == 4 * adapters
    assert estimate.beside(config, policy_8b, "generator") == 4 * all_of_it


@pytest.mark.parametrize(
    "settings, said",
    [
        (["model.lora.rank=100"], "model.lora.rank=100: expected at most 64"),
        (
            ["model.lora.rank=4", "trainer.kind=mock", "engine.kind=mock"],
            "model.lora.rank=4: expected 0 with trainer.kind=mock",
        ),
        (["model.lora.rank=4", "model.lora.target_modules=q_proj"], "all-linear, attention"),
        (["model.lora.rank=4", "model.lora.alpha=0"], "model.lora.alpha=0"),
        (
            ["model.lora.rank=4", "speculation.method=mtp", "checkpoint.export_merged=false"],
            "checkpoint.export_merged=False",
        ),
    ],
)
def test_adapters_that_cannot_be_are_refused(settings, said):
    with pytest.raises(ConfigError) as refused:
        load("tiny", settings)
    assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.slow
def test_a_run_trains_adapters_alone_and_resumes(tmp_path):
    run_dir = tmp_path / "run"
    settings = ("model.lora.rank=4", "trainer.optimizer.lr=2e-3", "checkpoint.every=2", "checkpoint.export_every=4")
    train(run_dir, "--steps", "4", *settings)
    resumed = [sys.executable, "-m", "asyncspec.cli", "train", "--resume", str(run_dir), "--steps", "6"]
    assert subprocess.run(resumed, timeout=200).returncode == 0
    check_finished(run_dir, 6)
    assert any(row.get("lora/base_gap", 0) > 10 * row.get("lora/version_gap", 1) for row in rows(run_dir))
    for folder in run_dir / "exports" / "step-4", run_dir / "checkpoint" / "policy":
        adapters, of = (
            load_file(folder / "adapter" / lora_files.TENSORS),
            json.loads((folder / "adapter" / lora_files.CONFIG).read_text()),
        )
        assert of["r"] == 4 and any(bool(tensor.any()) for name, tensor in adapters.items() if "lora_B" in name)
        frozen, merged = (load_file(each / "model.safetensors") for each in (TINY, folder))
        for name in ("model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"):
            assert torch.equal(frozen[name], merged[name])
        stem = "base_model.model.model.layers.3.mlp.down_proj"
        added = adapters[f"{stem}.lora_B.weight"] @ adapters[f"{stem}.lora_A.weight"] * 32 / 4
        name = "model.layers.3.mlp.down_proj.weight"
        torch.testing.assert_close(merged[name], frozen[name] + added, atol=1e-6, rtol=0)
    saved_bytes = sum(file.stat().st_size for file in (run_dir / "checkpoints").glob("trainer-000004/*.distcp"))
    assert saved_bytes < 0.3 * 12 * sizes.parameters(json.loads((TINY / "config.json").read_text()))
