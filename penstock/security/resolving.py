"""Names to addresses, asked by a server of names that its clients choose: bounded in time, threads and memory."""

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
"""How long an answer is remembered, and that there was none."""
MAX_NAMES = 1024
"""Remembered; the oldest are forgotten first."""
MAX_PENDING = 32
"""Names that are looked up at once, those that wait for a thread included; further ones are not."""
NUM_THREADS = 4
"""Of their own: a name server that hangs must not keep others waiting."""

Addresses = frozenset[IPv4Address | IPv6Address]


def look_up(name: str) -> Addresses:
    """Every address of a name, by the machine's own means; blocks. Raises OSError, UnicodeError."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    addresses = (ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found)
    return frozenset(getattr(address, "ipv4_mapped", None) or address for address in addresses)


class Resolver:
    """Looks names up, for one event loop.

    Args:
        look_up: Asked for a name in a thread.
        deadline_s: Longest time an answer is waited for.
        now_s: Seconds that never go back.
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
        """Of a name; none where nobody knows it, or nobody says so in time."""
        expiry_s, known = self._known.get(name, (0.0, frozenset()))
        if self._now_s() < expiry_s:
            return known
        task = self._pending.get(name)
        if task is None:
            if len(self._pending) >= MAX_PENDING:
                return frozenset()
            task = self._pending[name] = asyncio.create_task(self._ask(name))
        # The lookup itself goes on: the next one who asks finds its answer.
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
