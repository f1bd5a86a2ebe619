"""Ports for servers of tests, which are started some time after their port is chosen."""

from __future__ import annotations

import itertools
import os
import random

from console.launch.ports import listen_problem

_PORTS = range(10_000, 20_000)
"""Below the ephemeral ports, of which any connection may take one before it is used, and below those of runs."""
_MAX_WORKERS = 8
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _MAX_WORKERS
_own = _PORTS[_worker::_MAX_WORKERS]
"""Those of this worker of the tests: none is chosen by two at once."""
_next = itertools.count(random.randrange(len(_own)))


def free_port() -> int:
    """A port that nobody listens on now, and that no test of this process was given of late."""
    for index in itertools.islice(_next, len(_own)):
        port = _own[index % len(_own)]
        if listen_problem(f"127.0.0.1:{port}") is None:
            return port
    raise OSError(f"no free port between {_PORTS.start} and {_PORTS.stop}")


def free_address() -> str:
    """A loopback address with such a port, host:port."""
    return f"127.0.0.1:{free_port()}"


def free_addresses(count: int) -> list[str]:
    """`count` different ones."""
    return [free_address() for _ in range(count)]
