"""Policies that transformers computes: packed rows, shares of ranks, files, and what is refused."""

import json
import shutil

import numpy as np
import pytest
import torch
import torch.distributed as dist
from groups import random_group
from runs import in_ranks
from safetensors.torch import load_file

from asyncspec.config import Config, OptimizerConfig, TrainerConfig, load, resolve_path
from asyncspec.errors import ConfigError
from asyncspec.models import CheckpointError, contents, foreign, packed, policy
from asyncspec.models.parallel import Ranks
from asyncspec.models.shape import PolicyShape
from asyncspec.rl.accumulate import GradientAccumulator

TINY = resolve_path("asset:tiny/policy")
WINDOW = 16  # shorter than the sequences here
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "initializer_range": 0.1,
}
FAMILIES = ["gemma3", "mistral", "qwen2"]


def made(kind, directory, **more):
    """Write a random model of a family with the shipped tokenizer; return the model."""
    import transformers

    config, model, fields = {
        "gemma3": (
            transformers.Gemma3TextConfig,
            transformers.Gemma3ForCausalLM,
            {"sliding_window": WINDOW, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
        ),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": WINDOW}),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    }[kind]
    torch.manual_seed(0)
    theirs = model(config(**{**SIZES, **fields, **more})).eval()
    theirs.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, directory / name)
    return theirs


def loaded(directory):
    shape = contents.check_policy(directory, "transformers")
    model = policy.skeleton(shape)
    policy.fill(model, directory, "cpu")
    return model, shape


def row(seed=0):
    """Return a packed row, and its prompts and responses: some of one token, some longer than the window."""
    g = np.random.default_rng(seed)
    prompts = [g.integers(0, 64, n) for n in (5, 9, 3)]
    responses = [[g.integers(0, 64, n) for n in lengths] for lengths in ((30, 1, 17), (40,), (1, 1))]
    return packed.row_of(prompts, responses), prompts, responses


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_packed_row_has_the_logprobs_and_gradients_of_single_sequences(tmp_path, kind):
    """The reference keeps a cache and makes its own masks, one sequence at a time. A cache, a mask of ones, or a mask
    without the family's window changes logprobs by 0.1 and more. Tolerance: float32 sums in another order.
    """
    theirs = made(kind, tmp_path)
    model, _ = loaded(tmp_path)
    given, prompts, responses = row()
    found = packed.run(model, given, 0.7).chosen.logprob_T
    expected = []
    for prompt, its in zip(prompts, responses):
        for response in its:
            logits = theirs(torch.from_numpy(np.concatenate([prompt, response])).unsqueeze(0)).logits[0] / 0.7
            logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            expected.append(logprobs.gather(-1, torch.from_numpy(response).unsqueeze(-1)).squeeze(-1))
    expected = torch.cat(expected)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    found.sum().backward()
    expected.sum().backward()
    for name, parameter in theirs.named_parameters():
        grad = model.get_parameter(foreign.PREFIX + name).grad
        torch.testing.assert_close(grad, parameter.grad, atol=1e-5 * float(parameter.grad.abs().max()), rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_filled_policy_has_the_buffers_of_transformers(tmp_path, kind):
    theirs = made(kind, tmp_path)
    model, _ = loaded(tmp_path)
    tokens = torch.randint(0, 64, (2, 60), generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(tokens), theirs(tokens).logits)
    assert {name for name, _ in model.named_parameters()} == {
        foreign.PREFIX + name for name, _ in theirs.named_parameters()
    }


def trainer_of(model, ranks=None):
    # a large eps keeps Adam's steps smooth where a gradient is near zero
    optimizer = OptimizerConfig(lr=1e-2, warmup_steps=0, eps=1e-3)
    return GradientAccumulator(model, Config(trainer=TrainerConfig(optimizer=optimizer)), ranks)


def steps(accumulator, rank):
    """Take two optimizer steps, of a group in each data rank."""
    for step in range(2):
        for number in range(2):
            group, arrays = random_group(2 * step + number, [3, 4, 5], [6, 9], seed=number, vocabulary=64)
            group.rewards[:] = [0.0, 1.0]
            rounds = accumulator.add(group, arrays)
        rounds += accumulator.flush()
        if rank:  # the first rank counts
            accumulator.tokens = accumulator.responses = accumulator.tokens_with_signal = 0
        for index, passes in enumerate(rounds):
            accumulator.run(passes[rank], last=index == len(rounds) - 1)
        accumulator.step()


def work(rank, directory, count, port, results):
    torch.set_num_threads(1)
    ranks = Ranks("trainer", rank, count)
    ranks.join("127.0.0.1", port, "cpu", 60, 60)
    model = policy.skeleton(contents.check_policy(directory, "transformers"))
    ranks.shard(model, trained=True, recompute=rank >= 0)
    policy.fill(model, directory, "cpu")
    foreign.check_head(model, "cpu")
    accumulator = trainer_of(model, ranks)
    steps(accumulator, rank)
    state = accumulator.state()  # finds each parameter by its name
    stepped = {name: p.full_tensor().detach().numpy() for name, p in model.named_parameters()}
    assert state and not any(p.grad is not None and p.grad.to_local().any() for p in model.parameters())
    policy.fill(model, directory, "cpu")
    logprob_T = packed.run(model, row(rank)[0], 1.0).chosen.logprob_T
    logprob_T.sum().backward()
    grads = {name: p.grad.full_tensor().numpy() for name, p in model.named_parameters()}
    held = sum(p.to_local().numel() for p in model.parameters())
    results.put((rank, logprob_T.detach().numpy(), grads, stepped, held))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["gemma3", pytest.param("mistral", marks=pytest.mark.slow)])
def test_two_ranks_have_the_gradients_of_one(tmp_path, kind):
    """Tolerance: float32 sums in another order."""
    made(kind, tmp_path)
    said = {rank: rest for rank, *rest in in_ranks(2, work, tmp_path, 2)}
    model, _ = loaded(tmp_path)
    for rank in range(2):
        found = packed.run(model, row(rank)[0], 1.0).chosen.logprob_T
        np.testing.assert_allclose(said[rank][0], found.detach().numpy(), atol=1e-5)
        found.sum().backward()
    alone, _ = loaded(tmp_path)
    steps(trainer_of(alone), 0)
    for name, parameter in alone.named_parameters():
        np.testing.assert_allclose(said[0][2][name], parameter.detach().numpy(), atol=1e-5)
        assert not torch.equal(parameter, model.get_parameter(name))
    total = sum(p.numel() for p in model.parameters())
    for name, parameter in model.named_parameters():
        largest = float(parameter.grad.abs().max())
        np.testing.assert_allclose(said[0][1][name], parameter.grad.numpy(), atol=1e-5 * largest)
    assert all(held < 0.6 * total for *_, held in said.values())


@pytest.mark.parametrize("kind", FAMILIES)
def test_an_export_is_a_directory_that_transformers_loads(tmp_path, kind):
    from transformers import AutoModelForCausalLM

    made(kind, tmp_path / "in")
    model, shape = loaded(tmp_path / "in")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    parts = ({name: parameter} for name, parameter in model.named_parameters())
    policy.save(None, shape, tmp_path / "out", tmp_path / "in", parts=parts)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.randint(0, 64, (2, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model(tokens), theirs(tokens).logits)
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(
        load_file(tmp_path / "in" / "model.safetensors")
    )
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def changed(directory, **fields):
    where = directory / "config.json"
    where.write_text(json.dumps(json.loads(where.read_text()) | fields))


def test_a_family_that_caps_its_logits_is_refused(tmp_path):
    made("gemma3", tmp_path, final_logit_softcapping=2.0)
    model, _ = loaded(tmp_path)
    with pytest.raises(CheckpointError, match="its logits are not the product of trunk and head"):
        foreign.check_head(model, "cpu")


@pytest.mark.parametrize(
    "fields, said",
    [
        (
            {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}},
            "transformers refuses it",
        ),
        ({"model_type": "nothing"}, "transformers refuses it"),
        ({"num_hidden_layers": 5}, "tensor"),
    ],
)
def test_a_directory_that_transformers_cannot_compute_is_refused(tmp_path, fields, said):
    made("mistral", tmp_path)
    ran = tmp_path / "ran"
    (tmp_path / "mine.py").write_text(f"open({str(ran)!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    changed(tmp_path, **fields)
    with pytest.raises(CheckpointError) as refused:
        contents.check_policy(tmp_path, "transformers")
    assert said in str(refused.value) and "\n" not in str(refused.value)
    assert not ran.exists()  # no code of the checkpoint was run


@pytest.mark.parametrize(
    "override, said",
    [
        ("engine.kind=torch", "engine.kind='torch': expected vllm or sglang with model.backend=transformers"),
        ("speculation.method=eagle3", "speculation.method='eagle3': expected none, ngram or suffix"),
        ("trainer.tensor_parallel=2", "trainer.tensor_parallel=2: expected 1"),
        ("trainer.compile=true", "trainer.compile=True: expected false"),
        ("model.lora.rank=2", "model.lora.rank=2: expected 0"),
    ],
)
def test_what_only_torchtitan_does_is_refused(tmp_path, override, said):
    made("gemma3", tmp_path, num_key_value_heads=2)
    usual = [f"model.path={tmp_path}", "model.backend=transformers", "engine.kind=vllm", "speculation.method=ngram"]
    load("tiny", usual)
    with pytest.raises(ConfigError) as refused:
        load("tiny", [*usual, "trainer.ranks=2", override])
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_another_family_names_the_backend_that_has_it(tmp_path):
    made("gemma3", tmp_path)
    with pytest.raises(CheckpointError, match="model.backend=transformers trains others"):
        PolicyShape.from_hf(tmp_path)
