"""An export is the directory that came in, with new weights. transformers writes the directories."""

import json
from pathlib import Path

import pytest
import torch
from directories import FAMILIES, TINY, change_json, change_tensors, copy, limited_files, transformers_model
from safetensors.torch import load_file

from asyncspec.config import resolve_path
from asyncspec.drafts import draft as drafts
from asyncspec.models import CheckpointError, mtp, policy, sizes, tensor_files
from asyncspec.models.headers import read_headers
from asyncspec.models.hf_files import read_tensors, write_checkpoint
from asyncspec.models.shape import PolicyShape


# What an export carries over.
@pytest.mark.parametrize("kind, tied, more", FAMILIES)
def test_an_export_is_the_directory_that_came_in_with_new_weights(tmp_path, kind, tied, more):
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
        **more,
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


def test_an_export_in_16_bits_and_shards_is_what_transformers_loads(tmp_path, monkeypatch):
    import transformers

    monkeypatch.setattr(tensor_files, "SHARD_BYTES", 20_000)
    source, target = tmp_path / "in", tmp_path / "out"
    transformers_model("qwen3_moe", source, dtype="float32")
    model, shape = policy.load(source)
    policy.save(model, shape, target, source, dtype=torch.bfloat16)
    files = sorted(path.name for path in target.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert all((target / name).stat().st_size < 20_000 + 5_000 for name in files)
    held = {name: tensor.shape for name, tensor in read_headers(source).items()}
    assert {name: tensor.shape for name, tensor in read_headers(target).items()} == held
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, target))
    assert after == before | {"dtype": "bfloat16"}
    total = json.loads((target / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert total == 2 * sizes.parameters(shape.to_hf())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager")
    assert theirs.dtype == torch.bfloat16
    ours, _ = policy.load(target)
    assert all(map(torch.equal, ours.parameters(), (p.bfloat16().float() for p in model.parameters())))
    tokens = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs.float()(tokens).logits, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("before, after", [(1 << 30, 1 << 30), (1 << 30, 5000), (5000, 5000), (5000, 1 << 30)])
def test_a_reader_finds_the_old_weights_or_the_new_ones_or_none(tmp_path, monkeypatch, before, after):
    old, new = ({f"model.{i}": torch.full((50, 10), value) for i in range(12)} for value in (1.0, 2.0))
    monkeypatch.setattr(tensor_files, "SHARD_BYTES", before)
    write_checkpoint(tmp_path, {}, old)
    seen = []

    def look():
        try:
            found = {float(value) for tensor in read_tensors(tmp_path).values() for value in tensor.unique()}
        except CheckpointError:
            found = {"none"}
        assert len(found) == 1
        seen.extend(found)

    def watched(call):
        def then_look(*args, **kwargs):
            result = call(*args, **kwargs)
            look()
            return result

        return then_look

    for name in "replace", "unlink":
        monkeypatch.setattr(Path, name, watched(getattr(Path, name)))
    monkeypatch.setattr(tensor_files, "SHARD_BYTES", after)
    write_checkpoint(tmp_path, {}, new)
    monkeypatch.undo()
    assert seen[-1] == 2.0 and ("none" in seen) == (min(before, after) == 5000)
    assert set(read_tensors(tmp_path)) == set(old) and not list(tmp_path.glob("*.partial"))
    assert len(list(tmp_path.glob("*.safetensors"))) == (1 if after > 5000 else 6)


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


def test_a_full_disk_at_the_export_is_an_error_of_the_system_and_leaves_the_old_weights(tmp_path, brought):
    model, shape = policy.load(brought)
    target = copy(brought, tmp_path / "out")
    before = {file.name: file.read_bytes() for file in target.iterdir()}
    with torch.no_grad():
        model.norm.weight.add_(1)
    with limited_files(50_000), pytest.raises(OSError, match="File too large"):
        policy.save(model, shape, target, brought)
    assert {file.name: file.read_bytes() for file in target.iterdir()} == before
