"""Broadcast groups whose members change: who is sent which version again, and what is said of a version that fails."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from versions import SHAPES, tensors

from asyncspec.actors.broadcasts import Broadcasts, broadcast_backend
from asyncspec.wire.broadcast import BroadcastGroup
from asyncspec.wire.layout import Layout, WholeSnapshot
from asyncspec.wire.messages import Broken, Hello, Membership, Publish, Receive, Received
from asyncspec.wire.weights import Publisher, Receiver


def test_nccl_needs_a_gpu_for_each_member():
    assert broadcast_backend(["cuda:a", "cuda:b", "cuda:c"]) == "nccl"
    assert broadcast_backend(["cuda:a", "cuda:a"]) == "gloo"
    assert broadcast_backend(["cuda:a", "cpu"]) == "gloo"
    assert broadcast_backend(["cpu"]) == "gloo"


class LedGroup:
    """A sender and receivers in this process, which the controller's `Broadcasts` leads."""

    def __init__(self, names, live, dtype="float32"):
        self.layout, self.told, self.passes = Layout.of(live, dtype), [], 0
        self.workers, self.got = {}, {name: [] for name in names[1:]}
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.broadcasts = Broadcasts("127.0.0.1", self._deliver)
        self.broadcasts.devices = dict.fromkeys(names, "cpu")
        for name in names:
            self.start(name)
        self.broadcasts.make("policy", names)

    def start(self, name):
        where = ("127.0.0.1", self.store.port, "policy", name, "cpu", self.layout)
        if name == "trainer":
            self.workers[name] = Publisher(*where)
        else:
            self.workers[name] = Receiver(*where, lambda version: self._received(name, version))
            self.got.setdefault(name, [])

    def _received(self, name, version):
        self.got[name].append(version)
        self.told.append(Received(name, "policy", version))

    def _deliver(self, name, message):
        worker = self.workers.get(name)
        if isinstance(message, Membership) and worker is not None:
            worker.form(message, 60, lambda: None)
        elif isinstance(message, Receive) and worker is not None:
            worker.expect(message.version, message.epoch, message.catch_up)
        return True

    def until(self, condition):
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, (self.told, self.got)
            for worker in self.workers.values():
                worker.tend(self.told.append)
            while self.told:
                message = self.told.pop(0)
                if isinstance(message, Publish):
                    self.broadcasts.relay("trainer", message)
                elif isinstance(message, Received):
                    self.broadcasts.received(message)
                elif isinstance(message, Broken):
                    self.broadcasts.broken(message)
            time.sleep(0.005)

    def publish(self, version, live):
        publisher = self.workers["trainer"]
        self.until(lambda: not publisher.busy)
        publisher.publish(Publish("policy", version), WholeSnapshot(self.layout, live, "cpu"), self.told.append)

    def close(self):
        for worker in self.workers.values():
            worker.close()


def test_only_a_newcomer_is_sent_the_newest_version_again():
    live = tensors(1)
    group = LedGroup(["trainer", "generator0", "logprob"], live)
    group.publish(1, live)
    group.until(lambda: group.got == {"generator0": [1], "logprob": [1]})
    publisher = group.workers["trainer"]
    group.until(lambda: not publisher.busy and not group.told)
    sent = publisher.sent
    group.broadcasts.remove("generator0")
    group.workers.pop("generator0").close()
    group.start("generator0.1")
    group.broadcasts.add(Hello("generator0.1", "", "cpu"), {"policy": False})
    group.until(lambda: group.got["generator0.1"] == [1])
    assert group.got["logprob"] == [1] and publisher.sent == 2 * sent
    group.until(lambda: not publisher.busy)
    assert publisher.whole == group.workers["generator0.1"].whole == group.workers["logprob"].whole
    version, found = group.workers["generator0.1"].take()
    assert version == 1 and all((tensor == 1).all() for tensor in found.values())
    group.publish(2, tensors(2))
    group.until(lambda: group.got["generator0.1"] == [1, 2] and group.got["logprob"] == [1, 2])
    group.close()


def test_a_version_that_was_on_its_way_is_sent_again_to_all():
    live = tensors(1)
    group = LedGroup(["trainer", "generator0", "logprob"], live)
    held = threading.Event()
    group.workers["trainer"].hold_back = lambda version: held.wait(60)
    group.publish(1, live)
    group.until(lambda: group.workers["trainer"].busy)
    group.broadcasts.remove("generator0")
    group.workers.pop("generator0").close()
    held.set()
    group.until(lambda: group.got["logprob"] == [1])
    group.close()


