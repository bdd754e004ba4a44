"""Logprob notes when a group arrived: not before the end of a wait, and no later than the work that kept it waiting."""

from collections import defaultdict, deque
from types import SimpleNamespace

import numpy as np
import pytest
from groups import group_of, ticket_of
from msgspec.structs import replace

from asyncspec.actors import logprob
from asyncspec.wire.messages import Phase


@pytest.fixture
def actor(monkeypatch):
    """An actor without a process, whose time passes only while it waits (1 s) and while it scores a group (5 s)."""
    made = object.__new__(logprob.Logprob)
    made.time, made.inbox = 100.0, SimpleNamespace(sent=deque())
    made.inbox.take = lambda: made.inbox.sent.popleft() if made.inbox.sent else None
    made.waiting, made.version, made.looked, made.complete = deque(), 3, 0.0, defaultdict(set)
    made.scorer = SimpleNamespace(ranks=SimpleNamespace(data_size=1))
    made.arrived, made.while_waiting, made.while_scoring = [], [], []

    def passes(seconds, sent):
        made.time += seconds
        made.inbox.sent.extend(sent)
        sent.clear()

    def score(items):
        made.arrived += [(group.ticket.ticket_id, arrived) for group, _, arrived in items]
        passes(5.0, made.while_scoring)

    made.wait = lambda timeout_s: passes(1.0, made.while_waiting)
    made.tell_received = made._swap_weights = lambda: None
    made._process = score
    monkeypatch.setattr(logprob, "now", lambda: made.time)
    return made


def group(ticket_id, sent):
    phases = [Phase("reward", sent - 2.0, sent - 1.0)]
    return replace(group_of(ticket_of(ticket_id), [1.0]), phases=phases), {"versions": np.full(4, 3)}, sent, 0.0


def test_a_group_that_ends_a_wait_was_on_its_way_until_then(actor):
    actor.turn()  # waits from 100 to 101
    actor.while_waiting = [group(7, sent=100.5)]
    actor.turn()  # the group was sent before this wait, which its arrival ends at 102
    actor.turn()
    assert actor.arrived == [(7, 102.0)]


def test_a_group_that_came_while_another_was_scored_has_waited_since_it_was_sent(actor):
    actor.while_waiting = [group(7, sent=100.5)]
    actor.turn()
    actor.while_scoring = [group(8, sent=103.0), group(9, sent=99.0)]
    for _ in range(3):  # scores from 101 to 106, and again
        actor.turn()
    assert actor.arrived == [(7, 101.0), (8, 103.0), (9, 101.0)]
