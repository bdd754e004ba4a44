#!/usr/bin/env python3
"""Write a published EAGLE-3 head in the layout that asyncspec and vLLM read, and check that it fits a policy.

    scripts/import_eagle3.py models/Qwen3-8B_eagle3 models/Qwen3-8B models/Qwen3-8B-EAGLE3

Many heads are published as pytorch_model.bin, with tensors under other names, or with the configuration of the
speculators library. The weights stay as they are. A head that computes something else than `models/eagle3.py` is
refused, with the field that says so.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import torch

from asyncspec.models import CheckpointError
from asyncspec.models.contents import check_eagle3
from asyncspec.models.draft_shape import ARCHITECTURE
from asyncspec.models.headers import read_json
from asyncspec.models.hf_files import CONFIG, read_tensors, write_checkpoint
from asyncspec.models.shape import PolicyShape

# Fields of the speculators library beside the layer's own, with its defaults.
_FIELDS = {
    "draft_vocab_size": None,
    "target_hidden_size": None,
    "norm_before_residual": True,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "eagle_aux_hidden_state_layer_ids": None,
}


def config_of(directory: Path) -> dict:
    """Return a head's configuration, as vLLM reads it."""
    found = read_json(directory / CONFIG)
    if found.get("speculators_model_type") == "eagle3":
        layer = found.get("transformer_layer_config") or {}
        found = layer | {name: found.get(name, usual) for name, usual in _FIELDS.items()} | {"model_type": "llama"}
        found["architectures"] = [ARCHITECTURE]
    if found.get("architectures") in (["Eagle3LlamaForCausalLM"], ["Eagle3Qwen3ForCausalLM"]):
        found["architectures"] = [ARCHITECTURE]
    return found


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """Return a head's tensors, under the names that vLLM reads."""
    files = sorted(directory.glob("pytorch_model*.bin"))
    if files and not list(directory.glob("*.safetensors")):
        tensors = {}
        for file in files:
            try:
                tensors |= torch.load(file, map_location="cpu", weights_only=True)
            except Exception as error:  # a damaged file has many ways to fail
                raise CheckpointError(f"{file}: {str(error).splitlines()[0]}") from None
    else:
        tensors = read_tensors(directory)
    return {
        name.removeprefix("model.").replace("layers.0.", "midlayer."): tensor.contiguous()
        for name, tensor in tensors.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path, help="directory of the published head")
    parser.add_argument("policy", type=Path, help="directory of the policy that it drafts for")
    parser.add_argument("out", type=Path, help="new directory, for speculation.draft_path")
    head, policy, out = vars(parser.parse_args()).values()
    for name, path in ("HEAD", head), ("POLICY", policy):
        if not (path / CONFIG).is_file():
            sys.exit(f"import_eagle3.py: {name} {path}: expected a directory with {CONFIG}")
    if out.exists() and any(out.iterdir()):
        sys.exit(f"import_eagle3.py: {out}: expected a new or empty directory")
    try:
        write_checkpoint(out, config_of(head), tensors_of(head), head)
        shape = check_eagle3(out, PolicyShape.from_hf(policy), policy, print)
    except CheckpointError as error:
        shutil.rmtree(out, ignore_errors=True)
        sys.exit(f"import_eagle3.py: {error}")
    print(f"written: {out}; it takes the inputs of the policy's layers {', '.join(map(str, shape.aux_layers))}")


if __name__ == "__main__":
    main()
