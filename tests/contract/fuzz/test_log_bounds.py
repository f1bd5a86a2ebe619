"""Nobody who reaches a port fills a disk with logs: 1,000 malformed requests at each listener leave bounded logs."""

import asyncio
import os
import socket
import struct
import subprocess
import sys
from contextlib import closing, contextmanager, suppress

import grpc
import pytest

from penstock.network.rpc import wait_until_serving
from tests.helpers.console import ROOT, environment
from tests.helpers.ports import free_port
from tests.helpers.waiting import until

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]
NUM_REQUESTS = 1000
NUM_AT_ONCE = 25
MOST_LOG_BYTES = 192 * 1024
"""A few events' budgets."""
MOST_LINE_BYTES = 8192

HTTP = [
    b"GET /" + b"\xff" * 9000 + b" HTTP/1.1\r\n\r\n",
    b"POST / HTTP/1.1\r\nContent-Length: " + b"9" * 500 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nX: " + b"a" * 60_000 + b"\r\n\r\n",
    b"\x16\x03\x01" + os.urandom(4000) + b"\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 20000\r\n\r\n" + b"{" * 20_000,
    b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzzzz" + b"q" * 60_000 + b"\r\n",
    b"GET /weights/r/" + b"b" * 4000 + b" HTTP/1.1\r\nHost: x\r\nRange: bytes=" + b"z" * 4000 + b"\r\n\r\n",
]
HTTP2 = [
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 4000,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + b"\xff\xff\xff\x01" + b"x" * 4000,
    b"GET / HTTP/1.1\r\n\r\n",
    os.urandom(4000),
]


@contextmanager
def process(command, log, **options):
    with log.open("wb") as stderr:
        running = subprocess.Popen(command, cwd=ROOT, env=environment(), stderr=stderr, **options)
    try:
        yield running
        assert running.poll() is None, "the service ended"
    finally:
        running.kill()
        running.wait()
        if running.stdout is not None:
            running.stdout.close()


async def fire(port, requests):
    """NUM_REQUESTS raw requests; every other connection is reset instead of closed."""
    slots = asyncio.Semaphore(NUM_AT_ONCE)

    async def one(number):
        async with slots, asyncio.timeout(60):
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(requests[number % len(requests)])
                if number % 2:
                    linger = struct.pack("ii", 1, 0)
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                else:
                    async with asyncio.timeout(0.5):
                        await reader.read(64)
            except (OSError, TimeoutError):
                pass
            finally:
                with closing(writer):
                    pass

    await asyncio.gather(*(one(number) for number in range(NUM_REQUESTS)))


async def fire_rpcs(address):
    """NUM_REQUESTS calls: no messages, unknown methods, other streams' messages."""
    methods = (
        "TrainerService/StartRun",
        "WeightStoreService/GetWeightsManifest",
        "WeightStoreService/ReportHolding",
        "X" * 3000,
    )
    slots = asyncio.Semaphore(NUM_AT_ONCE)

    async def one(channel, number):
        async with slots:
            call = channel.unary_unary(f"/penstock.v1.{methods[number % len(methods)]}")
            with suppress(grpc.aio.AioRpcError):
                await call(b"\xff" * 20_000 if number % 3 else b"", timeout=30)

    async with grpc.aio.insecure_channel(address) as channel:
        await asyncio.gather(*(one(channel, number) for number in range(NUM_REQUESTS)))


def assert_bounded(log):
    data = log.read_bytes()
    assert len(data) <= MOST_LOG_BYTES, f"{len(data)} bytes; begins with {data[:2000]!r}"
    assert max(map(len, data.splitlines()), default=0) <= MOST_LINE_BYTES


async def test_the_trainers_three_listeners(tmp_path):
    grpc_port, weights_port, metrics_port = (free_port() for _ in range(3))
    log, address = tmp_path / "trainer.log", f"127.0.0.1:{grpc_port}"
    settings = (f"weights_listen=127.0.0.1:{weights_port}", f"metrics_port={metrics_port}")
    command = [sys.executable, "-m", "console", "serve", "trainer", "--listen", address, *settings]
    with process(command, log):
        assert await wait_until_serving(address, timeout_s=60)
        before = len(log.read_bytes())
        for port, requests in ((weights_port, HTTP), (metrics_port, HTTP), (grpc_port, HTTP2)):
            await fire(port, requests)
            print(f"port {port}: {len(log.read_bytes()) - before} bytes so far")
        await fire_rpcs(address)
        print(f"calls: {len(log.read_bytes()) - before} bytes")
    assert_bounded(log)


async def test_the_openai_endpoint(tmp_path):
    log = tmp_path / "generator.log"
    command = [sys.executable, "-m", "tests.helpers.generators.openai_listener", str(tmp_path / "model")]
    with process(command, log, stdout=subprocess.PIPE) as running:
        os.set_blocking(running.stdout.fileno(), False)
        said = []
        await until(lambda: said.append(running.stdout.readline() or b"") or said[-1].endswith(b"\n"), timeout_s=60)
        await fire(int(said[-1].split(b":")[2].split(b"/")[0]), HTTP)
        print(f"{len(log.read_bytes())} bytes")
    assert_bounded(log)
