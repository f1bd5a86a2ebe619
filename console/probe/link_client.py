"""Measures the network to another machine that runs `penstock probe --listen`: round trip, and bytes each way.

Whatever is at the other end, a measurement ends within its limit: a peer that never sends, that sends a byte now and
then, or a firewall that drops packets is one line that says what to do.
"""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from itertools import chain

from console.probe.link_server import MAX_BYTES, NUM_CONNECTIONS, PIECE, PREFIX, Peer
from console.probe.probe_file import MeasuredLink
from penstock.config import ConfigError, validate
from penstock.security import Security
from penstock.security.tls import ClientContexts

LIMIT_S = 45.0
"""Of a whole measurement of at most 5 s each way: longer is no network that a run can use."""
_TIMEOUT_S = 15.0
_NUM_ROUND_TRIPS = 5
_MAX_ANSWER_BYTES = 4096
_BEGINNING = 0.25
"""Share of a transfer's time that does not count: connections are still getting faster."""
_NOT_YET_VALID, _EXPIRED = 9, 10
"""OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""

_Arrivals = list[tuple[float, int]]
"""Times and bytes."""


class LinkError(Exception):
    """The network to a machine cannot be measured; the message says why, and what to do, in one line."""


class LinkClient:
    """Measures from this machine.

    Args:
        target: host:port of the other one.
        security: What it is shown.
        limit_s: When everything is given up.
        timeout_s: Longest wait for a connection, or for the next bytes.
    """

    def __init__(
        self, *, target: str, security: Security, limit_s: float = LIMIT_S, timeout_s: float = _TIMEOUT_S
    ) -> None:
        self._target, self._security = target, security
        self._limit_s, self._timeout_s = limit_s, timeout_s
        host, _, port = target.rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._open: set[HTTPConnection] = set()
        self._is_over = False
        self._is_reached = False
        """Whether something there took a connection."""

    def measure(self, *, seconds: float) -> MeasuredLink:
        """Round trip, then transfers of `seconds` each way and 0.5 GiB at most. Raises LinkError."""
        limit = threading.Timer(self._limit_s, self._give_up)
        limit.daemon = True
        limit.start()
        try:
            peer, clock_ahead_s = self._ask_who()
            round_trip_s = min(self._round_trip_s() for _ in range(_NUM_ROUND_TRIPS))
            received = self._rate(lambda: self._receive(seconds))
            sent = self._rate(lambda: self._send(seconds))
        except (OSError, HTTPException) as error:
            raise self._error(self._why(error)) from error
        finally:
            limit.cancel()
        return MeasuredLink(
            machine=peer.name,
            site=peer.site,
            send_Gbps=sent * 8 / 1e9,
            receive_Gbps=received * 8 / 1e9,
            round_trip_ms=1000 * round_trip_s,
            clock_ahead_s=clock_ahead_s,
        )

    def _give_up(self) -> None:
        self._is_over = True
        for connection in list(self._open):
            if connection.sock is not None:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _error(self, what: str) -> LinkError:
        if self._is_over:
            what = (
                f"not measured within {self._limit_s:g} s: it sends or takes next to nothing; see whether something "
                "between the machines holds back large transfers, and that penstock probe --listen runs there"
            )
        return LinkError(f"--with {self._target}: {what}")

    def _why(self, error: Exception) -> str:
        host, port = self._address
        if isinstance(error, ConnectionRefusedError):
            return "nothing listens there; start penstock probe --listen on it"
        if isinstance(error, socket.gaierror):
            return f"no address is known for {host}; name it in DNS or /etc/hosts, or give its address"
        if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in (_NOT_YET_VALID, _EXPIRED):
            now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
            return f"{error.verify_message} by this machine's clock, {now}; set the clock (NTP), or issue another one"
        if isinstance(error, TimeoutError) and not self._is_reached:
            return (
                f"nothing answers within {self._timeout_s:g} s: the machine is off, or a firewall drops packets; let "
                f"this machine reach TCP port {port} there"
            )
        if isinstance(error, TimeoutError):
            return (
                f"connected, and nothing came for {self._timeout_s:g} s: another program, or a firewall that drops "
                "packets; start penstock probe --listen there, and let this machine reach it"
            )
        return f"{error or type(error).__name__}; start penstock probe --listen there, and let this machine reach it"

    def _ask_who(self) -> tuple[Peer, float | None]:
        """Who it is, and by how much its clock is ahead, seconds."""
        with self._connected() as connection:
            begin_s = time.time()
            connection.request("GET", f"{PREFIX}/machine", headers=self._headers)
            response = self._checked(connection.getresponse())
            between_s = (begin_s + time.time()) / 2
            text = response.read(_MAX_ANSWER_BYTES)
        try:
            peer = validate(Peer, json.loads(text), source=self._target)
        except (ValueError, RecursionError, ConfigError) as error:
            raise self._error("does not answer as penstock probe --listen does; start that there") from error
        return peer, None if peer.time_s is None else peer.time_s - between_s

    def _round_trip_s(self) -> float:
        """Of a TCP handshake: kernels answer it, whatever the processes do."""
        begin_s = time.perf_counter()
        with socket.create_connection(self._address, timeout=self._timeout_s):
            return time.perf_counter() - begin_s

    def _rate(self, transfer: Callable[[], _Arrivals]) -> float:
        """Bytes per second of all connections together, without the beginning."""
        with ThreadPoolExecutor(NUM_CONNECTIONS) as threads:
            found = [threads.submit(transfer) for _ in range(NUM_CONNECTIONS)]
            arrivals = sorted(chain.from_iterable(each.result() for each in found))
        begin_s, end_s = (arrivals[0][0], arrivals[-1][0]) if arrivals else (0.0, 0.0)
        from_s = begin_s + _BEGINNING * (end_s - begin_s)
        counted = sum(num_bytes for at_s, num_bytes in arrivals if at_s > from_s)
        if self._is_over or not counted:
            raise self._error("too few bytes arrived to tell a rate; try again, with more --seconds")
        return counted / (end_s - from_s)

    def _receive(self, seconds: float) -> _Arrivals:
        arrivals: _Arrivals = []
        with self._connected() as connection:
            connection.request("GET", f"{PREFIX}/bytes?seconds={seconds:g}", headers=self._headers)
            response = self._checked(connection.getresponse())
            left_bytes, end_s = MAX_BYTES, time.perf_counter() + 2 * seconds
            while left_bytes > 0 and time.perf_counter() < end_s and (piece := response.read1(len(PIECE))):
                arrivals.append((time.perf_counter(), len(piece)))
                left_bytes -= len(piece)
        return arrivals

    def _send(self, seconds: float) -> _Arrivals:
        arrivals: _Arrivals = []

        def pieces() -> Iterator[bytes]:
            end_s, num_bytes = time.perf_counter() + seconds, 0
            while num_bytes < MAX_BYTES and time.perf_counter() < end_s:
                yield PIECE
                num_bytes += len(PIECE)
                arrivals.append((time.perf_counter(), len(PIECE)))

        with self._connected() as connection:
            connection.request("POST", f"{PREFIX}/bytes", body=pieces(), headers=self._headers)
            said = self._checked(connection.getresponse()).read(_MAX_ANSWER_BYTES)
            # Only now the last bytes have arrived.
            arrivals.append((time.perf_counter(), 0))
        num_bytes = sum(count for _, count in arrivals)
        try:
            taken = json.loads(said)["num_bytes"]
        except (ValueError, RecursionError, KeyError, TypeError):
            taken = None
        if taken != num_bytes:
            raise self._error(
                f"was sent {num_bytes} bytes, and says that it took {taken!s:.40}; start penstock probe --listen of "
                "this version there, without a proxy between"
            )
        return arrivals

    @contextmanager
    def _connected(self) -> Iterator[HTTPConnection]:
        """A connection that the limit ends."""
        connection = self._connection()
        self._open.add(connection)
        try:
            connection.connect()
            if self._is_over:
                raise TimeoutError
            yield connection
        finally:
            self._is_reached |= connection.sock is not None
            self._open.discard(connection)
            connection.close()

    def _connection(self) -> HTTPConnection:
        name, number = self._address
        if self._security.ca_file is None:
            return HTTPConnection(name, number, timeout=self._timeout_s)
        context = ClientContexts(self._security.tls_files).current()
        return HTTPSConnection(name, number, timeout=self._timeout_s, context=context)

    @property
    def _headers(self) -> dict[str, str]:
        return {} if self._security.token is None else {"Authorization": f"Bearer {self._security.token}"}

    def _checked(self, response: HTTPResponse) -> HTTPResponse:
        if response.status != 200:
            said = response.read(_MAX_ANSWER_BYTES).decode("utf-8", "replace").strip().splitlines()
            raise self._error(f"HTTP {response.status}: {said[0][:200] if said else response.reason}")
        return response
