"""The control channel: what is sent arrives once, in order, whatever happens to the connection."""

import os
import time

import msgspec
import numpy as np
import zmq
from connections import CutConnection, settle
from groups import ticket_of

from asyncspec.wire import messages as m
from asyncspec.wire import transport, waiting
from asyncspec.wire.control import HEADER, MAX_CONTROL_BYTES, ControlClient, ControlServer

TICKET = ticket_of(7, [3, 12, 4, 13], [2**61, 5], step=3, min_version=2)


def test_nothing_on_the_control_channel_is_lost_or_doubled_when_its_connection_is_cut():
    """Neither at the server nor at the client, whichever sends while the connection is down."""
    server, rng = ControlServer("127.0.0.1"), np.random.default_rng(1)
    way = CutConnection(server.address)
    client = ControlClient(way.address, "generator0")
    client.send(m.Ready("first"))
    settle(server, until=lambda: server.receive() is not None)
    came, got, cuts, sent, deadline = [], [], 0, 0, time.monotonic() + 60
    while len(came) + len(got) < 800 and time.monotonic() < deadline:
        if sent < 400:
            client.send(m.Ready(str(sent)))
            assert server.send("generator0", m.Stop(str(sent)))
            server.send("generator0", m.Beat("controller"))  # which may be lost
            sent += 1
        if rng.random() < 0.5 and (item := server.receive()) is not None:
            came.append(item[1].name)
        if rng.random() < 0.5 and isinstance(item := client.receive(), m.Stop):
            got.append(item.reason)
        if len(came) >= 40 * (cuts + 1) and cuts < 8:
            way.cut()
            cuts += 1
        waiting.wait([server, client], 0.002)
    assert came == got == [str(i) for i in range(400)] and cuts == 8
    assert server.rejected == client.rejected == 0
    client.send(m.Ready("last"))  # tells the server that the client has seen all of it
    settle(server, until=lambda: server.receive() is not None)
    assert not server._streams[b"generator0"].again()
    for item in (client, way):
        item.close()
    server.socket.close(0)


def test_a_client_of_a_name_that_was_taken_gets_nothing_that_was_meant_for_the_one_before():
    server = ControlServer("127.0.0.1")
    before = ControlClient(server.address, "node1")
    before.send(m.Ready("before"))
    settle(server, until=lambda: server.receive() is not None)
    before.close(0)
    server.send("node1", m.Stop("before"))
    after = ControlClient(server.address, "node1")
    after.send(m.Ready("after"))
    settle(server, until=lambda: server.receive() == ("node1", m.Ready("after")))
    server.send("node1", m.Stop("after"))
    waiting.wait([after], 5)
    assert after.receive() == m.Stop("after") and after.receive() is None
    after.close(0)
    server.socket.close(0)


def test_a_controller_needs_two_descriptors_for_each_actor():
    """One for its control channel and one for its heart."""
    server, before = ControlServer("127.0.0.1"), len(os.listdir("/proc/self/fd"))
    sockets = []
    for number in range(200):
        for name in (f"generator{number}", f"generator{number}~beat"):
            sockets.append(transport.context().socket(zmq.DEALER))
            sockets[-1].identity = name.encode()
            sockets[-1].connect(server.address)
            sockets[-1].send(HEADER.pack(b"session0", 0, 0))
    settle(server, until=lambda: server.receive() is None and len(server._streams) == 400, seconds=30)
    own = 2 * 400  # each socket of this process, and its end of the connection
    assert len(os.listdir("/proc/self/fd")) - before - own <= 2 * 200
    for socket_ in (server.socket, *sockets):
        socket_.close(0)


def test_an_actor_notices_that_the_controller_is_gone():
    server = ControlServer("127.0.0.1")
    client = ControlClient(server.address, "trainer")
    client.send(m.Ready("trainer"))
    settle(server, until=lambda: server.receive() is not None)
    assert client.lost_for() == 0
    server.socket.close(0)
    deadline = time.monotonic() + 30
    while not client.lost_for() and time.monotonic() < deadline:
        assert client.receive() is None
        time.sleep(0.01)
    time.sleep(0.1)
    assert 0.1 <= client.lost_for() < 30
    client.close(0)


def test_control_reaches_named_actors_and_reports_who_is_absent():
    server = ControlServer("127.0.0.1")
    client = ControlClient(server.address, "trainer")
    client.send(m.Ready("trainer"))
    settle(server, until=lambda: waiting.wait([server], 1) is None)
    assert server.receive() == ("trainer", m.Ready("trainer"))
    assert server.send("trainer", m.Stop("enough"))
    waiting.wait([client], 2)
    assert client.receive() == m.Stop("enough")
    assert not server.send("nobody", m.Stop("x"))
    client.close()
    server.close()


def test_a_ticket_may_be_larger_than_what_the_controller_accepts():
    """Its row may hold a problem's test cases."""
    server = ControlServer("127.0.0.1")
    client = ControlClient(server.address, "generator0")
    client.send(m.Ready("generator0"))
    settle(server, until=lambda: server.receive() is not None)
    large = msgspec.structs.replace(TICKET, row="x" * (MAX_CONTROL_BYTES + 1000))
    assert server.send("generator0", large) and server.send("generator0", m.Stop("after"))
    got, deadline = [], time.monotonic() + 20
    while len(got) < 2 and time.monotonic() < deadline:
        waiting.wait([client], 0.1)
        got += [item for item in [client.receive()] if item is not None]
    assert got == [large, m.Stop("after")]
    client.close(0)
    server.socket.close(0)


def test_a_client_is_heard_again_after_another_one_has_used_its_name():
    server = ControlServer("127.0.0.1")
    way = CutConnection(server.address)
    first = ControlClient(way.address, "generator0")
    for name in ("0", "1"):
        first.send(m.Ready(name))
        settle(server, until=lambda: server.receive() is not None)
    server.send("generator0", m.Stop("so that both are known to have arrived"))
    settle(first, until=lambda: first.receive() is not None)
    second = ControlClient(server.address, "generator0")
    second.send(m.Ready("other"))
    settle(server, until=lambda: server.receive() == ("generator0", m.Ready("other")))
    second.close(0)
    way.cut()
    first.send(m.Ready("2"))
    heard = []
    settle(
        server,
        until=lambda: (
            [heard.append(item[1].name) for item in [server.receive()] if item]
            and "2" in heard
            or first.receive() is not None
        ),
        seconds=20,
    )
    assert heard == ["2"]
    first.close(0)
    way.close()
    server.socket.close(0)
