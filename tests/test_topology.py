"""Topologies: which node and which GPU each actor is placed on."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policies import POLICY_8B

from asyncspec.actors.crew import actor_names, computing
from asyncspec.commands.meeting import Node
from asyncspec.commands.placement import judge
from asyncspec.config import ConfigError, load, topology
from asyncspec.models import sizes

counts = st.dictionaries(st.sampled_from(topology.ROLES[:3]), st.integers(1, 9), min_size=1)


@given(st.lists(st.tuples(st.integers(1, 4), counts), min_size=1, max_size=6), st.booleans(), st.data())
def test_every_actor_is_on_one_node_and_each_node_plays_its_roles(nodes, adapting, data):
    nodes = [*nodes, (1, {"trainer": 1, "logprob": 1, "generator": 1})]
    text = ",".join(f"{times}*" + "+".join(f"{role}:{count}" for role, count in node.items()) for times, node in nodes)
    parsed = topology.parse(text)
    assert parsed == [node for times, node in nodes for _ in range(times)]
    totals = topology.total(parsed)
    ranks = data.draw(st.sampled_from([n for n in range(1, totals["logprob"] + 1) if totals["logprob"] % n == 0]))
    names = topology.name_actors(totals["trainer"], totals["logprob"] // ranks, ranks, totals["generator"], 1, adapting)
    placed = topology.assign(parsed, names)
    assert (
        sorted(name for node in placed for name in node) == sorted(["controller", *names])
        and placed[0][0] == "controller"
    )
    for node, here in zip(parsed, placed):
        for role, count in node.items():
            assert sum(names.get(name, "").removesuffix("_rank") == role for name in here) == count


@given(st.lists(st.sampled_from(["trainer", "logprob", "generator"]), max_size=30), st.booleans(), st.integers(1, 8))
def test_gpus_are_dealt_round_robin_with_the_draft_adapter_last(played, first, gpus):
    roles = sorted(played)
    roles = ["draft_adapter", *roles] if first else [*roles, "draft_adapter"]
    dealt = topology.deal(roles, gpus)
    assert [gpu for role, gpu in zip(roles, dealt) if role != "draft_adapter"] == [i % gpus for i in range(len(played))]
    counts = [dealt.count(gpu) for gpu in range(gpus)]
    assert max(counts) - min(counts) <= 1
    beside = [
        {role for role, to in zip(roles, dealt) if to == gpu} for gpu in range(gpus) if dealt.count(gpu) == max(counts)
    ]
    adapted = dealt[roles.index("draft_adapter")]
    if any(role == "generator" and gpu == adapted for role, gpu in zip(roles, dealt)):
        assert all("generator" in there for there in beside)


@pytest.mark.parametrize(
    "played, gpus, beside",
    [
        ("trainer logprob", 2, "logprob"),
        ("trainer trainer_rank logprob", 3, "logprob"),
        ("trainer trainer_rank generator", 3, "trainer_rank"),
        ("trainer generator", 2, "trainer"),
        ("trainer logprob generator", 3, "logprob"),
        ("generator logprob_rank trainer", 3, "logprob_rank"),
        ("generator generator_rank trainer", 3, "trainer"),
        ("generator generator_rank", 2, "generator_rank"),
        ("trainer logprob generator", 2, "logprob"),  # trainer and generator are on the first
        ("trainer logprob", 3, ""),
        ("generator", 1, "generator"),
    ],
)
def test_the_draft_adapter_shares_the_gpu_of_the_actor_that_can_best_spare_it(played, gpus, beside):
    roles = [*played.split(), "draft_adapter"]
    *dealt, adapted = topology.deal(roles, gpus)
    assert " ".join(role for role, gpu in zip(roles, dealt) if gpu == adapted) == beside


@pytest.mark.parametrize(
    "nodes, said",
    [
        ("trainer,generator", "expected at least one node with role logprob"),
        ("trainer+logprob+generatr", "nearest: generator"),
        ("0*trainer+logprob,generator", "nearest valid choice: 1.trainer"),
        ("trainer:x+logprob+generator", "nearest valid choice: trainer:1"),
        ("trainer+logprob,1000000000000*generator", "nearest valid choice: 1.generator"),
        ("trainer+trainer+logprob+generator", "named twice"),
        ("2*draft_adapter,trainer+logprob+generator", "at most one"),
        ("trainer,", "'' in ''"),
    ],
)
def test_an_impossible_topology_gives_one_line(nodes, said):
    with pytest.raises(ConfigError, match=said) as caught:
        load("tiny", [f"deployment.nodes={nodes}"])
    assert "\n" not in str(caught.value) and "deployment.nodes" in str(caught.value)


def test_a_topology_sets_the_number_of_actors_and_no_field_may_contradict_it():
    config = load("tiny", ["deployment.nodes=2*trainer:2+logprob,3*generator:8"])
    assert (config.trainer.ranks, config.deployment.logprobs, config.deployment.generators) == (4, 2, 24)
    config = load("tiny", ["deployment.nodes=trainer,2*logprob:4,generator", "logprob.ranks=4"])
    assert config.deployment.logprobs == 2 and [
        name for name, role in actor_names(config).items() if role == "logprob_rank"
    ] == [*(f"logprob_rank{rank}" for rank in (1, 2, 3)), *(f"logprob1_rank{rank}" for rank in (1, 2, 3))]
    with pytest.raises(
        ConfigError,
        match="3 ranks of logprob actors; expected a multiple of logprob.ranks=2; nearest valid choice: "
        "logprob.ranks=1",
    ):
        load("tiny", ["deployment.nodes=trainer+logprob:3+generator", "logprob.ranks=2"])
    with pytest.raises(ConfigError, match="deployment.generators=3: expected 24"):
        load("tiny", ["deployment.nodes=2*trainer:2+logprob,3*generator:8", "deployment.generators=3"])


VLLM = ("engine.kind=vllm", "speculation.draft_length=3")


def test_the_ranks_of_a_generator_count_as_actors_of_a_node_and_stay_together():
    config = load("tiny", [*VLLM, "engine.tensor_parallel=2", "deployment.nodes=trainer+logprob,2*generator:4"])
    assert config.deployment.generators == 4
    names = actor_names(config)
    assert [name for name, role in names.items() if role == "generator"] == [f"generator{i}" for i in range(4)]
    assert [name for name, role in names.items() if role == "generator_rank"] == [
        f"generator{i}_rank1" for i in range(4)
    ]
    _, *placed = topology.assign(topology.parse(config.deployment.nodes), names)
    assert placed == [
        ["generator0", "generator0_rank1", "generator1", "generator1_rank1"],
        ["generator2", "generator2_rank1", "generator3", "generator3_rank1"],
    ]
    assert len(computing(config, names)) == len(names)
    assert topology.deal([names[name] for name in placed[0]], 4) == [0, 1, 2, 3]
    with pytest.raises(
        ConfigError,
        match="generator:3 on node 1: expected a multiple of engine.tensor_parallel=2, since all ranks of a "
        "generator are on one node; nearest valid choice: engine.tensor_parallel=1",
    ):
        load("tiny", [*VLLM, "engine.tensor_parallel=2", "deployment.nodes=trainer+logprob,generator:3,generator"])


def test_one_gpu_fits_all_actors_of_the_small_example(tmp_path):
    config = {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
        "eos_token_id": 151645,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    }
    for folder, more in (
        ("policy", {}),
        ("draft", {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(config | more))
        (tmp_path / folder / "tokenizer.json").write_text("{}")
    loaded = load("qwen3_0.6b_1gpu", [f"model.path={tmp_path}/policy", f"speculation.draft_path={tmp_path}/draft"])
    names = {"controller": "controller", **actor_names(loaded)}
    for gigabytes, fits in ((80, True), (40, False)):
        judged = judge(loaded, config, [list(names)], names, [Node("h", "a", [gigabytes * 1e9], 1e12, 64)])
        assert all(f.ok for _, _, found in judged for f in found) == fits, judged


@pytest.mark.parametrize(
    "name, nodes, gpus",
    [("mock_rl_think_8b", 16, 0), ("qwen3_8b_12plus4", 16, 8), ("qwen3_8b_32gpu", 4, 8), ("qwen3_8b_8gpu", 1, 8)],
)
def test_shipped_topologies_have_the_stated_nodes_and_fit_on_them(name, nodes, gpus, tmp_path):
    config = POLICY_8B | {
        "max_position_embeddings": 40960,
        "eos_token_id": 151645,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    }
    for folder, more in (
        ("policy", {}),
        ("draft", {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000}),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(config | more))
        (tmp_path / folder / "tokenizer.json").write_text("{}")
    (tmp_path / "data.jsonl").write_text("")
    own = (
        []
        if name.startswith("mock")
        else [
            f"model.path={tmp_path}/policy",
            f"speculation.draft_path={tmp_path}/draft",
            f"data.train_file={tmp_path}/data.jsonl",
            f"data.eval_file={tmp_path}/data.jsonl",
        ]
    )
    loaded = load(name, own)
    parsed, names = topology.parse(loaded.deployment.nodes), {"controller": "controller", **actor_names(loaded)}
    placed = topology.assign(parsed, names)
    assert len(parsed) == nodes
    if gpus:
        assert all(sum(node.values()) <= gpus for node in parsed)
        for here in placed:
            played = [names[name] for name in computing(loaded, {name: names[name] for name in here})]
            on = [
                {role.removesuffix("_rank") for role, to in zip(played, topology.deal(played, gpus)) if to == gpu}
                for gpu in range(gpus)
            ]
            assert sum(len(roles) for roles in on) == len(played)  # no two actors of a role on one GPU
            assert not any({"draft_adapter", "generator"} <= roles for roles in on)
            assert all(len(roles) == 1 or "draft_adapter" in roles for roles in on)
        judged = judge(loaded, config, placed, names, [Node("h", "a", [141e9] * gpus, 1e12, 64)] * nodes)
        said = [f.text for _, _, found in judged for f in found]
        assert not [f.text for _, _, found in judged for f in found if not f.ok]
        assert not any(f.warning for _, _, found in judged for f in found)
        cache = next(text for text in said if text.startswith("a generator's KV cache has room for some 537,897 pos"))
        assert {
            f"node 0: {'trainer_rank1' if name == 'qwen3_8b_32gpu' else 'logprob'} and draft_adapter share a GPU",
            "policy weights travel over NCCL",
            "draft weights travel over NCCL",
            cache,
        } == set(said)


def test_doctor_notes_slots_that_a_cache_cannot_fill_and_weights_that_take_the_slow_way():
    """By hand: 70% of 80 GB, less 16.4 GB of weights, at 147,456 bytes a position."""
    settings = ["engine.kind=vllm", "speculation.method=none", "deployment.device=auto", "model.dtype=bfloat16"]
    settings.append("trainer.ranks=4")
    positions = (0.7 * 80e9 - 2 * sizes.parameters(POLICY_8B)) / 147_456
    for slots, warned in ((29, False), (30, True)):
        loaded = load("tiny", [*settings, f"engine.slots={slots}", "engine.gpu_memory_utilization=0.7"])
        loaded.sampling.max_response_tokens, loaded.engine.max_prompt_tokens = 16384, 2048
        names = {"controller": "controller", **actor_names(loaded)}
        nodes = [Node("h", "a", [80e9] * 5, 1e12, 64)]
        found = [f for _, _, found in judge(loaded, POLICY_8B, [list(names)], names, nodes) for f in found]
        cache = next(f for f in found if "KV cache" in f.text)
        assert cache.warning == warned and f"room for some {int(positions):,} positions" in cache.text
        slow = next(f for f in found if "policy weights travel" in f.text)
        assert slow.ok and slow.warning and "gloo, through host memory: some members share a GPU, 16.4 GB" in slow.text
