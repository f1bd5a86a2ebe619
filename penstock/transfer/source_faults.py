"""Explains why a source fails when an operator has to fix it: TLS, or an address that is unreachable from here.

Logged at *error* (*warning* if the source may just have ended), and reported to the weight store, at most once in
SAY_AGAIN_S for one address.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from penstock.errors import BadCertificateError, PenstockError, ServiceUnavailableError
from penstock.process.logger import get_logger
from penstock.security.certificate_files import TlsFiles
from penstock.security.checks.troubles import TROUBLES
from penstock.transfer.content_sources import Source, SourceKind

SAY_AGAIN_S = 60.0
MAX_SAID = 256
_FIX = {
    SourceKind.RELAY: "set relay_url=HOST:PORT of the generator there to one that machines of its site can reach",
    SourceKind.ORIGIN: "set weights_url=HOST:PORT of the trainer (listen.public_host of a run) to one that generators "
    "can reach",
}

Report = Callable[[str, str], Awaitable[None]]
"""Address and what is wrong with it, in words."""
_log = get_logger()


class SourceFaults:
    """The fault reports of one process.

    Args:
        files: Its credentials' files.
    """

    def __init__(self, files: TlsFiles) -> None:
        self.report: Report | None = None
        """Reports to the weight store; set before anything is fetched."""
        self._files = files
        self._said_s: dict[str, float] = {}

    async def explained(self, source: Source, error: PenstockError) -> PenstockError:
        """`error`, or what is behind it."""
        if type(error) is not ServiceUnavailableError:
            return error
        if trouble := await TROUBLES.trouble_with_url(source.url, self._files):
            reported: PenstockError = BadCertificateError(f"{source.url}: {trouble}")
        elif (problem := _address_problem(source, error.__cause__)) is not None:
            reported = ServiceUnavailableError(f"{source.url}: {problem}; {_FIX[source.kind]}")
        else:
            return error
        if self._is_news(source.url):
            self._say(source, reported, error.__cause__)
            if self.report is not None:
                await self.report(source.url, str(reported))
        return reported

    def _is_news(self, url: str) -> bool:
        origin, now_s = urlsplit(url).netloc, time.monotonic()
        if now_s - self._said_s.get(origin, -SAY_AGAIN_S) < SAY_AGAIN_S:
            return False
        if len(self._said_s) >= MAX_SAID:
            self._said_s.clear()
        self._said_s[origin] = now_s
        return True

    def _say(self, source: Source, reported: PenstockError, cause: BaseException | None) -> None:
        has_just_ended = source.kind is SourceKind.RELAY and isinstance(cause, ConnectionRefusedError)
        log = _log.warning if has_just_ended else _log.error
        log("weights cannot be fetched from there", url=source.url, kind=source.kind, error=str(reported))


def _address_problem(source: Source, cause: BaseException | None) -> str | None:
    """What is wrong with the address as seen from here; None if it leads to a source."""
    host = urlsplit(source.url).hostname
    if isinstance(cause, socket.gaierror):
        return f"the name {host} cannot be resolved on this machine"
    if isinstance(cause, ConnectionRefusedError):
        return f"nothing listens there (any more), seen from {socket.gethostname()}"
    if isinstance(cause, TimeoutError) or (isinstance(cause, OSError) and type(cause) is OSError):
        return f"{host} cannot be reached from {socket.gethostname()} ({cause})"
    return None
