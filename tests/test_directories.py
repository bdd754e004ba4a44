"""Directories that users bring: what is refused before anything starts, and what an export carries over.

transformers writes the directories and says what is right.
"""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncspec.cli import main
from asyncspec.config import Config, resolve_path
from asyncspec.config import load as load_config
from asyncspec.drafts import draft as drafts
from asyncspec.files import write_json
from asyncspec.launch import estimate
from asyncspec.models import CheckpointError, contents, eagle3, mtp, policy
from asyncspec.models.draft_shape import DraftShape
from asyncspec.models.headers import read_headers
from asyncspec.models.shape import Experts, PolicyShape
from asyncspec.rl.learner import Learner

TINY, TINY_DRAFT = resolve_path("asset:tiny/policy"), resolve_path("asset:tiny/eagle3")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
}


def change_json(file, **changes):
    content = json.loads(file.read_text()) | changes
    write_json(file, {name: value for name, value in content.items() if value is not ...})


def change_tensors(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def copy(source, target):
    target.mkdir(parents=True)
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


@pytest.fixture
def brought(tmp_path):
    """A copy of the shipped policy."""
    return copy(TINY, tmp_path / "policy")


@pytest.fixture
def draft(tmp_path):
    """A copy of the shipped EAGLE-3 draft."""
    return copy(TINY_DRAFT, tmp_path / "eagle3")


def transformers_model(kind, directory, **changes):
    """Write a directory as transformers writes it: model, generation_config.json, tokenizer, chat template."""
    import transformers

    torch.manual_seed(0)
    names = {"qwen3": "Qwen3", "llama": "Llama", "qwen3_moe": "Qwen3Moe"}
    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16} if kind == "qwen3_moe" else {}
    config = getattr(transformers, f"{names[kind]}Config")(**{**SIZES, "head_dim": 8, **more, **changes})
    model = getattr(transformers, f"{names[kind]}ForCausalLM")(config)
    model.save_pretrained(directory, max_shard_size="20KB")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(TINY / "tokenizer.json"), eos_token="\n", bos_token="0", pad_token="1"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(directory)
    return model


# What an export carries over.
@pytest.mark.parametrize("kind, tied", [("qwen3", True), ("llama", False), ("llama", True), ("qwen3_moe", False)])
def test_an_export_is_the_directory_that_came_in_with_new_weights(tmp_path, kind, tied):
    import transformers

    source, target = tmp_path / "in", tmp_path / "out"
    transformers_model(
        kind,
        source,
        tie_word_embeddings=tied,
        bos_token_id=5,
        pad_token_id=None,
        attention_dropout=0.1,
        dtype="bfloat16",
    )
    change_json(source / "config.json", a_field_of_tomorrow={"x": [1, 2]})
    (source / "README.md").write_text("a model card")
    (source / "LICENSE").write_text("terms")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (source / "onnx").mkdir()
    (source / "onnx" / "model.onnx").write_bytes(b"old weights")
    (source / "pytorch_model.bin").write_bytes(b"old weights")
    model, shape = policy.load(source)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    policy.save(model, shape, target, source)

    weights = {".safetensors", ".bin", ".onnx"}
    files = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
    others = {path for path in files if path.suffix not in weights and not path.name.endswith(".index.json")}
    assert len(others) >= 8
    assert {path.relative_to(target) for path in target.rglob("*") if path.is_file()} == {
        *others,
        (target / "model.safetensors").relative_to(target),
    }
    for path in others:
        if path.name != "config.json":
            assert (target / path).read_bytes() == (source / path).read_bytes(), path
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, target))
    assert after == before | {"dtype": "float32"} and "pad_token_id" not in {
        name for name, value in after.items() if value is not None
    }
    assert {name: tensor.shape for name, tensor in read_headers(target).items()} == {
        name: tensor.shape for name, tensor in read_headers(source).items()
    }
    again, read = policy.load(target)
    assert read == shape
    theirs = transformers.AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager")
    tokens = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(again(tokens), theirs(tokens).logits, atol=2e-4, rtol=1e-4)
    assert transformers.AutoTokenizer.from_pretrained(target).chat_template


