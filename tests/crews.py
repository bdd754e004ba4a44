"""A run as the controller sees it, without processes."""

from types import SimpleNamespace

import zmq

from asyncspec.actors.recovery import Recovery
from asyncspec.actors.run import Run
from asyncspec.config import load
from asyncspec.wire import messages as m
from asyncspec.wire import transport


def recovery_of(*settings, sent=None):
    """Return a Recovery whose actors are all starting, and the list of the lines it prints.

    Messages that it sends are appended to `sent`.
    """
    lines, sent = [], [] if sent is None else sent
    ledger = SimpleNamespace(write=lambda event, ticket, **of: None)
    records = SimpleNamespace(
        note=lambda what, **of: None, line=lines.append, counters={}, ledger=ledger, run_dir="RUN"
    )
    socket = transport.make_socket(zmq.ROUTER, serving=True)  # nothing arrives
    server = SimpleNamespace(send=lambda name, message: sent.append((name, message)), socket=socket)
    run = Run(load("tiny", settings), records, server)
    for member in run.crew.present:
        run.crew.expect(member)
    return Recovery(run), lines


def came(recovery, *names):
    for name in names:
        recovery.arrived(m.Hello(name, f"tcp://127.0.0.1:{1 + len(recovery.crew.addresses)}", "cpu"))
        recovery.crew.members[name].said_ready()
