"""Queues between actors, and who may connect."""

import time

import numpy as np
import pytest
import zmq
from connections import CutConnection, settle
from groups import ticket_of

from asyncspec.bench import fuzz
from asyncspec.clock import now
from asyncspec.deadlines import QUEUE_SILENT_S
from asyncspec.wire import codec, transport, waiting
from asyncspec.wire import messages as m
from asyncspec.wire.control import ControlClient, ControlServer

TICKET = ticket_of(7, [3, 12, 4, 13], [2**61, 5], step=3, min_version=2)


@pytest.fixture
def queue():
    inbox = transport.Inbox("127.0.0.1", credits=4)
    outbox = transport.Outbox(inbox.address)
    yield inbox, outbox
    inbox.close()
    outbox.close()


def test_a_queue_never_holds_more_than_its_credits(queue):
    inbox, outbox = queue
    for i in range(50):
        outbox.put(m.Ready(str(i)))
    settle(inbox, outbox, until=lambda: len(inbox) == 4)
    for _ in range(20):
        settle(inbox, outbox, until=lambda: True)
        time.sleep(0.005)
    assert len(inbox) == 4 and outbox.backlog == 46  # credits hold the rest back, not high-water marks
    received = []
    while len(received) < 50:
        settle(inbox, outbox, until=lambda: len(inbox) > 0)
        received.append(inbox.take()[0].name)
        assert len(inbox) <= 4
    assert received == [str(i) for i in range(50)]


def test_the_oldest_offers_without_credit_are_dropped(queue):
    inbox, outbox = queue
    settle(inbox, outbox, until=lambda: outbox.credits == 4)
    array = {"x": np.zeros(1000, dtype=np.uint8)}
    dropped = [outbox.offer(m.Ready(str(i)), array, 2500, 9) for i in range(9)]
    assert dropped == [0] * 4 + [0, 0, 1, 1, 1]  # four are in flight, two may wait
    assert outbox.offer(m.Ready("large"), {"x": np.zeros(3000, dtype=np.uint8)}, 2500, 9) == 3
    assert [outbox.offer(m.Ready(name), array, 2500, 1) for name in ("last but one", "last")] == [0, 1]
    names = []
    while len(names) < 5:
        settle(inbox, outbox, until=lambda: len(inbox) > 0)
        names.append(inbox.take()[0].name)
    assert names == ["0", "1", "2", "3", "last"]


def test_repeated_and_foreign_frames_are_counted_and_dropped(queue):
    inbox, outbox = queue
    settle(inbox, outbox, until=lambda: outbox.credits == 4)
    outbox.put(m.Ready("a"))
    message = [b"D", transport._STAMP.pack(1, 0.0), *codec.encode(m.Ready("a"))]
    outbox.socket.send_multipart(message)  # the same sequence number again
    outbox.socket.send_multipart([b"D", transport._STAMP.pack(2, 0.0), b"rubbish"])
    stranger = transport.context().socket(zmq.DEALER)
    stranger.connect(inbox.address)
    stranger.send_multipart(message)  # data before the opening message
    stranger.send(b"\xff" * 100)
    settle(inbox, until=lambda: inbox.duplicates == 1 and inbox.rejected == 3)
    assert len(inbox) == 1
    stranger.close()


def test_a_message_tells_when_it_was_sent_but_not_later_than_it_was_seen(queue):
    inbox, outbox = queue
    settle(inbox, outbox, until=lambda: outbox.credits == 4)
    before = now()
    outbox.put(m.Ready("true"))
    after = now()
    for number, stamp in ((2, float("nan")), (3, after + 1e6)):
        outbox.socket.send_multipart([b"D", transport._STAMP.pack(number, stamp), *codec.encode(m.Ready("false"))])
    settle(inbox, until=lambda: len(inbox) == 3)
    _, _, sent, seen = inbox.take()
    assert before <= sent <= after and sent <= seen
    for _, _, sent, seen in (inbox.take(), inbox.take()):
        assert sent == seen


def test_messages_that_skip_a_number_or_exceed_the_credits_are_rejected(queue):
    inbox, outbox = queue
    settle(inbox, outbox, until=lambda: outbox.credits == 4)
    for number in (1, 3, 2, 3, 4, 5):  # the first 3 comes too early; 5 exceeds the credits
        outbox.socket.send_multipart([b"D", transport._STAMP.pack(number, 0.0), *codec.encode(m.Ready(str(number)))])
    settle(inbox, until=lambda: inbox.rejected == 2)
    assert [inbox.take()[0].name for _ in range(len(inbox))] == ["1", "2", "3", "4"]


def test_messages_that_a_dead_consumer_had_not_taken_go_to_its_successor(queue):
    first, outbox = queue
    for i in range(10):
        outbox.put(m.Ready(str(i)))
    settle(first, outbox, until=lambda: len(first) == 4)
    assert [first.take()[0].name for _ in range(3)] == ["0", "1", "2"]
    settle(first, outbox, until=lambda: len(outbox.unacknowledged) + outbox.backlog == 7)
    second = transport.Inbox("127.0.0.1", credits=4)
    outbox.redirect(second.address)
    names = []
    while len(names) < 7:
        settle(second, outbox, until=lambda: len(second) > 0)
        names.append(second.take()[0].name)
    assert names == [str(i) for i in range(3, 10)]
    second.close()


