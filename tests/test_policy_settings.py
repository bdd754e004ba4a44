"""Settings that the policy, or the draft, does not support are refused in one line."""

import json

import pytest

from asyncspec.config import ConfigError, load, resolve_path

VLLM = ("engine.kind=vllm", "speculation.draft_length=3")


@pytest.mark.parametrize(
    "change,override,expected",
    [
        (
            {"model_type": "gpt2"},
            "steps=1",
            "model_type='gpt2': expected 'qwen3', 'qwen2', 'llama', 'mistral', 'qwen3_moe'; "
            "model.backend=transformers trains others; model.path=asset:tiny/policy is the shipped one",
        ),
        (
            {
                "model_type": "qwen3_moe",
                "architectures": ["Qwen3MoeForCausalLM"],
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 8,
            },
            ("trainer.ranks=2", "trainer.tensor_parallel=2"),
            "trainer.tensor_parallel=2: expected 1 with a mixture-of-experts policy",
        ),
        (
            {
                "model_type": "qwen3_moe",
                "architectures": ["Qwen3MoeForCausalLM"],
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 8,
            },
            ("logprob.ranks=2", "logprob.tensor_parallel=2"),
            "logprob.tensor_parallel=2: expected 1 with a mixture-of-experts policy",
        ),
        (
            {
                "model_type": "qwen3_moe",
                "architectures": ["Qwen3MoeForCausalLM"],
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 8,
            },
            ("trainer.ranks=6", "trainer.expert_parallel=6"),
            "trainer.expert_parallel=6: expected a divisor of the policy's 4 experts; nearest valid choice: "
            "trainer.expert_parallel=2",
        ),
        (
            {},
            ("logprob.ranks=2", "logprob.expert_parallel=2"),
            "logprob.expert_parallel=2: expected 1: the policy has no experts; nearest valid choice: "
            "logprob.expert_parallel=1",
        ),
        (
            {"num_key_value_heads": 1},
            ("logprob.ranks=2", "logprob.tensor_parallel=2"),
            "logprob.tensor_parallel=2: expected a divisor of the policy's 1 key-value heads; nearest valid choice: "
            "logprob.tensor_parallel=1",
        ),
        (
            {},
            (*VLLM, "engine.tensor_parallel=3"),
            "engine.tensor_parallel=3: expected a divisor of the policy's 4 attention heads; nearest valid choice: "
            "engine.tensor_parallel=2",
        ),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 2},
            (*VLLM, "engine.tensor_parallel=3"),
            "engine.tensor_parallel=3: expected a divisor or a multiple of the policy's 2 key-value heads; nearest "
            "valid choice: engine.tensor_parallel=2",
        ),
        (
            {"num_attention_heads": 8},
            (*VLLM, "engine.tensor_parallel=8"),
            "engine.tensor_parallel=8: expected a divisor of the draft's 4 attention heads; nearest valid choice: "
            "engine.tensor_parallel=4",
        ),
        (
            {"intermediate_size": 193},
            (*VLLM, "engine.tensor_parallel=2"),
            "engine.tensor_parallel=2: expected a divisor of 193, the policy's intermediate_size; nearest valid "
            "choice: engine.tensor_parallel=1",
        ),
        (
            {
                "model_type": "qwen3_moe",
                "architectures": ["Qwen3MoeForCausalLM"],
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 9,
            },
            (*VLLM, "engine.tensor_parallel=2"),
            "engine.tensor_parallel=2: expected a divisor of 9, the moe_intermediate_size of the policy; nearest valid "
            "choice: engine.tensor_parallel=1",
        ),
        (
            {
                "model_type": "qwen3_moe",
                "architectures": ["Qwen3MoeForCausalLM"],
                "num_experts": 3,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 9,
            },
            (*VLLM, "engine.tensor_parallel=2", "engine.vllm={enable_expert_parallel: true}"),
            "engine.tensor_parallel=2: expected a divisor of the policy's 3 experts, which engine.vllm shares out; "
            "nearest valid choice: engine.tensor_parallel=1",
        ),
        (
            {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
            "speculation.method=mtp",
            "made for model_type=qwen3; expected llama",
        ),
    ],
)
def test_settings_that_the_policy_does_not_support_give_one_clear_line(tmp_path, change, override, expected):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((resolve_path("asset:tiny/policy") / name).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(json.loads((tmp_path / "config.json").read_text()) | change))
    with pytest.raises(ConfigError) as caught:
        load("tiny", [f"model.path={tmp_path}", *([override] if isinstance(override, str) else override)])
    assert expected in str(caught.value) and "\n" not in str(caught.value)
