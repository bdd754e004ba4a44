"""The strict policy lag: it bounds admission, and the trainer refuses groups that exceed it."""

import numpy as np
import pytest
from groups import group_of, ticket_of
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.lag import LagError, PolicyClock, check_lag


@given(lag=st.integers(0, 4), steps=st.integers(1, 30))
def test_admitted_tickets_can_never_break_the_bound(lag, steps):
    clock, next_step = PolicyClock(lag), 0
    for version in range(steps):
        while clock.may_issue(next_step):
            assert clock.version >= next_step - lag
            # Tokens of such a ticket come from the version that is published when it is issued, or from newer ones.
            check_lag(next_step, lag, 0, [max(0, next_step - lag), min(clock.version, next_step)])
            next_step += 1
        assert next_step == version + lag + 1  # as far ahead as allowed, and no further
        clock.publish(version + 1)


def test_the_clock_never_goes_back_or_skips():
    clock = PolicyClock(1, version=4)
    for version in (3, 4, 6):
        with pytest.raises(LagError):
            clock.publish(version)


@given(step=st.integers(0, 50), lag=st.integers(0, 5), versions=st.lists(st.integers(0, 60), min_size=1, max_size=20))
def test_check_lag_refuses_exactly_the_versions_outside_the_bound(step, lag, versions):
    if all(step - lag <= v <= step for v in versions):
        check_lag(step, lag, 1, versions)
    else:
        with pytest.raises(LagError, match="ticket 1 in step"):
            check_lag(step, lag, 1, versions)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_the_trainer_refuses_a_group_that_breaks_the_bound(lag, tmp_path):
    from asyncspec.actors.base import ActorSpec
    from asyncspec.actors.trainer import Trainer
    from asyncspec.config import load, to_yaml

    trainer = Trainer(ActorSpec("trainer", "trainer", str(tmp_path), to_yaml(load("tiny", [f"policy_lag={lag}"]))))
    trainer.load()
    model = trainer.learner.model
    before = [p.clone() for p in model.parameters()]
    step, versions = 5, np.array([5, 5, 5, 5 - lag - 1], np.int32)
    ticket = ticket_of(80, [3, 12, 4, 13], [0, 1], step=step, min_version=step - lag)
    group = group_of(ticket, [0.0, 1.0])
    arrays = {
        "tokens": np.array([3, 1, 4, 1], np.int32),
        "lengths": np.array([2, 2], np.int32),
        "versions": versions,
        "behavior": np.full(4, -1, np.float32),
        "proximal": np.full(4, -1, np.float32),
    }
    with pytest.raises(
        LagError, match=f"a token of version {5 - lag - 1}; policy lag {lag} allows {5 - lag} and newer"
    ):
        trainer._take(step, group, arrays)
    assert all(p.grad is None for p in model.parameters())
    assert all((p == q).all() for p, q in zip(model.parameters(), before))
