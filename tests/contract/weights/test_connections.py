"""Connections that weights come by: kept for the next version, made anew when broken, left when a fetch is given up."""

from __future__ import annotations

import asyncio

import pytest

from penstock.errors import ServiceUnavailableError
from penstock.security import NO_SECURITY
from penstock.security.certificate_files import TlsFiles
from penstock.security.tls import ClientContexts
from penstock.transfer import connections
from penstock.transfer.connections import Connections
from tests.helpers.certificates import make_security
from tests.helpers.waiting import until
from tests.helpers.weights.sites import CHUNK_BYTES, site

MB = 1_000_000
NUM_CONNECTIONS = 4
SIZE_BYTES = 2 * MB


@pytest.fixture(autouse=True)
def _little_in_each_request(monkeypatch):
    """So that every connection is used."""
    monkeypatch.setattr("penstock.transfer.fetching.MIN_SPAN_BYTES", CHUNK_BYTES)


async def test_the_next_version_comes_by_the_connections_of_the_one_before(tmp_path):
    async with site(tmp_path) as made:
        receiver = await made.receiver("a")
        for version in (1, 2, 3):
            await receiver.fetch(made.publish(version, size_bytes=SIZE_BYTES))
        assert made.link.num_connects == NUM_CONNECTIONS


async def test_a_connection_that_broke_between_two_versions_is_made_again_and_no_failure_of_the_source(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("penstock.transfer.content_sources.MAX_FAILURES", 1)
    async with site(tmp_path) as made:
        receiver = await made.receiver("a")
        await receiver.fetch(made.publish(1, size_bytes=SIZE_BYTES))
        made.link.cut()
        download = await receiver.fetch(made.publish(2, size_bytes=SIZE_BYTES))
        assert made.link.num_connects == 2 * NUM_CONNECTIONS
        assert download.num_refused == 0


async def test_few_idle_connections_are_kept_and_not_for_long(tmp_path, monkeypatch):
    async with site(tmp_path) as made:
        receiver = await made.receiver("a")
        monkeypatch.setattr(connections, "MAX_IDLE", 1)
        for version, num_connects in ((1, 4), (2, 7)):
            await receiver.fetch(made.publish(version, size_bytes=SIZE_BYTES))
            assert made.link.num_connects == num_connects
        monkeypatch.setattr(connections, "MAX_IDLE_S", 0.0)
        await receiver.fetch(made.publish(3, size_bytes=CHUNK_BYTES // 2))
        assert made.link.num_connects == 8


@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_a_fetch_that_is_given_up_ends_at_once_though_its_source_is_silent(tmp_path, is_encrypted):
    security = make_security(tmp_path) if is_encrypted else NO_SECURITY
    async with site(tmp_path, security=security, origin_bytes_per_second=2 * MB) as made:
        receiver = await made.receiver("a")
        manifest = made.publish(1, size_bytes=SIZE_BYTES)
        fetch = asyncio.create_task(receiver.fetch(manifest))
        await until(lambda: receiver.fetched_bytes > SIZE_BYTES / 4)
        made.link.is_open.clear()
        fetch.cancel()
        # A source may be silent for 15 s before a fetch leaves it by itself.
        await until(fetch.done, timeout_s=10)
        assert fetch.cancelled()
        made.link.is_open.set()
        assert (await receiver.fetch(manifest)).fetched_bytes < manifest.size_bytes


@pytest.mark.parametrize("url", ["http://host:port/x", "http://host:99999/x", "http://[::1/x"])
def test_an_address_that_is_none_is_no_source(url):
    made = Connections(tls=ClientContexts(TlsFiles()), headers={}, num_threads=1)
    with pytest.raises(ServiceUnavailableError):
        made.take(url)
    made.close()