def test_a_message_that_is_held_back_is_told_when_it_is_let_go():
    first, second = (transport.Inbox("127.0.0.1", credits=4) for _ in range(2))
    told = []
    outbox = transport.Outbox(first.address, 0.2, lambda *about: told.append(about))
    begun = now()
    outbox.put(m.Ready("0"))
    settle(first, outbox, until=lambda: outbox.credits == 4)
    assert outbox.backlog == 1 and not told or now() - begun > 0.2
    settle(first, outbox, until=lambda: len(first) == 1)
    outbox.put(m.Ready("1"))
    outbox.redirect(second.address)  # "0" was never taken out, so it goes on at once; "1" is held back as before
    arrived = []
    while len(arrived) < 2:
        settle(second, outbox, until=lambda: len(second) > 0)
        arrived.append(second.take())
    assert [message.name for message, *_ in arrived] == ["0", "1"] and arrived[1][2] >= told[1][2]
    assert [message.name for message, *_ in told] == ["0", "1"]
    assert all(end - start >= 0.2 for _, start, end in told) and begun <= told[0][1]
    for end in (outbox, first, second):
        end.close()


def test_messages_in_flight_when_a_connection_is_cut_arrive_once_and_in_order():
    inbox, rng = transport.Inbox("127.0.0.1", credits=4), np.random.default_rng(0)
    way = CutConnection(inbox.address)
    outbox = transport.Outbox(way.address)
    received, cuts, sent, deadline = [], 0, 0, time.monotonic() + 30
    while len(received) < 400 and time.monotonic() < deadline:
        if sent < 400:
            outbox.put(m.Ready(str(sent)), {"x": np.zeros(int(rng.integers(5000)), np.uint8)})
            sent += 1
        outbox.flush()
        if rng.random() < 0.5 and (item := inbox.take()) is not None:
            received.append(item[0].name)
        if len(received) >= 40 * (cuts + 1) and cuts < 8:
            way.cut()
            cuts += 1
        waiting.wait([inbox, outbox], 0.002)
    assert received == [str(i) for i in range(400)] and cuts == 8
    settle(inbox, outbox, until=lambda: outbox.credits == 4)  # and no credit was lost
    outbox.close()
    inbox.close()
    way.close()


def test_a_connection_that_falls_silent_is_replaced():
    inbox = transport.Inbox("127.0.0.1", credits=2)
    way = CutConnection(inbox.address)
    outbox = transport.Outbox(way.address)
    outbox.put(m.Ready("0"))
    settle(inbox, outbox, until=lambda: len(inbox) == 1)
    way.fall_silent()
    for number in range(1, 5):
        outbox.put(m.Ready(str(number)))
    names = []
    while len(names) < 5:
        settle(inbox, outbox, until=lambda: len(inbox) > 0, seconds=3 * QUEUE_SILENT_S)
        names.append(inbox.take()[0].name)
    assert names == [str(number) for number in range(5)]
    for end in (outbox, inbox, way):
        end.close()


def test_messages_of_a_kind_that_the_consumer_does_not_take_are_rejected():
    inbox = transport.Inbox("127.0.0.1", credits=2, takes=(m.Ticket,))
    outbox = transport.Outbox(inbox.address)
    for message in (m.Ready("x"), TICKET, m.Stop("x"), TICKET):
        outbox.put(message)
    settle(inbox, outbox, until=lambda: len(inbox) == 2)
    assert [inbox.take()[0] for _ in range(2)] == [TICKET, TICKET] and inbox.rejected == 2
    settle(inbox, outbox, until=lambda: outbox.credits == 2)
    inbox.close()
    outbox.close()


@pytest.mark.slow
def test_damaged_frames_through_real_sockets_are_refused_and_good_ones_arrive():
    """A shorter version of `bench fuzz`, with and without the keys."""
    insider, stranger = (
        fuzz.fuzz_frames(np.random.default_rng(3), 20_000),
        fuzz.fuzz_strangers(np.random.default_rng(3), 300),
    )
    oversized = fuzz.fuzz_oversized(4)
    assert oversized["refused"] == 4 and oversized["accepted"] == 0
    for counts in (insider, stranger, oversized):
        assert counts["crashes"] == counts["silent"] == counts["lost"] == 0
    assert insider["unheard"] == 0 and insider["refused"] > 0.8 * insider["tried"]
    # A changed letter in a name still leaves a valid message. So damaged frames did reach the decoder.
    assert insider["accepted"] > 500
    assert stranger["accepted"] == 0


def test_peers_without_the_runs_keys_cannot_connect(tmp_path):
    """A message sent with the keys arrives. Without them, or with other keys, queue and control channel drop it."""
    transport.make_keys(tmp_path)
    assert (tmp_path / transport.KEYS).stat().st_mode & 0o777 == 0o600
    (tmp_path / "other").mkdir()
    transport.make_keys(tmp_path / "other")
    transport.use_keys(tmp_path)
    inbox, server = transport.Inbox("127.0.0.1", 4), ControlServer("127.0.0.1")
    clients = {}
    try:
        for name, keys in (("known", tmp_path), ("other", tmp_path / "other"), ("none", None)):
            transport.use_keys(keys)
            clients[name] = (transport.Outbox(inbox.address), ControlClient(server.address, name))
            clients[name][0].put(m.Ready(name))
            clients[name][1].send(m.Ready(name))
        heard, told, start = [], [], time.monotonic()
        while time.monotonic() < start + 1.5 or not (heard and told) and time.monotonic() < start + 30:
            for outbox, _ in clients.values():
                outbox.flush()
            if (item := inbox.take()) is not None:
                heard.append(item[0].name)
            if (item := server.receive()) is not None:
                told.append(item[0])
            time.sleep(0.005)
        assert heard == ["known"] and told == ["known"]
    finally:
        transport.use_keys(None)
        for item in (inbox.socket, server.socket, *(c for pair in clients.values() for c in pair)):
            item.close(0)
