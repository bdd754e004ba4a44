"""scripts/import_eagle3.py: published EAGLE-3 heads, in the forms in which they are found."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncspec.config import resolve_path
from asyncspec.drafts import draft as drafts
from asyncspec.models.shape import PolicyShape

ROOT, POLICY, SHIPPED = Path(__file__).parents[1], resolve_path("asset:tiny/policy"), resolve_path("asset:tiny/eagle3")


def imported(head, out):
    script = str(ROOT / "scripts" / "import_eagle3.py")
    return subprocess.run([sys.executable, script, str(head), str(POLICY), str(out)], capture_output=True, text=True)


def published(folder, how, **fields):
    """Write the shipped head as others publish theirs."""
    folder.mkdir()
    config, tensors = json.loads((SHIPPED / "config.json").read_text()), load_file(SHIPPED / "model.safetensors")
    del config["eagle_aux_hidden_state_layer_ids"]
    if how == "speculators":
        own = {"draft_vocab_size": config.pop("draft_vocab_size"), "norm_before_residual": False}
        config = {"speculators_model_type": "eagle3", "transformer_layer_config": config, **own}
        save_file({n.replace("midlayer.", "layers.0."): t for n, t in tensors.items()}, folder / "model.safetensors")
    else:
        torch.save({name: tensor.half() for name, tensor in tensors.items()}, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


@pytest.mark.parametrize("how", ["bin", "speculators"])
def test_a_published_head_is_read_with_vllms_default_layers(tmp_path, how):
    done = imported(published(tmp_path / "head", how), tmp_path / "out")
    shape = PolicyShape.from_hf(POLICY)
    assert done.returncode == 0 and f"layers 2, {shape.n_layers // 2}, {shape.n_layers - 3}" in done.stdout, done.stderr
    draft, original = (drafts.load("eagle3", path, shape) for path in (tmp_path / "out", SHIPPED))
    for name, tensor in original.module.state_dict().items():
        assert torch.equal(draft.module.state_dict()[name], tensor.half().float() if how == "bin" else tensor)


@pytest.mark.parametrize(
    "how, fields, said",
    [
        ("speculators", {"norm_before_residual": True}, "norm_before_residual=True: expected False"),
        ("bin", {"hidden_size": 4096}, "hidden_size=4096: expected the policy's 64"),
        ("bin", {"num_hidden_layers": 2}, "num_hidden_layers=2: expected 1"),
    ],
)
def test_a_head_that_computes_something_else_is_refused_in_one_line(tmp_path, how, fields, said):
    done = imported(published(tmp_path / "head", how, **fields), tmp_path / "out")
    assert done.returncode == 1 and said in done.stderr and done.stderr.count("\n") == 1
