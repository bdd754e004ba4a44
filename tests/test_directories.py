"""Directories of policies and drafts: which value counts, and what is refused before anything starts.

transformers says what is right.
"""

from dataclasses import replace

import pytest
import torch
from directories import SIZES, TINY, change_json, change_tensors
from safetensors.torch import load_file, save_file

from asyncspec.cli import main
from asyncspec.config import load as load_config
from asyncspec.files import write_json
from asyncspec.models import CheckpointError, contents, eagle3, mtp, policy
from asyncspec.models.draft_shape import DraftShape
from asyncspec.models.headers import read_headers
from asyncspec.models.shape import PolicyShape


# Which value counts.
def test_missing_fields_have_the_defaults_of_transformers(tmp_path):
    import transformers

    for kind in ("qwen3", "qwen2", "llama", "mistral"):
        folder = tmp_path / kind
        # The sizes of the weights are always given; all else is left out.
        sizes = {name: SIZES[name] for name in list(SIZES)[:5]} | {"num_attention_heads": 32, "hidden_size": 128}
        more = {"sliding_window": None} if kind == "mistral" else {}  # transformers' own default is refused
        theirs = getattr(transformers, f"{kind.capitalize()}Config")(**sizes)
        folder.mkdir()
        write_json(folder / "config.json", {"model_type": kind, "eos_token_id": 2, **sizes, **more})
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
            getattr(theirs, "head_dim", 4),
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
