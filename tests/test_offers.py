"""What logprob actors offer to the draft adapter: all of them together keep to draft.groups_per_step and
draft.bytes_per_step.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.actors import logprob
from asyncspec.actors.base import ActorSpec
from asyncspec.config import load, to_yaml
from asyncspec.drafts import supervision


@given(st.integers(1, 40), st.integers(0, 1000), st.integers(1, 40))
def test_all_actors_together_offer_what_a_step_allows_and_each_has_its_turn(groups, step, actors):
    shares = [logprob.turns(groups, step, index, actors) for index in range(actors)]
    assert sum(shares) == groups and max(shares) - min(shares) <= 1
    over_time = [sum(logprob.turns(groups, step + later, index, actors) for later in range(actors)) for index in (0, 1)]
    assert over_time == [groups, groups]  # in as many steps as there are actors, each offers as many groups


class Adapter:
    """Stands in for the outbox to the draft adapter."""

    def __init__(self):
        self.offers = []  # (ticket, bytes)

    def offer(self, body, arrays, most_bytes, most):
        self.offers.append((body.ticket_id, supervision.size(arrays)))
        return 0


def offered(monkeypatch, tmp_path, actors, groups_per_step, bytes_per_step, group_bytes, steps=8, per_actor=6):
    """Have logprob actors score `per_actor` groups of each step. Return the bytes of the groups offered, by step."""
    monkeypatch.setattr(supervision, "pack", lambda made, *rest: {"x": np.zeros(made, np.uint8)})
    config = load(
        "tiny",
        [
            f"deployment.logprobs={actors}",
            f"draft.groups_per_step={groups_per_step}",
            f"draft.bytes_per_step={bytes_per_step}",
            f"run_dir={tmp_path}",
        ],
    )
    adapter, found, made = Adapter(), [], []
    for index in range(actors):
        name = f"logprob{index or ''}"
        made.append(logprob.Logprob(ActorSpec("logprob", f"{name}.2", str(tmp_path), to_yaml(config))))
        made[-1].to_adapter = adapter
        made[-1].counters |= {"draft/groups_dropped": 0, "draft/megabytes": 0.0}
    for step in range(steps):
        adapter.offers = []
        for number in range(per_actor):
            for actor in made:
                if actor._wants_supervision(step):
                    actor._offer(SimpleNamespace(step=step, ticket_id=number), group_bytes)
        found.append([size for _, size in adapter.offers])
    return found


@pytest.mark.parametrize("actors, groups", [(1, 4), (2, 4), (3, 4), (4, 4), (16, 4), (16, 1)])
def test_several_logprob_actors_offer_no_more_groups_of_a_step_than_one(actors, groups, tmp_path, monkeypatch):
    found = offered(monkeypatch, tmp_path, actors, groups, 10**9, group_bytes=1000)
    assert [len(sizes) for sizes in found] == [groups] * len(found)


@pytest.mark.parametrize("actors", [1, 3, 16])
def test_several_logprob_actors_keep_to_the_bytes_of_a_step(actors, tmp_path, monkeypatch):
    first, *others = offered(monkeypatch, tmp_path, actors, 8, 3500, group_bytes=1000, steps=40)
    # How large a group is shows with an actor's first one.
    assert len(first) <= 8 and max(sum(sizes) for sizes in others[actors:]) <= 3500
    assert sum(len(sizes) for sizes in others[actors:]) == 3 * len(others[actors:])


def test_a_group_larger_than_the_bytes_of_a_step_is_offered_alone(tmp_path, monkeypatch):
    found = offered(monkeypatch, tmp_path, 4, 4, 500, group_bytes=1000, steps=20)
    assert [len(sizes) for sizes in found[4:]] == [1] * 16
