"""Certificates of a few seconds, renewed while a broker's process, its clients and weights over HTTP go on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from penstock.clients.broker import BrokerClient
from penstock.clients.leases import LeaseSession
from penstock.security import Security
from penstock.v1 import broker_pb2
from tests.helpers.brokers.broker import limits
from tests.helpers.certificates import issue, make_authority
from tests.helpers.ports import free_addresses
from tests.helpers.proxies.tcp_proxy import TcpProxy
from tests.helpers.waiting import until
from tests.helpers.weights.sites import site

VALIDITY = timedelta(seconds=6)
RENEWED_EVERY_S = 1.0
PATIENCE_S = 15.0


class CountingHolder:
    """A generator without slots, which counts the streams that began."""

    def __init__(self) -> None:
        self.num_streams = 0

    def num_free_slots(self) -> int:
        return 0

    def beat(self) -> broker_pb2.GeneratorBeat:
        return broker_pb2.GeneratorBeat()

    def owned_by(self, owner: broker_pb2.RunOwner) -> None:
        self.num_streams += 1


def expiry(security: Security) -> datetime:
    assert security.cert_file is not None
    return x509.load_pem_x509_certificate(security.cert_file.read_bytes()).not_valid_after_utc


@asynccontextmanager
async def renewing(authority: Path, out: Path, *, name: str) -> AsyncIterator[Security]:
    """Short-lived credentials that `penstock certs issue` makes again and again in one folder."""

    async def renew() -> None:
        while True:
            await asyncio.sleep(RENEWED_EVERY_S)
            await asyncio.to_thread(issue, authority, validity=VALIDITY, out=out, name=name)

    security = issue(authority, validity=VALIDITY, out=out, name=name)
    task = asyncio.create_task(renew())
    try:
        yield security
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def broker_process(security: Security, log: Path) -> AsyncIterator[int]:
    """`penstock serve broker` on a free port, with these credentials."""
    address = free_addresses(1)[0]
    environment = {
        "PENSTOCK_TLS_CA": str(security.ca_file),
        "PENSTOCK_TLS_CERT": str(security.cert_file),
        "PENSTOCK_TLS_KEY": str(security.key_file),
    }
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "console", "serve", "broker", "redis_url=memory://", "--listen", address),
            env=os.environ | environment,
            stdout=output,
            stderr=output,
        )
    try:
        yield int(address.rpartition(":")[2])
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_certificates_are_renewed_without_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each fetch over connections of its own.
    monkeypatch.setattr("penstock.transfer.connections.MAX_IDLE_S", 0.0)
    authority = make_authority(tmp_path / "authority")
    async with (
        renewing(authority, tmp_path / "here", name="here") as security,
        renewing(authority, tmp_path / "broker", name="broker") as brokers,
        broker_process(brokers, tmp_path / "broker.log") as port,
        site(tmp_path, security=security) as made,
    ):
        proxy = TcpProxy(port)
        await proxy.start()
        holder = CountingHolder()
        async with BrokerClient(proxy.address, security=security, patience_s=60.0) as client:
            client.owner = broker_pb2.RunOwner(owner_id="trainer")
            await client.open_run("r", limits=limits(), policy_version=0, takes_over=True)
            hello = broker_pb2.GeneratorHello(run_id="r", generator_id="test-1", max_context_tokens=1024)
            session = LeaseSession(client, hello=hello, handler=holder)
            leases = asyncio.create_task(session.run())
            receiver = await made.receiver("a")
            second_expiry = max(expiry(security), expiry(brokers)) + VALIDITY
            version, used = 0, expiry(security)
            begun = datetime.now(UTC)
            while begun < second_expiry:
                await until(lambda before=used: expiry(security) > before, timeout_s=PATIENCE_S)
                begun, used = datetime.now(UTC), expiry(security)
                # The link breaks: whatever goes on does so over new connections.
                num_streams = holder.num_streams
                proxy.cut()
                await until(
                    lambda before=num_streams: leases.done() or holder.num_streams > before, timeout_s=PATIENCE_S
                )
                assert not leases.done(), leases.exception()
                await client.get_run("r")
                async with BrokerClient(proxy.address, security=security, patience_s=PATIENCE_S) as newcomer:
                    await newcomer.get_run("r")
                version += 1
                manifest = made.publish(version, size_bytes=200_000)
                assert (await receiver.fetch(manifest)).origin_bytes == manifest.size_bytes
            leases.cancel()
            await asyncio.gather(leases, return_exceptions=True)
        await proxy.stop()
    assert version >= 3
