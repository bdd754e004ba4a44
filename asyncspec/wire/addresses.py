"""Addresses of hosts, IPv4 and IPv6: this host's own on the way to another, and those of ports that listen."""

from __future__ import annotations

import socket


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


def listening(host: str, port: int = 0) -> socket.socket:
    """Return a TCP socket that listens at this host's address, at any free port if the port is 0.

    Raises:
        OSError: it is not an address of this host, or the port is taken.
    """
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
