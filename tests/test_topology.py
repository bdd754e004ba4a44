"""Who plays where."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec import topology
from asyncspec.config import ConfigError, load

counts = st.dictionaries(st.sampled_from(topology.ROLES[:3]), st.integers(1, 9), min_size=1)


@given(st.lists(st.tuples(st.integers(1, 4), counts), min_size=1, max_size=6), st.booleans())
def test_every_actor_has_one_place_and_each_node_what_is_written(nodes, adapting):
    nodes = [*nodes, (1, {"trainer": 1, "logprob": 1, "generator": 1})]
    text = ",".join(f"{times}*" + "+".join(f"{role}:{count}" for role, count in node.items()) for times, node in nodes)
    parsed = topology.parse(text)
    assert parsed == [node for times, node in nodes for _ in range(times)]
    totals = topology.total(parsed)
    names = topology.actor_names(totals["trainer"], totals["logprob"], totals["generator"], adapting)
    placed = topology.place(parsed, names)
    assert sorted(name for node in placed for name in node) == sorted(["controller", *names]) and placed[0][0] == "controller"
    for node, here in zip(parsed, placed):
        for role, count in node.items():
            assert sum(names.get(name, "").removesuffix("_rank") == role for name in here) == count


@pytest.mark.parametrize("nodes, said", [
    ("trainer,generator", "no node plays logprob"), ("trainer+logprob+generatr", "nearest: generator"),
    ("0*trainer+logprob,generator", "nearest valid choice: 1.trainer"), ("trainer:x+logprob+generator", "nearest valid choice: trainer:1"),
    ("trainer+trainer+logprob+generator", "named twice"), ("2*draft_adapter,trainer+logprob+generator", "at most one"), ("trainer,", "'' in ''")])
def test_a_topology_that_cannot_be_is_one_line(nodes, said):
    with pytest.raises(ConfigError, match=said) as caught:
        load("tiny", [f"deployment.nodes={nodes}"])
    assert "\n" not in str(caught.value) and "deployment.nodes" in str(caught.value)


def test_a_topology_says_how_many_there_are_and_nothing_may_contradict_it():
    config = load("tiny", ["deployment.nodes=2*trainer:2+logprob,3*generator:8"])
    assert (config.trainer.ranks, config.deployment.logprobs, config.deployment.generators) == (4, 2, 24)
    with pytest.raises(ConfigError, match="deployment.generators=3: expected 24"):
        load("tiny", ["deployment.nodes=2*trainer:2+logprob,3*generator:8", "deployment.generators=3"])


def test_shipped_topologies_have_the_nodes_their_names_say():
    for name, nodes in (("mock_rl_think_8b", 16),):
        assert len(topology.parse(load(name).deployment.nodes)) == nodes