def test_an_export_keeps_tensors_that_training_does_not_change(tmp_path, brought):
    """An MTP module beside the policy, and a tied head that is written out."""
    module = mtp.load(resolve_path("asset:tiny/mtp"), PolicyShape.from_hf(brought), torch.zeros(64, 64))
    change_tensors(
        brought,
        lambda t: t.update({**module.state_hf(), "lm_head.weight": t["model.embed_tokens.weight"].clone()}),
    )
    model, shape = policy.load(brought)
    with torch.no_grad():
        model.tok_embeddings.weight.add_(1)
    policy.save(model, shape, tmp_path / "out", brought)
    before, after = load_file(brought / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert set(before) == set(after)
    assert torch.equal(after["lm_head.weight"], after["model.embed_tokens.weight"])
    assert not torch.equal(after["lm_head.weight"], before["lm_head.weight"])
    assert all(torch.equal(after[name], before[name]) for name in before if name.startswith("mtp."))


def test_an_exported_draft_keeps_the_fields_that_came_in(tmp_path, draft):
    change_json(draft / "config.json", a_field_of_tomorrow=7, torch_dtype="bfloat16")
    (draft / "README.md").write_text("a draft's card")
    loaded = drafts.load("eagle3", draft, PolicyShape.from_hf(TINY))
    loaded.save(tmp_path / "out", TINY, policy_version=3)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (draft, tmp_path / "out"))
    assert after == before | {"torch_dtype": "float32", "trained_for_policy_version": 3}
    assert (tmp_path / "out" / "README.md").read_text() == "a draft's card"


def test_a_full_disk_at_the_export_is_an_error_of_the_system(tmp_path, brought, monkeypatch):
    from safetensors import SafetensorError

    from asyncspec.models import hf_files

    def full(*args, **kwargs):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(hf_files, "save_file", full)
    model, shape = policy.load(brought)
    with pytest.raises(OSError, match="No space left"):
        policy.save(model, shape, tmp_path / "out", brought)


# Which value counts.
def test_missing_fields_have_the_defaults_of_transformers(tmp_path):
    import transformers

    for kind in ("qwen3", "llama"):
        folder = tmp_path / kind
        # The sizes of the weights are always given; all else is left out.
        sizes = {name: SIZES[name] for name in list(SIZES)[:5]} | {"num_attention_heads": 32, "hidden_size": 128}
        theirs = getattr(transformers, {"qwen3": "Qwen3Config", "llama": "LlamaConfig"}[kind])(**sizes)
        folder.mkdir()
        write_json(folder / "config.json", {"model_type": kind, "eos_token_id": 2, **sizes})
        shape = PolicyShape.from_hf(folder)
        assert shape.rope_theta == theirs.rope_parameters["rope_theta"] == 1e4
        assert (
            shape.n_kv_heads,
            shape.head_dim,
            shape.max_positions,
            shape.norm_eps,
            shape.tied,
            shape.pad_token_id,
        ) == (
            theirs.num_key_value_heads,
            theirs.head_dim,
            theirs.max_position_embeddings,
            theirs.rms_norm_eps,
            theirs.tie_word_embeddings,
            theirs.pad_token_id,
        )


def test_of_two_bases_of_rope_the_one_counts_that_counts_in_transformers(brought):
    import transformers

    for fields in (
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 2e4}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_theta": 2e4}},
        {"rope_theta": ..., "rope_parameters": {"rope_type": "default"}},
    ):
        change_json(brought / "config.json", **({"rope_scaling": ..., "rope_parameters": ...} | fields))
        theirs = transformers.AutoConfig.from_pretrained(brought)
        assert PolicyShape.from_hf(brought).rope_theta == theirs.rope_parameters["rope_theta"]


def test_tokens_that_end_a_response_come_from_both_files(brought):
    change_json(brought / "config.json", eos_token_id=63)
    write_json(brought / "generation_config.json", {"eos_token_id": [63, 1]})
    assert PolicyShape.from_hf(brought).eos_token_ids == (63, 1)
    change_json(brought / "config.json", eos_token_id=...)
    assert PolicyShape.from_hf(brought).eos_token_ids == (63, 1)
    write_json(brought / "generation_config.json", {"eos_token_id": 64})
    with pytest.raises(CheckpointError, match="eos_token_id=64: expected a token below vocab_size=64"):
        PolicyShape.from_hf(brought)


