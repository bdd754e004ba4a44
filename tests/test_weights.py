"""Versioned broadcast between real processes: every version arrives whole and in order while receivers keep working."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from runs import forking
from versions import SHAPES, tensors, wait_until_idle

from asyncspec.actors.broadcasts import Broadcasts, broadcast_backend
from asyncspec.wire import layout as layouts
from asyncspec.wire import weights
from asyncspec.wire.broadcast import BroadcastError, BroadcastGroup
from asyncspec.wire.layout import Layout, WholeSnapshot, checksum
from asyncspec.wire.messages import Broken, Hello, Membership, Publish, Receive, Received
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


def test_a_snapshot_is_a_copy_and_views_name_its_parts():
    live = tensors(3)
    layout = Layout.of(live)
    flat = layout.snapshot(live, "cpu")
    live["a"].zero_()
    views = layout.views(flat)
    assert flat.numel() == sum(t.numel() for t in live.values()) and views.keys() == live.keys()
    assert all((v == 3).all() for v in views.values())


def test_nccl_needs_a_gpu_for_each_member():
    assert broadcast_backend(["cuda:a", "cuda:b", "cuda:c"]) == "nccl"
    assert broadcast_backend(["cuda:a", "cuda:a"]) == "gloo"
    assert broadcast_backend(["cuda:a", "cpu"]) == "gloo"
    assert broadcast_backend(["cpu"]) == "gloo"


class Here:
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
    here = Here(["trainer", "generator0", "logprob"], live)
    here.publish(1, live)
    here.until(lambda: here.got == {"generator0": [1], "logprob": [1]})
    publisher = here.workers["trainer"]
    here.until(lambda: not publisher.busy and not here.told)
    sent = publisher.sent
    here.broadcasts.remove("generator0")
    here.workers.pop("generator0").close()
    here.start("generator0.1")
    here.broadcasts.add(Hello("generator0.1", "", "cpu"), {"policy": False})
    here.until(lambda: here.got["generator0.1"] == [1])
    assert here.got["logprob"] == [1] and publisher.sent == 2 * sent
    version, found = here.workers["generator0.1"].take()
    assert version == 1 and all((tensor == 1).all() for tensor in found.values())
    here.publish(2, tensors(2))
    here.until(lambda: here.got["generator0.1"] == [1, 2] and here.got["logprob"] == [1, 2])
    here.close()


def test_a_version_that_was_on_its_way_is_sent_again_to_all():
    live = tensors(1)
    here = Here(["trainer", "generator0", "logprob"], live)
    held = threading.Event()
    here.workers["trainer"].hold_back = lambda version: held.wait(60)
    here.publish(1, live)
    here.until(lambda: here.workers["trainer"].busy)
    here.broadcasts.remove("generator0")
    here.workers.pop("generator0").close()
    held.set()
    here.until(lambda: here.got["logprob"] == [1])
    here.close()


def test_a_version_that_arrives_damaged_is_named_and_sent_again(monkeypatch):
    live, damaged = tensors(1), []
    real = BroadcastGroup.broadcast

    def broadcast(group, flat):
        real(group, flat)
        if group.me == "generator0" and not damaged and flat.dtype == torch.float32:
            flat.view(torch.uint8)[3] ^= 1
            damaged.append(group.epoch)

    monkeypatch.setattr(BroadcastGroup, "broadcast", broadcast)
    here = Here(["trainer", "generator0", "logprob"], live)
    said, broken = [], here.broadcasts.broken
    here.broadcasts.broken = lambda message: (said.append(message), broken(message))
    here.publish(1, live)
    here.until(lambda: here.got["generator0"] == [1])
    assert damaged == [1] and said[0].name == "generator0"
    assert said[0].error.startswith("policy version 1 arrived damaged: (version, epoch, elements, checksum) is (1, 1, ")
    _, found = here.workers["generator0"].take()
    assert all((tensor == 1).all() for tensor in found.values())
    here.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_travel_in_the_dtype_of_the_policy(dtype):
    live = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    here = Here(["trainer", "generator0"], live, dtype)
    here.publish(1, live)
    here.until(lambda: here.got["generator0"] == [1])
    _, found = here.workers["generator0"].take()
    for name, tensor in found.items():
        assert tensor.dtype == getattr(torch, dtype) and torch.equal(tensor, live[name].to(tensor.dtype))
    assert here.workers["trainer"].sent == here.layout.elements * (4 if dtype == "float32" else 2)
    here.close()


def test_a_member_that_comes_late_to_a_broadcast_is_waited_for_and_then_named(monkeypatch):
    live = tensors(1)
    monkeypatch.setattr("asyncspec.wire.broadcast.MEET_S", 0.5)
    here = Here(["trainer", "generator0", "logprob"], live)
    late, said = here.workers["logprob"], []
    expect, late.expect = late.expect, lambda *message: None
    broken = here.broadcasts.broken
    here.broadcasts.broken = lambda message: (said.append(message.error), broken(message))
    here.publish(1, live)
    here.until(lambda: said)
    assert any("version 1 waited 0 s for logprob" in text for text in said), said
    late.expect = expect
    monkeypatch.setattr("asyncspec.wire.broadcast.MEET_S", 60)
    here.until(lambda: here.got == {"generator0": [1], "logprob": [1]})
    here.close()


@given(st.integers(1, 30_000), st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]), st.randoms())
def test_a_checksum_finds_a_changed_bit_and_swapped_rows(count, dtype, random):
    flat = torch.randn(count).to(dtype) if dtype.is_floating_point else torch.randint(0, 256, (count,), dtype=dtype)
    before, changed = checksum(flat), flat.clone()
    data = changed.view(torch.uint8)
    data[random.randrange(data.numel())] ^= 1 << random.randrange(8)
    assert checksum(changed) != before == checksum(flat.clone())
    rows = flat[: count // 8192 * 8192].view(-1, 4096)
    if len(rows) > 1 and not torch.equal(rows[0].view(torch.uint8), rows[1].view(torch.uint8)):
        assert checksum(torch.cat([rows[1], rows[0], flat[8192:]])) != before


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
