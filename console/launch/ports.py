"""Finds free ports of this machine, and explains why an address cannot be listened on."""

from __future__ import annotations

import errno
import itertools
import random
import socket

_LOOPBACK = "127.0.0.1"
_RUN_PORTS = range(20_000, 32_000)
_MAX_DRAWS = 100


def free_addresses(count: int) -> list[str]:
    """`count` different loopback addresses, host:port, that are free now. Raises OSError if there are fewer.

    Below the ephemeral ports: a connection could otherwise take one before it is used, which may be a minute later.
    """
    drawn = random.sample(_RUN_PORTS, len(_RUN_PORTS))
    free = (port for port in drawn if listen_problem(f"{_LOOPBACK}:{port}") is None)
    chosen = [f"{_LOOPBACK}:{port}" for port in itertools.islice(free, count)]
    if len(chosen) < count:
        raise OSError(f"no {count} free ports between {_RUN_PORTS.start} and {_RUN_PORTS.stop}")
    return chosen


def held_port() -> socket.socket:
    """A socket that holds a free loopback port for a server that sets SO_REUSEADDR, as those over HTTP do.

    Linux lets such a server listen on a port that is bound here and not listened on, and gives it to nobody else.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((_LOOPBACK, 0))
    return held


def free_block(count: int) -> int:
    """The first of `count` consecutive loopback ports that are free now. Raises OSError if none is found.

    Below the ephemeral ports, as `free_addresses`.
    """
    for _ in range(_MAX_DRAWS):
        first = random.randrange(_RUN_PORTS.start, _RUN_PORTS.stop - count)
        if all(listen_problem(f"{_LOOPBACK}:{port}") is None for port in range(first, first + count)):
            return first
    raise OSError(f"no {count} free ports in a row between {_RUN_PORTS.start} and {_RUN_PORTS.stop}")


def listen_problem(address: str) -> str | None:
    """Why `address` (host:port) cannot be listened on, with the fix; None if it can."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with socket.socket(family) as probe:
        # As servers do: a port whose last connection has just closed is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), int(port)))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"port {port} is in use; stop the other process, or choose another port"
            return f"cannot listen on {address}: {error.strerror or error}"
    return None
