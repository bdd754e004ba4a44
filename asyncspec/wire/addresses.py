"""Addresses of hosts, IPv4 and IPv6: this host's own on the way to another, and those of ports that listen."""

from __future__ import annotations

import errno
import random
import re
import socket
from collections.abc import Callable
from typing import TypeVar

from asyncspec.errors import UserError

_ports = range(0, 1)  # that sockets of this process listen on; 0 stands for any free one
Made = TypeVar("Made")


def own_address(host: str, port: int) -> str:
    """Return the address from which this host reaches another one: IPv4 or IPv6, whichever it reaches it by.

    Raises:
        OSError: the host has no address, or there is no way to any of its addresses.
    """
    wrong: OSError | None = None
    for family, kind, _, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(where)  # sends nothing
                return str(probe.getsockname()[0])
        except OSError as error:
            wrong = wrong or error
    raise wrong or OSError(f"{host} has no address")


def url(host: str, port: int | str) -> str:
    """Return the address of a port for ZeroMQ."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def host_and_port(address: str) -> tuple[str, int]:
    """Return what `url` was made of."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def parse_ports(text: str) -> range:
    """Parse FIRST-LAST; an empty text stands for any free port.

    Raises:
        ValueError: the text is neither.
    """
    if not text:
        return range(0, 1)
    found = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", text)
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 0 < first <= last < 65536:
        raise ValueError("expected FIRST-LAST, two ports from 1 to 65535, or nothing")
    return range(first, last + 1)


def use_ports(text: str) -> None:
    """Have the sockets that this process makes from now on listen on these ports alone; see `parse_ports`."""
    global _ports
    _ports = parse_ports(text)


def at_some_port(listen: Callable[[int], Made]) -> Made:
    """Return what `listen` returns at the first port that is free, of those that may be used, in a random order.

    Args:
        listen: callable(port; 0: any free one), which raises an error with errno EADDRINUSE if the port is taken.

    Raises:
        UserError: all ports are taken.
    """
    for port in random.sample(_ports, len(_ports)):
        try:
            return listen(port)
        except Exception as error:  # ZeroMQ's errors have a number, too
            if getattr(error, "errno", 0) != errno.EADDRINUSE or not port:
                raise
    raise UserError(
        f"deployment.ports={_ports[0]}-{_ports[-1]}: all of them are taken on this host; expected one free port for "
        "each of its actors, and two more on the first node"
    )


def listening(host: str, port: int = 0) -> socket.socket:
    """Return a TCP socket that listens at this host's address.

    Args:
        port: 0: a free one of those that may be used.

    Raises:
        OSError: it is not an address of this host, or the port is taken.
        UserError: all ports that may be used are taken.
    """

    def listen(port: int) -> socket.socket:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)

    return listen(port) if port else at_some_port(listen)