def test_a_version_that_arrives_damaged_is_named_and_sent_again(monkeypatch):
    live, damaged = tensors(1), []
    real = BroadcastGroup.broadcast

    def broadcast(joined, flat):
        real(joined, flat)
        if joined.me == "generator0" and not damaged and flat.dtype == torch.float32:
            flat.view(torch.uint8)[3] ^= 1
            damaged.append(joined.epoch)

    monkeypatch.setattr(BroadcastGroup, "broadcast", broadcast)
    group = LedGroup(["trainer", "generator0", "logprob"], live)
    said, broken = [], group.broadcasts.broken
    group.broadcasts.broken = lambda message: (said.append(message), broken(message))
    group.publish(1, live)
    group.until(lambda: group.got["generator0"] == [1])
    assert damaged == [1] and said[0].name == "generator0"
    assert said[0].error.startswith("policy version 1 arrived damaged: (version, epoch, elements, checksum) is (1, 1, ")
    _, found = group.workers["generator0"].take()
    assert all((tensor == 1).all() for tensor in found.values())
    group.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_travel_in_the_dtype_of_the_policy(dtype):
    live = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    group = LedGroup(["trainer", "generator0"], live, dtype)
    group.publish(1, live)
    group.until(lambda: group.got["generator0"] == [1])
    _, found = group.workers["generator0"].take()
    for name, tensor in found.items():
        assert tensor.dtype == getattr(torch, dtype) and torch.equal(tensor, live[name].to(tensor.dtype))
    assert group.workers["trainer"].sent == group.layout.elements * (4 if dtype == "float32" else 2)
    group.close()


def test_a_member_that_comes_late_to_a_broadcast_is_waited_for_and_then_named(monkeypatch):
    live = tensors(1)
    monkeypatch.setattr("asyncspec.wire.broadcast.MEET_S", 0.5)
    group = LedGroup(["trainer", "generator0", "logprob"], live)
    late, said = group.workers["logprob"], []
    expect, late.expect = late.expect, lambda *message: None
    broken = group.broadcasts.broken
    group.broadcasts.broken = lambda message: (said.append(message.error), broken(message))
    group.publish(1, live)
    group.until(lambda: said)
    assert any("version 1 waited 0 s for logprob" in text for text in said), said
    late.expect = expect
    monkeypatch.setattr("asyncspec.wire.broadcast.MEET_S", 60)
    group.until(lambda: group.got == {"generator0": [1], "logprob": [1]})
    group.close()


@given(st.data())
def test_members_that_hear_only_of_changes_know_the_group(data):
    """Some messages are lost. Who misses one says so, and is told of all members in the next epoch."""
    heard = {}  # member -> (epoch, members) that it has worked out, or the epoch that it missed

    def send(name, message):
        lost = data.draw(st.booleans()) and data.draw(st.booleans())
        epoch, before = heard.get(name, (0, []))
        if lost:
            return data.draw(st.booleans())  # the controller may not notice
        if message.since and message.since != epoch:
            missed.append((name, message.epoch))
        else:
            heard[name] = message.epoch, message.whole(before)
        return True

    broadcasts, missed = Broadcasts("127.0.0.1", send), []
    names = [f"g{number}" for number in range(5)]
    broadcasts.devices = dict.fromkeys(["trainer", *names], "cpu")
    broadcasts.versions["policy"] = 0
    broadcasts.make("policy", ["trainer", *names[:3]])
    for _ in range(data.draw(st.integers(1, 6))):
        name = data.draw(st.sampled_from(names))
        if name in broadcasts.members["policy"]:
            broadcasts.remove(name)
            heard.pop(name, None)
        else:
            broadcasts.add(Hello(name, "", "cpu"), {"policy": False})
        while missed and len(missed) < 40:
            broadcasts.broken(Broken(missed[0][0], "policy", missed.pop(0)[1], ""))
            broadcasts._broken.clear()
        epoch, members = broadcasts.epochs["policy"], broadcasts.members["policy"]
        for name in members:
            assert heard.get(name, (0, []))[0] < epoch or heard[name] == (epoch, members), name