def test_a_tied_policy_may_hold_its_embedding_under_the_name_of_its_head(tmp_path, brought):
    """As safetensors' save_model writes it."""
    before, _ = policy.load(brought)
    change_tensors(brought, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    after, shape = policy.load(brought)
    assert torch.equal(before.tok_embeddings.weight, after.tok_embeddings.weight)
    policy.save(after, shape, tmp_path / "out", brought)
    assert torch.equal(policy.load(tmp_path / "out")[0].lm_head.weight, before.lm_head.weight)


def test_frequencies_of_rope_in_a_file_are_passed_over(brought):
    change_tensors(brought, lambda t: t.update({"model.rotary_emb.inv_freq": torch.ones(8)}))
    policy.load(brought)


def test_a_tied_policy_with_another_head_is_refused(brought, capsys):
    change_tensors(brought, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(CheckpointError, match="lm_head.weight differs from model.embed_tokens.weight"):
        policy.load(brought)
    assert main(["train", f"model.path={brought}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    change_json(brought / "config.json", tie_word_embeddings=False)  # then both are used
    model, _ = policy.load(brought)
    assert not torch.equal(model.lm_head.weight, model.tok_embeddings.weight)


# What is refused before anything starts.
def torn(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def fp8(directory):
    change_tensors(directory, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.float8_e4m3fn)}))


def two_sources(directory):
    (directory / "model-00001-of-00001.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    write_json(directory / "model.safetensors.index.json", index)


def twice(directory):
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    save_file(tensors, directory / names[0])
    save_file({"model.norm.weight": tensors["model.norm.weight"] + 1}, directory / names[1])
    places = {name: names[0] for name in tensors} | {"model.embed_tokens.weight": names[1]}
    write_json(directory / "model.safetensors.index.json", {"weight_map": places})


POLICY_FAULTS = {
    "a torn file": (torn, "it is torn, so copy or download it again"),
    "a pointer instead of a file": (
        lambda d: (d / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
        "expected a safetensors file",
    ),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "no such file; expected the weights as safetensors"),
    "only old weights": (
        lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"),
        "not pytorch_model.bin; transformers' save_pretrained writes them",
    ),
    "a tensor too many": (
        lambda d: change_tensors(d, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})),
        "q_proj.bias has no place in the model",
    ),
    "a tensor too few": (
        lambda d: change_tensors(d, lambda t: t.pop("model.layers.23.mlp.up_proj.weight")),
        "tensor model.layers.23.mlp.up_proj.weight is missing",
    ),
    "another layer count": (lambda d: change_json(d / "config.json", num_hidden_layers=23), "has no place"),
    "another head size": (lambda d: change_json(d / "config.json", head_dim=...), "config.json asks for"),
    "weights in two places": (
        two_sources,
        "holds model.safetensors and also model-00001-of-00001.safetensors, which the index names; expected one",
    ),
    "a tensor in two shards": (
        twice,
        "tensor model.norm.weight is in model-00001-of-00002.safetensors and in model-00002-of-00002.safetensors",
    ),
    "quantized tensors": (fp8, "is of dtype F8_E4M3; expected one of F64, F32, F16, BF16"),
    "a quantized policy": (
        lambda d: change_json(d / "config.json", quantization_config={"quant_method": "fp8"}),
        "quantization_config={'quant_method': 'fp8'}: expected None",
    ),
    "a size in quotes": (
        lambda d: change_json(d / "config.json", hidden_size="64"),
        "hidden_size='64': expected a whole number of at least 1",
    ),
    "no layers": (lambda d: change_json(d / "config.json", num_hidden_layers=0), "num_hidden_layers=0: expected"),
    "heads that do not divide": (
        lambda d: change_json(d / "config.json", num_key_value_heads=3),
        "num_key_value_heads=3: expected a divisor of num_attention_heads=4",
    ),
    "a norm without epsilon": (lambda d: change_json(d / "config.json", rms_norm_eps=0), "rms_norm_eps=0: expected"),
    "a sliding window": (
        lambda d: change_json(d / "config.json", layer_types=["sliding_attention"] * 24),
        "layer_types contains 'sliding_attention'",
    ),
    "rotary on a part of a head": (
        lambda d: change_json(d / "config.json", rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        "partial_rotary_factor=0.5: expected 1.0",
    ),
    "a generation config that is no object": (
        lambda d: (d / "generation_config.json").write_text("[]"),
        "generation_config.json: expected a JSON object",
    ),
}


@pytest.mark.parametrize("fault", POLICY_FAULTS)
def test_a_policy_that_an_actor_would_refuse_is_refused_before_the_start(brought, capsys, fault):
    spoil, message = POLICY_FAULTS[fault]
    spoil(brought)
    with pytest.raises(CheckpointError):
        contents.check_policy(brought)
    with pytest.raises(CheckpointError):
        policy.load(brought)
    assert main(["train", f"model.path={brought}", f"run_dir={brought.parent}/run"]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and "model.path=" in said
    assert not (brought.parent / "run").exists()
    if "config.json" not in said:  # doctor's configuration is checked in the same way
        assert main(["doctor", f"model.path={brought}", f"run_dir={brought.parent}"]) == 1
        assert message in capsys.readouterr().out.replace("\n", "")


def test_an_index_whose_shards_are_gone_does_not_count_beside_a_whole_file(tmp_path, brought):
    index = brought / "model.safetensors.index.json"
    write_json(index, {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}})
    model, shape = policy.load(brought)  # as transformers does
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / index.name).write_bytes(index.read_bytes())
    policy.save(model, shape, tmp_path / "out", brought)
    assert not (tmp_path / "out" / index.name).exists()


def test_a_reference_policy_is_checked_too(brought, capsys):
    torn(brought)
    assert main(["train", "rl.kl_coef=0.1", f"model.reference_path={brought}"]) == 2
    assert "model.reference_path=" in (said := capsys.readouterr().err) and "torn" in said
    load_config("tiny", [f"model.reference_path={brought}"])  # without a KL term nobody reads it


DRAFT_FAULTS = {
    "layers that the policy lacks": ({"eagle_aux_hidden_state_layer_ids": [2, 12, 24]}, None, "0 to 23"),
    "the same layer twice": ({"eagle_aux_hidden_state_layer_ids": [2, 2, 21]}, None, "three different layers"),
    "two layers": ({"eagle_aux_hidden_state_layer_ids": [2, 12]}, None, "three different layers"),
    "biases": ({"attention_bias": True}, None, "attention_bias=True: expected False"),
    "another activation": ({"hidden_act": "gelu"}, None, "hidden_act='gelu': expected 'silu'"),
    "a norm before the residual stream": ({"norm_before_residual": True}, None, "norm_before_residual=True"),
    "a nested variant": ({"eagle_config": {"norm_before_fc": True}}, None, "norm_before_fc=True: expected False"),
    "two decoder layers": ({"num_hidden_layers": 2}, None, "num_hidden_layers=2: expected 1"),
    "another target": ({"target_hidden_size": 128}, None, "target_hidden_size=128: expected the policy's 64"),
    "a tensor too many": ({}, lambda t: t.update({"midlayer.self_attn.q_proj.bias": torch.zeros(64)}), "no place"),
    "a tensor too few": ({}, lambda t: t.pop("fc.weight"), "tensor fc.weight is missing"),
    "another width": ({"intermediate_size": 96}, None, "config.json asks for"),
    "an embedding of another size": (
        {},
        lambda t: t.update({"embed_tokens.weight": torch.zeros(8, 64)}),
        "embed_tokens.weight has shape [8, 64], the policy's embedding [64, 64]",
    ),
    "architectures that are no list": ({"architectures": {"a": 1}}, None, "expected a draft for"),
    "no tokens": ({"draft_vocab_size": 32}, None, "tensor d2t is missing"),
}


@pytest.mark.parametrize("fault", DRAFT_FAULTS)
def test_a_draft_that_an_actor_would_refuse_is_refused_before_the_start(draft, capsys, fault):
    fields, spoil, message = DRAFT_FAULTS[fault]
    change_json(draft / "config.json", **fields)
    if spoil is not None:
        change_tensors(draft, spoil)
    assert main(["train", f"speculation.draft_path={draft}", f"run_dir={draft.parent}/run"]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and "speculation.draft_path=" in said
    assert not (draft.parent / "run").exists()


def test_a_draft_without_the_fields_that_vllm_defaults_has_its_defaults(draft):
    policy_shape = PolicyShape.from_hf(TINY)
    usual = DraftShape.from_hf(draft, policy_shape)
    assert usual.aux_layers == (2, 12, 21)
    change_json(draft / "config.json", eagle_aux_hidden_state_layer_ids=..., head_dim=..., draft_vocab_size=None)
    assert contents.check_eagle3(draft, policy_shape, TINY) == usual  # (2, n / 2, n - 3), as in vLLM
    change_json(draft / "config.json", eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 5, 9]})
    assert DraftShape.from_hf(draft, policy_shape).aux_layers == (1, 5, 9)
    change_json(draft / "config.json", eagle_config=...)
    with pytest.raises(CheckpointError, match=r"without the field they are \[2, 2, 2\], as in vLLM"):
        DraftShape.from_hf(draft, replace(policy_shape, n_layers=5))


