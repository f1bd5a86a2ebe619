"""TLS problems with the servers that this process calls: looked for when a call fails, and logged at *error*.

Promises:
- No call waits longer than MAX_WAIT_S for a diagnosis, and no event loop is blocked: each runs in a thread.
- A server is tested at most once in RECHECK_S; its problem is logged when it changes, or every SAY_AGAIN_S.
- At most MAX_SERVERS are known and MAX_THREADS tested at once; the least recently called are evicted first.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from penstock.process.logger import get_logger
from penstock.security.certificate_files import TlsFiles
from penstock.security.checks.diagnosis import MAX_S, Diagnosis, Server, diagnose
from penstock.security.registered_addresses import as_ip

MAX_WAIT_S = MAX_S + 0.5
RECHECK_S = 5.0
SAY_AGAIN_S = 60.0
MAX_SERVERS = 1024
MAX_THREADS = 8

_log = get_logger()


@dataclass(slots=True)
class _Known:
    server: Server
    files: TlsFiles
    asked_s: float = -RECHECK_S
    answer: Future[Diagnosis] | None = None
    said: str = ""
    said_s: float = field(default=-SAY_AGAIN_S)


class Troubles:
    """The TLS problems of one process; for event loops, and `trouble_with` from one at a time per server."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._threads = threading.BoundedSemaphore(MAX_THREADS)

    def note_target(self, target: str, files: TlsFiles) -> None:
        """Note that a channel to host:port is opened with these files."""
        host, _, port = target.rpartition(":")
        if port.isdecimal():
            server = Server(host=host.strip("[]"), port=int(port), uses_tls=files.ca_file is not None)
            self._note(target, server, files)

    async def trouble_with(self, peer: str) -> str:
        """The TLS problem with a server to which a call failed; empty if there is none.

        Args:
            peer: Its name as in messages: "broker a:7301,b:7301" are two servers that channels were opened to,
                "grpc://c:7310" is one.
        """
        names = self._names(peer)
        found = await asyncio.gather(*(self._ask(name) for name in names))
        problems = [(name, each.problem) for name, each in zip(names, found, strict=True) if each.problem]
        if len(names) == 1:
            return problems[0][1] if problems else ""
        return "; ".join(f"{name}: {problem}" for name, problem in problems)

    def is_by_name(self, peer: str) -> bool:
        """Whether one of these servers is called by name, not by address."""
        return any(as_ip(self._known[name].server.host) is None for name in self._names(peer))

    def _names(self, peer: str) -> list[str]:
        words = [word.rpartition("://")[2] for word in re.split(r"[\s,]+", peer)]
        return [name for name in words if name in self._known]

    async def trouble_with_url(self, url: str, files: TlsFiles) -> str:
        """The same for an HTTP server."""
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            return ""
        if not parts.hostname:
            return ""
        name = f"{parts.scheme}://{parts.netloc}"
        server = Server(host=parts.hostname, port=port, is_grpc=False, uses_tls=parts.scheme == "https")
        self._note(name, server, files)
        return (await self._ask(name)).problem

    def _note(self, name: str, server: Server, files: TlsFiles) -> None:
        known = self._known.get(name)
        if known is None or (known.server, known.files) != (server, files):
            self._known[name] = _Known(server, files)
        self._known.move_to_end(name)
        while len(self._known) > MAX_SERVERS:
            self._known.popitem(last=False)

    async def _ask(self, name: str) -> Diagnosis:
        known = self._known[name]
        now_s = time.monotonic()
        is_under_way = known.answer is not None and not known.answer.done()
        if not is_under_way and now_s - known.asked_s >= RECHECK_S and self._threads.acquire(blocking=False):
            known.asked_s, known.answer = now_s, Future()
            # A daemon: resolving a name cannot be cancelled, and must not keep a process from ending.
            threading.Thread(target=self._diagnose, args=(known, known.answer), daemon=True, name="tls").start()
        if known.answer is None:
            return Diagnosis()
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                found = await asyncio.shield(asyncio.wrap_future(known.answer))
        except TimeoutError:
            return Diagnosis()
        self._say(name, known, found.problem)
        return found

    def _diagnose(self, known: _Known, answer: Future[Diagnosis]) -> None:
        try:
            answer.set_result(diagnose(known.server, known.files))
        except Exception as error:  # errors caused by the peer: the caller cannot fix them
            answer.set_result(Diagnosis())
            _log.warning("a server's TLS could not be looked at", host=known.server.host, error=repr(error))
        finally:
            self._threads.release()

    def _say(self, name: str, known: _Known, problem: str) -> None:
        now_s = time.monotonic()
        # The current time in a message is not news.
        said = re.sub(r"\d", "", problem)
        if problem and (said != known.said or now_s - known.said_s >= SAY_AGAIN_S):
            known.said, known.said_s = said, now_s
            _log.error("TLS with a server fails", peer=name, problem=problem)
        elif not problem:
            known.said = ""


TROUBLES = Troubles()
"""The instance of this process."""
