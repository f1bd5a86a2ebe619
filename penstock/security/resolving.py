"""Resolves names that clients choose, for a server: bounded in time, threads and memory."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, IPv6Address

DEADLINE_S = 3.0
LIFETIME_S, FAILED_LIFETIME_S = 60.0, 5.0
"""How long an answer, or the lack of one, is cached."""
MAX_NAMES = 1024
"""Cached names; the oldest are evicted first."""
MAX_PENDING = 32
"""Concurrent lookups, those waiting for a thread included; further ones are refused."""
NUM_THREADS = 4
"""Threads of its own: a hanging name server must not delay other work."""

Addresses = frozenset[IPv4Address | IPv6Address]


def look_up(name: str) -> Addresses:
    """All addresses of a name, by the system resolver; blocks. Raises OSError, UnicodeError."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    addresses = (ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found)
    return frozenset(getattr(address, "ipv4_mapped", None) or address for address in addresses)


class Resolver:
    """Looks names up, for one event loop.

    Args:
        look_up: Resolves a name; called in a thread.
        deadline_s: Longest time to wait for an answer.
        now_s: A monotonic clock, seconds.
    """

    def __init__(
        self,
        *,
        look_up: Callable[[str], Addresses] = look_up,
        deadline_s: float = DEADLINE_S,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look_up = look_up
        self._deadline_s = deadline_s
        self._now_s = now_s
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="resolve")
        self._known: OrderedDict[str, tuple[float, Addresses]] = OrderedDict()
        self._pending: dict[str, asyncio.Task[Addresses]] = {}

    async def addresses(self, name: str) -> Addresses:
        """The addresses of a name; empty if it is unknown or the answer does not come in time."""
        expiry_s, known = self._known.get(name, (0.0, frozenset()))
        if self._now_s() < expiry_s:
            return known
        task = self._pending.get(name)
        if task is None:
            if len(self._pending) >= MAX_PENDING:
                return frozenset()
            task = self._pending[name] = asyncio.create_task(self._ask(name))
        # The lookup itself continues: the next caller finds its answer.
        done, _ = await asyncio.wait([task], timeout=self._deadline_s)
        return task.result() if done else frozenset()

    async def _ask(self, name: str) -> Addresses:
        found: Addresses = frozenset()
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._threads, self._look_up, name)
        except (OSError, UnicodeError):
            pass
        finally:
            del self._pending[name]
        self._known.pop(name, None)
        self._known[name] = (self._now_s() + (LIFETIME_S if found else FAILED_LIFETIME_S), found)
        while len(self._known) > MAX_NAMES:
            self._known.popitem(last=False)
        return found
