"""Measures the network to another machine that runs `penstock probe --listen`: round trip, and bytes each way."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from itertools import chain

from console.probe.link_server import MAX_BYTES, NUM_CONNECTIONS, PIECE, PREFIX, Peer
from console.probe.probe_file import MeasuredLink
from penstock.config import ConfigError, validate
from penstock.security import Security
from penstock.security.tls import ClientContexts

_TIMEOUT_S = 15.0
_NUM_ROUND_TRIPS = 5
_MAX_ANSWER_BYTES = 4096
_BEGINNING = 0.25
"""Share of a transfer's time that does not count: connections are still getting faster."""

_Arrivals = list[tuple[float, int]]
"""Times and bytes."""


class LinkError(Exception):
    """The network to a machine cannot be measured; the message says why, and what to do, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkClient:
    """Measures from this machine."""

    target: str
    """host:port of the other one."""
    security: Security

    def measure(self, *, seconds: float) -> MeasuredLink:
        """Round trip, then transfers of so many seconds each way and 0.5 GiB at most. Raises LinkError."""
        try:
            peer = self._ask_who()
            round_trip_s = min(self._round_trip_s() for _ in range(_NUM_ROUND_TRIPS))
            received = self._rate(lambda: self._receive(seconds))
            sent = self._rate(lambda: self._send(seconds))
        except (OSError, HTTPException) as error:
            raise LinkError(
                f"--with {self.target}: {error or type(error).__name__}; start penstock probe --listen there, and let "
                "this machine reach it"
            ) from error
        return MeasuredLink(
            machine=peer.name,
            site=peer.site,
            send_Gbps=sent * 8 / 1e9,
            receive_Gbps=received * 8 / 1e9,
            round_trip_ms=1000 * round_trip_s,
        )

    def _ask_who(self) -> Peer:
        connection = self._connect()
        try:
            connection.request("GET", f"{PREFIX}/machine", headers=self._headers)
            text = self._checked(connection.getresponse()).read(_MAX_ANSWER_BYTES)
        finally:
            connection.close()
        try:
            return validate(Peer, json.loads(text), source=self.target)
        except (ValueError, ConfigError) as error:
            raise LinkError(
                f"--with {self.target}: does not answer as penstock probe --listen does; start that there"
            ) from error

    def _round_trip_s(self) -> float:
        """Of a TCP handshake: kernels answer it, whatever the processes do."""
        host, _, port = self.target.rpartition(":")
        begin_s = time.perf_counter()
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_TIMEOUT_S):
            return time.perf_counter() - begin_s

    def _rate(self, transfer: Callable[[], _Arrivals]) -> float:
        """Bytes per second of all connections together, without the beginning."""
        with ThreadPoolExecutor(NUM_CONNECTIONS) as threads:
            found = [threads.submit(transfer) for _ in range(NUM_CONNECTIONS)]
            arrivals = sorted(chain.from_iterable(each.result() for each in found))
        begin_s, end_s = arrivals[0][0], arrivals[-1][0]
        from_s = begin_s + _BEGINNING * (end_s - begin_s)
        counted = sum(num_bytes for at_s, num_bytes in arrivals if at_s > from_s)
        if not counted:
            raise LinkError(f"--with {self.target}: too few bytes arrived to tell a rate; try again")
        return counted / (end_s - from_s)

    def _receive(self, seconds: float) -> _Arrivals:
        connection, arrivals = self._connect(), []
        try:
            connection.request("GET", f"{PREFIX}/bytes?seconds={seconds:g}", headers=self._headers)
            response = self._checked(connection.getresponse())
            left_bytes, end_s = MAX_BYTES, time.perf_counter() + 2 * seconds
            while left_bytes > 0 and time.perf_counter() < end_s and (piece := response.read1(len(PIECE))):
                arrivals.append((time.perf_counter(), len(piece)))
                left_bytes -= len(piece)
        finally:
            connection.close()
        return arrivals

    def _send(self, seconds: float) -> _Arrivals:
        connection, arrivals = self._connect(), []

        def pieces() -> Iterator[bytes]:
            end_s, num_bytes = time.perf_counter() + seconds, 0
            while num_bytes < MAX_BYTES and time.perf_counter() < end_s:
                yield PIECE
                num_bytes += len(PIECE)
                arrivals.append((time.perf_counter(), len(PIECE)))

        try:
            connection.request("POST", f"{PREFIX}/bytes", body=pieces(), headers=self._headers)
            self._checked(connection.getresponse()).read()
            # Only now the last bytes have arrived.
            arrivals.append((time.perf_counter(), 0))
        finally:
            connection.close()
        return arrivals

    def _connect(self) -> HTTPConnection:
        host, _, port = self.target.rpartition(":")
        name, number = host.strip("[]"), int(port)
        if self.security.ca_file is None:
            return HTTPConnection(name, number, timeout=_TIMEOUT_S)
        context = ClientContexts(self.security.tls_files).current()
        return HTTPSConnection(name, number, timeout=_TIMEOUT_S, context=context)

    @property
    def _headers(self) -> dict[str, str]:
        return {} if self.security.token is None else {"Authorization": f"Bearer {self.security.token}"}

    def _checked(self, response: HTTPResponse) -> HTTPResponse:
        if response.status != 200:
            said = response.read(_MAX_ANSWER_BYTES).decode("utf-8", "replace").strip().splitlines()
            raise LinkError(f"--with {self.target}: HTTP {response.status}: {said[0] if said else response.reason}")
        return response
