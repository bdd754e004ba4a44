"""An export is the directory that came in, with new weights. transformers writes the directories."""

import json

import pytest
import torch
from directories import TINY, change_json, change_tensors, transformers_model
from safetensors.torch import load_file

from asyncspec.config import resolve_path
from asyncspec.drafts import draft as drafts
from asyncspec.models import mtp, policy
from asyncspec.models.headers import read_headers
from asyncspec.models.shape import PolicyShape


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
