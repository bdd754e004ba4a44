"""Versioned broadcast between real processes: every version arrives whole and in order while receivers keep working."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from runs import forking
from versions import SHAPES, tensors, wait_until_idle

from asyncspec.wire import layout as layouts
from asyncspec.wire import weights
from asyncspec.wire.broadcast import BroadcastError
from asyncspec.wire.layout import Layout, WholeSnapshot
from asyncspec.wire.messages import Membership, Publish
from asyncspec.wire.weights import Publisher, Receiver

MEMBERS = ["trainer", "generator0", "logprob"]
MEMBERSHIP = Membership("policy", 1, MEMBERS, "gloo")
VERSIONS = 12


def receive(port, me, announced, results):
    torch.set_num_threads(1)
    received = []
    receiver = Receiver("127.0.0.1", port, "policy", me, "cpu", Layout.of(tensors(0)), received.append)
    joined = []
    receiver.form(MEMBERSHIP, 60, lambda: joined.append(1))
    swapped, worked, deadline = [], 0, time.monotonic() + 60
    while (not swapped or swapped[-1] != VERSIONS) and time.monotonic() < deadline:
        while not announced.empty():
            receiver.expect(announced.get(), 1)
        worked += 1  # stands for the generator's own work
        if (new := receiver.take()) is not None:
            version, views = new
            assert all((v == version).all() and v.shape == SHAPES[n] for n, v in views.items())
            swapped.append(version)
        time.sleep(0.0005)
    results.put((me, swapped, received, worked))


def test_each_version_arrives_whole_and_in_order():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = forking()
    results, announced = context.Queue(), {name: context.Queue() for name in MEMBERS[1:]}
    children = [
        context.Process(target=receive, args=(store.port, name, announced[name], results)) for name in MEMBERS[1:]
    ]
    for child in children:
        child.start()
    live = tensors(0)
    publisher = Publisher("127.0.0.1", store.port, "policy", "trainer", "cpu", Layout.of(live))
    joined = threading.Event()
    publisher.form(MEMBERSHIP, 60, joined.set)
    assert joined.wait(60)
    for version in range(1, VERSIONS + 1):
        for tensor in live.values():
            tensor.fill_(version)
        wait_until_idle(publisher)
        publisher.publish(
            Publish("policy", version),
            WholeSnapshot(Layout.of(live), live, "cpu"),
            lambda message: [q.put(message.version) for q in announced.values()],
        )
        for tensor in live.values():  # the optimizer keeps changing the live tensors: receivers must not see it
            tensor.fill_(-1)
    wait_until_idle(publisher)
    for _ in children:
        me, swapped, received, worked = results.get(timeout=60)
        assert received == list(range(1, VERSIONS + 1))
        assert swapped == sorted(set(swapped)) and swapped[-1] == VERSIONS
        assert worked > len(swapped)
    for child in children:
        child.join(10)
        assert child.exitcode == 0
    publisher.close()


LARGE = {str(i): torch.full((1 << 20,), 1.0) for i in range(12)}  # one bucket per tensor


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


class DiesHalfway(WholeSnapshot):
    def begin(self):
        for i, bucket in enumerate(super().begin()):
            if i == 6:
                die()
            yield bucket


def short_lived(port, me, membership):
    """Send, or receive, half of a version, then die."""
    layouts.BUCKET_BYTES = 4 << 20
    layout = Layout.of(LARGE)
    if me == "trainer":
        worker = Publisher("127.0.0.1", port, "policy", me, "cpu", layout)
        worker.begin_with(Publish("policy", 1), DiesHalfway(layout, LARGE, "cpu"))
    else:
        worker = Receiver(
            "127.0.0.1", port, "policy", me, "cpu", layout, print, lambda name, tensor: die() if name == "6" else tensor
        )
    worker.form(membership, 60, lambda: None)
    if me != "trainer":
        worker.expect(1, 1)
    while True:
        worker.tend(lambda message: None)
        time.sleep(0.01)


@pytest.mark.parametrize("dies", ["trainer", "generator0"])
def test_a_version_broken_off_halfway_reaches_nobody_until_the_next_epoch(monkeypatch, dies):
    monkeypatch.setattr(layouts, "BUCKET_BYTES", 4 << 20)
    layout, store = Layout.of(LARGE), dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert len(layout.buckets) == 12
    child = forking().Process(target=short_lived, args=(store.port, dies, MEMBERSHIP), daemon=True)
    child.start()
    publisher = Publisher("127.0.0.1", store.port, "policy", "trainer", "cpu", layout)
    publisher.begin_with(Publish("policy", 1), WholeSnapshot(layout, LARGE, "cpu"))
    receivers = {
        name: Receiver("127.0.0.1", store.port, "policy", name, "cpu", layout, lambda version: None)
        for name in MEMBERS[1:]
    }
    here = {"trainer": publisher, **receivers}
    here.pop(dies)
    told, left = [], list(here)
    receivers = {name: worker for name, worker in here.items() if name != "trainer"}

    def run_until(condition):
        deadline = time.monotonic() + 60
        while not condition() and time.monotonic() < deadline:
            for worker in here.values():
                worker.tend(told.append)
            time.sleep(0.01)
        assert condition(), told

    for worker in here.values():
        worker.form(MEMBERSHIP, 60, lambda: None)
    for receiver in receivers.values():
        receiver.expect(1, 1)
    run_until(lambda: not child.is_alive())
    assert all(receiver.take() is None for receiver in receivers.values())
    here["trainer"] = publisher  # a trainer that died is replaced
    again = Membership("policy", 2, ["trainer", *(name for name in left if name != "trainer")], "gloo")
    for worker in here.values():
        worker.form(again, 60, lambda: None)
    for receiver in receivers.values():
        receiver.expect(1, 2)
    run_until(lambda: all(receiver.complete == [1] for receiver in receivers.values()))
    for receiver in receivers.values():
        version, tensors = receiver.take()
        assert (
            version == 1 and tensors.keys() == LARGE.keys() and all((tensor == 1).all() for tensor in tensors.values())
        )
    for worker in here.values():
        worker.close()


def test_a_version_is_held_back_just_before_it_is_sent():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    members, live = Membership("policy", 1, MEMBERS[:2], "gloo"), tensors(1)
    publisher = Publisher("127.0.0.1", store.port, "policy", "trainer", "cpu", Layout.of(live))
    held, go = [], threading.Event()
    publisher.hold_back = lambda version: (held.append(version), go.wait(60))
    receiver = Receiver("127.0.0.1", store.port, "policy", "generator0", "cpu", Layout.of(live), lambda version: None)
    for worker in (publisher, receiver):
        worker.form(members, 60, lambda: None)
    publisher.publish(
        Publish("policy", 7),
        WholeSnapshot(Layout.of(live), live, "cpu"),
        lambda message: receiver.expect(message.version, message.epoch),
    )
    deadline = time.monotonic() + 60
    while not held and time.monotonic() < deadline:
        time.sleep(0.01)
    assert held == [7] and publisher.busy and receiver.complete == []
    go.set()
    while not receiver.complete and time.monotonic() < deadline:
        time.sleep(0.01)
    assert receiver.take()[0] == 7 and held == [7]
    for worker in (publisher, receiver):
        worker.close()


def test_a_member_that_never_joins_is_reported_and_then_raises_an_error(monkeypatch):
    monkeypatch.setattr(weights, "REGROUP_S", 0.3)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    publisher = Publisher("127.0.0.1", store.port, "policy", "trainer", "cpu", Layout.of(tensors(0)))
    publisher.form(Membership("policy", 1, ["trainer", "absent"], "gloo"), 1.0, lambda: None)
    told = []
    with pytest.raises(BroadcastError, match="absent"):
        for _ in range(200):
            publisher.tend(told.append)
            publisher.check()
            time.sleep(0.05)
    assert [(message.name, message.kind, message.epoch) for message in told] == [("trainer", "policy", 1)]


def test_each_version_is_announced_before_the_next_may_be_published():
    """Here the group is formed late. The controller's clock takes versions in order only."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    live, told = tensors(1), []
    where = ("127.0.0.1", store.port, "policy")
    publisher = Publisher(*where, "trainer", "cpu", Layout.of(live))
    snapshot = WholeSnapshot(publisher.layout, live, "cpu")
    publisher.publish(Publish("policy", 1), snapshot, told.append)
    assert publisher.busy and told == []
    with pytest.raises(BroadcastError, match="version 2 published before"):
        publisher.publish(Publish("policy", 2), snapshot, told.append)
    receiver = Receiver(*where, "generator0", "cpu", publisher.layout, lambda version: None)
    for worker in (publisher, receiver):
        worker.form(Membership("policy", 1, MEMBERS[:2], "gloo"), 60, lambda: None)
    deadline = time.monotonic() + 60
    while not receiver.complete and time.monotonic() < deadline:
        publisher.tend(told.append)
        for message in told[len(told) - 1 :]:
            if not receiver.complete and len(told) == 1:
                receiver.expect(message.version, message.epoch)
                told.append(None)
        time.sleep(0.01)
    assert told[0].version == 1 and receiver.take()[0] == 1 and not publisher.busy
    for worker in (publisher, receiver):
        worker.close()


def test_a_version_that_a_newer_one_replaces_cannot_be_taken():
    receiver = Receiver("127.0.0.1", 1, "policy", "logprob", "cpu", Layout.of(tensors(0)), print)
    receiver._complete = {4: tensors(4)}
    assert receiver.take(3) is None and receiver.complete == [4]
    assert receiver.take(4)[0] == 4 and receiver.take() is None
