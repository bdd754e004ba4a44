"""Proof of delivery: readers say which versions they use, and one that is late is named once."""

from hypothesis import given
from hypothesis import strategies as st

from asyncspec.actors.delivery import Delivery
from asyncspec.config import load, work


def test_a_reader_that_uses_an_old_version_for_too_long_is_named_once():
    delivery = Delivery(30.0)
    delivery.published("policy", 4, 10.0)
    using = [("generator0", {"policy": 4, "draft": 0}), ("logprob", {"policy": 3}), ("generator1", {})]
    assert delivery.late(using, 40.0) == []
    (late,) = delivery.late(using, 41.0)
    assert str(late) == "logprob still uses policy version 3: version 4 was published 31 s ago"
    assert delivery.late(using, 99.0) == []
    delivery.published("policy", 4, 100.0)  # sent again, in another epoch
    assert delivery.late(using, 200.0) == []
    delivery.published("policy", 5, 200.0)
    assert delivery.late([("generator0", {"policy": 4})], 229.0) == []
    assert [late.name for late in delivery.late(using[:2], 231.0)] == ["generator0", "logprob"]


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), max_size=20))
def test_nobody_who_takes_each_version_in_time_is_named(steps):
    delivery, now = Delivery(10.0), 0.0
    for version, (until_used, until_next) in enumerate(steps, 1):
        delivery.published("policy", version, now)
        assert delivery.late([("generator0", {"policy": version - 1})], now + until_used) == []
        assert delivery.late([("generator0", {"policy": version})], now + until_used) == []
        now += until_used + until_next


def test_the_time_for_a_delivery_grows_with_the_policy():
    config = load("tiny")
    assert 60 < work.delivery_s(config) < 100
    assert work.delivery_s(config) > work.delivery_s(load("tiny", ["deployment.stall_timeout_s=30"]))
