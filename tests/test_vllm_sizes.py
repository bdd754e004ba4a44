"""What asyncspec doctor says of the GPUs that generators with vLLM need."""

import pytest
from policies import LARGE, POLICY_8B

from asyncspec.actors.crew import actor_names
from asyncspec.commands.doctor import judge
from asyncspec.commands.meeting import Node
from asyncspec.config import load
from asyncspec.launch import estimate
from asyncspec.models import sizes


@pytest.mark.parametrize(
    "size, gigabytes, least",
    [
        (n, g, least)
        for n, of in {"32B": {80: 4, 141: 1}, "70B": {80: 8, 141: 4}, "235B": {80: 32, 141: 16}}.items()
        for g, least in of.items()
    ],
)
def test_the_least_ranks_of_a_large_policy_are_named(size, gigabytes, least):
    described, parameters = LARGE[size]
    assert sizes.parameters(described) == pytest.approx(parameters, rel=2e-3)
    config = load(
        "tiny", ["deployment.device=auto", "engine.kind=vllm", "model.dtype=bfloat16", "speculation.method=none"]
    )
    config.engine.max_prompt_tokens, config.sampling.max_response_tokens = 1024, 8192
    assert estimate.least_ranks(config, described, gigabytes * 1e9) == least
    names = {"controller": "controller", **actor_names(config)}
    found = [
        each
        for _, _, each in judge(
            config, described, [list(names)], names, [Node("h", "a", [gigabytes * 1e9] * 8, 1e13, 8)]
        )
    ]
    said = [f.text for each in found for f in each if "the policy and an arriving version do not fit" in f.text]
    assert bool(said) == (least > 1) and all(
        text.endswith(f"expected {least} or more; nearest valid choice: engine.tensor_parallel={least}")
        for text in said
    )


@pytest.mark.parametrize("heads, keys, ranks, expected", [(32, 8, 4, 8), (28, 4, 1, 4), (28, 4, 4, 0)])
def test_the_named_ranks_are_more_than_there_are_and_divide_the_heads(heads, keys, ranks, expected):
    config = load("tiny", ["engine.kind=vllm", "model.dtype=bfloat16", "speculation.method=none"])
    policy = POLICY_8B | {"num_attention_heads": heads, "num_key_value_heads": keys, "head_dim": 128}
    assert estimate.least_ranks(config, policy, 20e9, above=ranks) == expected


def test_ranks_of_a_generator_that_would_share_a_gpu_are_named():
    config = load(
        "tiny",
        ["deployment.device=auto", "engine.kind=vllm", "speculation.draft_length=3", "engine.tensor_parallel=2"],
    )
    names = {"controller": "controller", **actor_names(config)}
    for gpus, said in ((1, ["generator0"]), (2, []), (4, [])):
        judged = judge(config, POLICY_8B, [list(names)], names, [Node("h", "a", [1e12] * gpus, 1e12, 8)])
        wrong = [finding.text for _, _, found in judged for finding in found if not finding.ok]
        assert [
            f"node 0: engine.tensor_parallel=2: ranks of {name} share a GPU; expected one for each of them, and "
            f"there are {gpus}"
            for name in said
        ] == wrong


def test_vllms_share_of_a_gpu_leaves_room_for_arriving_weights():
    """16.4 GB of weights arrive beside vLLM's share, which it takes whatever it needs."""
    names = {"generator0": "generator"}
    nodes = [Node("h", "a", [80e9], 1e12, 8)]

    def found(share):
        fields = ["engine.kind=vllm", "speculation.draft_length=3", "model.dtype=bfloat16", "deployment.device=auto"]
        config = load("tiny", [*fields, f"engine.gpu_memory_utilization={share}"])
        config.speculation.draft_path = ""
        ((_, _, findings),) = judge(config, POLICY_8B, [["generator0"]], names, nodes)
        return [each.text for each in findings if not each.ok]

    assert found(0.75) == []
    assert found(0.8) == [
        "node 0: engine.gpu_memory_utilization=0.8: vLLM's 64.0 GB, arriving weights and CUDA need 83.4 GB of GPU "
        "memory, and there are 80.0; expected at most 0.75; "
        "nearest valid choice: engine.gpu_memory_utilization=0.75"
    ]