def test_a_draft_with_a_copy_of_the_policys_embedding_is_accepted(draft):
    embedding = load_file(TINY / "model.safetensors")["model.embed_tokens.weight"]
    for copied in (embedding, embedding.to(torch.bfloat16)):  # the copy may be rounded
        told: list[str] = []
        change_tensors(draft, lambda t: t.update({"embed_tokens.weight": copied}))
        contents.check_eagle3(draft, PolicyShape.from_hf(TINY), TINY, told.append)
        assert told == []
    change_tensors(draft, lambda t: t.update({"embed_tokens.weight": embedding + 1}))
    contents.check_eagle3(draft, PolicyShape.from_hf(TINY), TINY, told.append)
    assert len(told) == 1 and "differs from the policy's embedding" in told[0]


def test_the_expected_tensors_are_those_that_are_written(tmp_path, other, small_shape, contrary_draft, contrary_mtp):
    shape, model = other
    policy.save(model, shape, tmp_path / "policy")
    eagle3.save(contrary_draft, tmp_path / "eagle3")
    mtp.save(contrary_mtp, tmp_path / "mtp")
    for name, expected in (
        ("policy", contents.policy_tensors(shape)),
        ("eagle3", contents.eagle3_tensors(contrary_draft.shape)),
        ("mtp", contents.mtp_tensors(small_shape)),
    ):
        assert {name: tensor.shape for name, tensor in read_headers(tmp_path / name).items()} == expected


