"""What a probe says of machines at the other end that do not do as they should: each in a line that ends in time."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from types import SimpleNamespace

import pytest

from console.probe import link_server
from console.probe.link_client import LinkClient, LinkError
from console.probe.link_server import Peer, serving_transfers
from console.probe.probe_text import clock_difference
from penstock.security import NO_SECURITY

WHO = json.dumps({"name": "far-1", "site": "far"}).encode()


@contextmanager
def peer(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A machine that treats every connection so."""
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as connections:

        def serve() -> None:
            while True:
                try:
                    connection = connections.enter_context(closing(server.accept()[0]))
                except OSError:
                    return
                threading.Thread(target=answered, args=(connection,), daemon=True).start()

        def answered(connection: socket.socket) -> None:
            try:
                answer(connection)
            except OSError:
                return

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"


def silent(connection: socket.socket) -> None:
    connection.recv(1)
    threading.Event().wait(30)


def dripping(connection: socket.socket) -> None:
    """Is always about to finish its first header."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        connection.sendall(b"x")
        time.sleep(0.02)


def sent(connection: socket.socket, body: bytes) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    connection.close()


def lying(connection: socket.socket) -> None:
    """Has taken a byte, whatever it was sent."""
    request = connection.recv(1 << 16)
    if request.startswith(b"GET /probe/machine"):
        sent(connection, WHO)
    elif request.startswith(b"GET"):
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        for _ in range(20):
            connection.sendall(bytes(1 << 16))
            time.sleep(0.002)
        connection.close()
    elif request:
        while not request.endswith(b"0\r\n\r\n"):
            request = request[-8:] + connection.recv(1 << 20)
        sent(connection, json.dumps({"num_bytes": 1}).encode())


def nested(connection: socket.socket) -> None:
    connection.recv(1 << 16)
    sent(connection, b"[" * 4000)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (silent, "connected, and nothing came for 0.3 s: another program, or a firewall that drops packets; start"),
        (dripping, "not measured within 1 s: it sends or takes next to nothing; see whether"),
        (lying, r"was sent \d+ bytes, and says that it took 1; start penstock probe --listen of this version there"),
        (nested, "does not answer as penstock probe --listen does; start that there"),
    ],
)
def test_a_peer_that_does_not_play_its_part_is_given_up_in_time(answer, said):
    with peer(answer) as target:
        limits = {"limit_s": 1.0, "timeout_s": 0.3} if answer in (silent, dripping) else {}
        client = LinkClient(target=target, security=NO_SECURITY, **limits)
        begin_s = time.monotonic()
        with pytest.raises(LinkError, match=f"^--with {target}: {said}") as told:
            client.measure(seconds=0.05)
    assert len(str(told.value).splitlines()) == 1
    assert time.monotonic() - begin_s < 20


def test_a_firewall_that_drops_packets_is_distinguished_from_a_closed_port():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, ExitStack() as full:
        address = server.getsockname()
        # As many as the kernel keeps for a server that accepts none: what comes on top is dropped.
        for _ in range(4):
            waiting = full.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        client = LinkClient(target=f"127.0.0.1:{address[1]}", security=NO_SECURITY, timeout_s=0.3)
        with pytest.raises(LinkError, match=rf"nothing answers within 0.3 s: .* TCP port {address[1]} there"):
            client.measure(seconds=0.05)
    with pytest.raises(LinkError, match="nothing listens there; start penstock probe --listen on it"):
        client.measure(seconds=0.05)


async def test_clocks_that_differ_are_reported_with_the_fix(monkeypatch):
    fast = SimpleNamespace(time=lambda: time.time() + 400)
    monkeypatch.setattr(link_server, "time", fast)
    async with serving_transfers("127.0.0.1:0", Peer(name="far-1", site="far"), security=NO_SECURITY) as url:
        client = LinkClient(target=url.rpartition("//")[2], security=NO_SECURITY)
        found = await asyncio.to_thread(client.measure, seconds=0.05)
    assert found.clock_ahead_s == pytest.approx(400, abs=30)
    assert "the clock of far-1 is" in str(clock_difference("near", found))
    assert "ahead of that of near; set both by NTP" in str(clock_difference("near", found))
    assert clock_difference("near", found.model_copy(update={"clock_ahead_s": -2.0})) is None
