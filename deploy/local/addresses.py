"""Host and port pairs: parsing, and whether they are free."""

from __future__ import annotations

import errno
import secrets
import socket
from collections.abc import Iterable, Mapping


def split_address(address: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port` in two. Raises ValueError with the reason."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not an address: write host:port with a port from 1 to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


def taken_addresses(addresses: Mapping[str, str]) -> dict[str, str]:
    """Of the addresses (key: what for), those that cannot be listened on, with the reason."""
    problems: dict[str, str] = {}
    seen: dict[str, str] = {}
    for purpose, address in addresses.items():
        if address in seen:
            problems[purpose] = f"{address} is also given to {seen[address]}"
            continue
        seen[address] = purpose
        host, port = split_address(address)
        try:
            family, kind, protocol, _, sockaddr = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            with socket.socket(family, kind, protocol) as probe:
                # As servers do: a connection in TIME_WAIT is no obstacle. SO_REUSEPORT stays off, so that
                # a listener that shares its port (gRPC's default) is seen as well.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(sockaddr)
        except OSError as error:
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
            problems[purpose] = f"{address} {reason}"
    return problems


def free_port_offset(ports: Iterable[int], *, host: str = "127.0.0.1", attempts: int = 200) -> int:
    """An offset, 10,000 or more, that moves every port to one that is free now.

    Somebody else may take one of them before it is used; then the mesh says so and the caller tries anew.
    Raises OSError when no offset is found.
    """
    wanted = list(ports)
    for _ in range(attempts):
        # Below 32768, where Linux begins to hand out ports for outgoing connections.
        offset = 10_000 + secrets.randbelow(32_000 - 10_000 - max(wanted))
        if not taken_addresses({str(port): f"{host}:{port + offset}" for port in wanted}):
            return offset
    raise OSError(errno.EADDRINUSE, f"no free ports for {len(wanted)} services on {host}")
