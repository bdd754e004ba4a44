"""Directories of policies and drafts for tests: copies that can be spoiled, and those that transformers writes."""

import json
import resource
from contextlib import contextmanager

import torch
from safetensors.torch import load_file, save_file

from asyncspec.config import resolve_path
from asyncspec.files import write_json

TINY = resolve_path("asset:tiny/policy")


TINY_DRAFT = resolve_path("asset:tiny/eagle3")


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


# Of each family: its model_type, whether its head is tied, and further fields of config.json.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
FAMILIES = [
    ("qwen3", True, {}),
    ("qwen3", False, {"rope_parameters": YARN}),
    ("qwen2", False, {}),
    ("qwen2", True, {"rope_parameters": YARN}),
    ("llama", False, {}),
    ("llama", True, {"rope_parameters": YARN}),
    ("mistral", False, {}),
    ("qwen3_moe", False, {}),
]


@contextmanager
def limited_files(size):
    """Limit the size of files, in bytes. This stands in for a full disk: the same calls fail with an error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


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


def chat_model(directory, template, **settings):
    """Return a copy of the shipped policy that has a chat template."""
    copy(TINY, directory)
    write_json(directory / "tokenizer_config.json", {"chat_template": template, **settings})
    return directory


def transformers_model(kind, directory, **changes):
    """Write a directory as transformers writes it: model, generation_config.json, tokenizer, chat template."""
    import transformers

    torch.manual_seed(0)
    names = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama", "mistral": "Mistral", "qwen3_moe": "Qwen3Moe"}
    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16} if kind == "qwen3_moe" else {}
    if kind == "mistral":
        more["sliding_window"] = None
    config = getattr(transformers, f"{names[kind]}Config")(**{**SIZES, "head_dim": 8, **more, **changes})
    model = getattr(transformers, f"{names[kind]}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # biases start as zeros
                parameter.normal_(std=0.2)
    model.save_pretrained(directory, max_shard_size="20KB")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(TINY / "tokenizer.json"), eos_token="\n", bos_token="0", pad_token="1"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(directory)
    return model
