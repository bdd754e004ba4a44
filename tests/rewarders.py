"""Rewards of groups, waited for."""

import time


def rewards_of(rewarder, *group):
    """Return the rewards of one group."""
    rewarder.submit("it", *group)
    return done(rewarder)["it"]


def done(rewarder, patience_s=60):
    """Return the rewards of all groups that are submitted."""
    found, deadline = {}, time.monotonic() + patience_s
    while rewarder.waiting:
        assert time.monotonic() < deadline
        found |= rewarder.poll()
        time.sleep(0.001)
    return found