# Memory that grows with a field.
@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe"])
def test_a_policy_has_one_rope_table_as_long_as_its_sequences(tmp_path, small_shape, kind):
    experts = Experts(2, 1, 8, True) if kind == "qwen3_moe" else None
    shape = replace(small_shape, model_type=kind, experts=experts, max_positions=262_144)
    model = policy.build(shape, 100)
    model.init_states()
    policy.save(model, shape, tmp_path)
    loaded, _ = policy.load(tmp_path, positions=100)
    for moved in (loaded, policy.move(loaded, "cpu"), policy.lengthened(loaded, shape, 100)):
        tables = {layer.attention.rope.cache.data_ptr() for layer in moved.layers.values()}
        assert len(tables) == 1 and len(next(iter(moved.layers.values())).attention.rope.cache) == 100
    whole = policy.build(shape)
    whole.load_state_dict(loaded.state_dict())
    tokens = torch.randint(0, shape.vocab_size, (2, 100))
    with torch.no_grad():
        assert torch.equal(whole(tokens), loaded(tokens))


def test_a_learner_makes_the_table_that_doctor_counts(tmp_path):
    config = Config()
    learner = Learner(config, tmp_path, "cpu")
    learner.load()
    rope = policy.first_rope(learner.model)
    fields = learner.shape.to_hf()
    assert rope.cache.numel() * 4 == estimate.rope_table(config, fields)
    assert len(rope.cache) == config.positions < learner.shape.max_positions


def test_an_eagle3_draft_has_no_table(small_shape):
    draft = eagle3.Eagle3(DraftShape.for_policy(replace(small_shape, max_positions=262_144)))
    assert sum(buffer.numel() for buffer in draft.buffers()) == small_shape.head_dim
    positions = torch.tensor([[0, 1, 5000, 262_143]])
    cos, sin = draft.rope(positions)
    table = eagle3.angles(draft.shape, 262_144)[positions].repeat(1, 1, 2).unsqueeze(2)
    torch.testing.assert_close(cos, table.cos(), atol=1e-5, rtol=0)
    torch.testing.assert_close(sin, table.sin(), atol=1e-5, rtol=0)


# Weight decay, as its help says.
def test_weight_decay_is_for_matrices_only(small_shape):
    from asyncspec.rl.accumulate import decayed

    for tied in (False, True):
        model = policy.build(replace(small_shape, tied=tied))
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        matrices, others = decayed(model, 0.1)
        assert matrices["weight_decay"] == 0.1 and "weight_decay" not in others
        assert {names[id(p)] for p in others["params"]} == {
            name for name in names.values() if "norm" in name or name == "tok_embeddings.weight"
        }
        assert len(matrices["params"]) + len(others["params"]) == len(names)
