"""Weights across a link between sites: as fast as it is, nothing twice, one copy for all receivers of the site."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.clients.weights import content_id
from penstock.downloads.downloader import Downloader
from penstock.downloads.relay_wait import RelayWait
from penstock.errors import ServiceUnavailableError
from penstock.security import NO_SECURITY, Security
from penstock.transfer import content_server as serving_module
from penstock.transfer import partial
from penstock.transfer.coding import MAX_PLAIN_BYTES
from penstock.transfer.fetching import Fetching
from penstock.transfer.partial import PartialContent
from penstock.transfer.rate import BURST_S
from penstock.transfer.relay import Relay
from penstock.v1 import weights_pb2
from services.trainer.publishing.deltas import Published
from tests.helpers.certificates import make_security
from tests.helpers.waiting import until
from tests.helpers.weights.scripted_weight_store import make_manifest
from tests.helpers.weights.sites import CHUNK_BYTES, site

pytestmark = pytest.mark.slow

HEADERS_BYTES = 1024
"""Of one HTTP answer, and more."""
MB = 1_000_000


@pytest.fixture(autouse=True)
def _no_waiting_between_tries(monkeypatch):
    monkeypatch.setattr("penstock.transfer.content_sources.backoff_s", lambda: iter([0.01] * 100))


async def status(session, url, **headers):
    async with session.get(url, headers=headers) as response:
        await response.read()
        return response.status


async def test_a_fetch_keeps_its_connections_busy_and_waits_for_few_round_trips(tmp_path, monkeypatch):
    """What keeps a fetch near size over bandwidth; how near, `penstock bench weights` measures."""
    spans = []
    fetch_span = Fetching._fetch_span

    async def counted(self, source, span):
        spans.append(span)
        await fetch_span(self, source, span)

    monkeypatch.setattr(Fetching, "_fetch_span", counted)
    async with site(tmp_path, bytes_per_second=20 * MB, delay_s=0.03) as made:
        receiver = await made.receiver("a")
        manifest = made.publish(size_bytes=10 * MB)
        begun_s = time.monotonic()
        await receiver.fetch(manifest)
        assert time.monotonic() - begun_s >= 0.9 * 10 / 20
        assert made.link.num_connects == len(spans) == 3


async def test_after_a_cut_nothing_is_sent_twice(tmp_path):
    async with site(tmp_path, bytes_per_second=20 * MB) as made:
        manifest = made.publish(size_bytes=8 * MB)
        receiver = await made.receiver("a")
        fetch = asyncio.create_task(receiver.fetch(manifest))
        for num_cuts, share in enumerate((0.25, 0.6), start=1):
            await until(lambda share=share: made.link.delivered_bytes > share * manifest.size_bytes)
            # A reset also throws away what was delivered and not read yet: let that be nothing.
            made.link.is_open.clear()
            headers_bytes = num_cuts * 4 * HEADERS_BYTES
            await until(lambda most=headers_bytes: made.link.delivered_bytes - receiver.fetched_bytes < most)
            made.link.cut()
            made.link.is_open.set()
        download = await fetch
        assert made.link.delivered_bytes - manifest.size_bytes < 3 * 4 * HEADERS_BYTES
    assert download.fetched_bytes == manifest.size_bytes


async def test_a_process_that_ends_leaves_what_the_next_one_need_not_fetch(tmp_path):
    async with site(tmp_path, bytes_per_second=20 * MB) as made:
        manifest = made.publish(size_bytes=8 * MB)
        ending = await made.receiver("a")
        fetch = asyncio.create_task(ending.fetch(manifest))
        await until(lambda: ending.fetched_bytes > 0.5 * manifest.size_bytes)
        fetch.cancel()
        await asyncio.gather(fetch, return_exceptions=True)
        again = await made.receiver("a")
        download = await again.fetch(manifest)
    lost_bytes = ending.fetched_bytes + download.fetched_bytes - manifest.size_bytes
    # Up to one unfinished chunk, and one being checked, for each of four connections.
    assert 0 <= lost_bytes <= 4 * 2 * CHUNK_BYTES


async def test_one_copy_crosses_the_link_however_many_receivers_the_site_has(tmp_path):
    async with site(tmp_path, bytes_per_second=20 * MB) as made:
        receivers = [await made.receiver(name) for name in "abc"]
        for version in (1, 2):
            before_bytes = made.link.delivered_bytes
            manifest = made.publish(version, size_bytes=4 * MB)
            downloads = await asyncio.gather(*(receiver.fetch(manifest) for receiver in receivers))
            assert made.link.delivered_bytes - before_bytes < manifest.size_bytes + 8 * HEADERS_BYTES
            assert sorted(download.origin_bytes for download in downloads) == [0, 0, manifest.size_bytes]
            assert [download.fetched_bytes for download in downloads] == [manifest.size_bytes] * 3
            assert len({download.path.read_bytes() for download in downloads}) == 1
        late = await made.receiver("late")
        assert (await late.fetch(manifest)).origin_bytes == 0
        assert sum(receiver.relayed_bytes for receiver in (*receivers, late)) == (2 + 2 + 1) * manifest.size_bytes


async def test_the_others_are_served_while_the_first_still_fetches(tmp_path):
    async with site(tmp_path, bytes_per_second=4 * MB) as made:
        manifest = made.publish(size_bytes=4 * MB)
        first, second = await made.receiver("a"), await made.receiver("b")
        fetches = [asyncio.create_task(receiver.fetch(manifest)) for receiver in (first, second)]
        await until(lambda: first.relayed_bytes + second.relayed_bytes > 0.2 * manifest.size_bytes)
        assert not any(fetch.done() for fetch in fetches)
        await asyncio.gather(*fetches)


async def test_when_the_relaying_receiver_dies_one_of_the_others_takes_its_place(tmp_path):
    async with site(tmp_path, bytes_per_second=8 * MB) as made:
        manifest = made.publish(size_bytes=6 * MB)
        first = await made.receiver("a")
        dying = asyncio.create_task(first.fetch(manifest))
        await until(lambda: made.link.delivered_bytes > 0)
        others = [await made.receiver(name) for name in "bc"]
        fetches = [asyncio.create_task(receiver.fetch(manifest)) for receiver in others]
        await until(lambda: first.relayed_bytes > 0.3 * manifest.size_bytes)
        dying.cancel()
        await asyncio.gather(dying, return_exceptions=True)
        await first.relay.__aexit__()
        lost_bytes = made.link.delivered_bytes
        downloads = await asyncio.gather(*fetches)
        assert len({download.path.read_bytes() for download in downloads}) == 1
        assert made.link.delivered_bytes < lost_bytes + manifest.size_bytes
        # One went to the origin for what it lacked, the other one to it.
        assert min(download.origin_bytes for download in downloads) == 0
        assert 0 < max(download.origin_bytes for download in downloads) < manifest.size_bytes


async def test_a_relay_that_stands_still_is_left_for_the_origin(tmp_path, monkeypatch):
    monkeypatch.setattr(partial, "STALL_S", 0.2)
    async with site(tmp_path, bytes_per_second=20 * MB) as made:
        manifest = made.publish(size_bytes=2 * MB)
        made.link.is_open.clear()
        hanging = asyncio.create_task((await made.receiver("a")).fetch(manifest))
        other = await made.receiver("b")
        fetch = asyncio.create_task(other.fetch(manifest))
        await until(lambda: made.link.num_connects == 2)
        made.link.is_open.set()
        assert (await fetch).origin_bytes == manifest.size_bytes
        await hanging


async def test_a_byte_flipped_at_a_relay_is_refused_counted_and_fetched_from_elsewhere(tmp_path):
    async with site(tmp_path) as made:
        manifest = made.publish(size_bytes=2 * MB)
        first, second = await made.receiver("a"), await made.receiver("b")
        with (await first.fetch(manifest)).path.open("r+b") as file:
            file.seek(1 * MB)
            byte = file.read(1)
            file.seek(1 * MB)
            file.write(bytes([byte[0] ^ 1]))
        refused = []
        download = await second.fetch(manifest, on_refused=refused.append)
        assert (download.num_refused, len(refused)) == (1, 1)
        assert download.path.read_bytes() == (tmp_path / "v1").read_bytes()
        assert CHUNK_BYTES <= download.origin_bytes < manifest.size_bytes
        # Whoever comes next is not sent to the liar.
        third = await made.receiver("c")
        assert (await third.fetch(manifest)).num_refused == 0


async def test_a_cap_holds_for_all_connections_together(tmp_path):
    async with site(tmp_path) as made:
        manifest = made.publish(size_bytes=3 * MB)
        receiver = await made.receiver("a", max_bytes_per_second=4 * MB)
        begun_s = time.monotonic()
        await receiver.fetch(manifest)
        assert time.monotonic() - begun_s >= (3 - 4 * 0.25 - 1) / 4


def publish_bfloat16(made, *, num_values):
    """As weights are: their exponents repeat, their mantissas do not."""
    values = np.random.default_rng(0).standard_normal(num_values, np.float32) * np.float32(0.02)
    path = made.folder / "v1"
    save_file({"w": (values.view(np.uint32) >> 16).astype(np.uint16)}, path)
    url = f"http://127.0.0.1:{made.link.port}/weights/r/{path.name}"
    manifest = make_manifest(path, policy_version=1, url=url, chunk_bytes=CHUNK_BYTES)
    made.store.add(Published(manifest=manifest, path=path))
    return manifest


async def test_what_is_compressed_on_the_way_arrives_plain_checked_and_resumed_after_a_cut(tmp_path):
    async with site(tmp_path, bytes_per_second=20 * MB) as made:
        manifest = publish_bfloat16(made, num_values=4 * MB)
        first, second = await made.receiver("a", compresses=True), await made.receiver("b", compresses=True)
        fetch = asyncio.create_task(first.fetch(manifest))
        await until(lambda: first.fetched_bytes > 0.3 * manifest.size_bytes)
        made.link.cut()
        download = await fetch
        plain = (tmp_path / "v1").read_bytes()
        assert download.path.read_bytes() == plain
        # What was cut off comes twice: a frame for each of four connections, and what lay in the sockets.
        assert download.origin_bytes < 0.85 * manifest.size_bytes + 4 * MAX_PLAIN_BYTES
        # Inside the site it goes as it is.
        relayed = await second.fetch(manifest)
        assert (relayed.fetched_bytes, relayed.origin_bytes) == (manifest.size_bytes, 0)
        assert relayed.path.read_bytes() == plain
    alone = tmp_path / "alone"
    async with site(tmp_path) as made, Downloader(compresses=True) as downloader:
        manifest = publish_bfloat16(made, num_values=4 * MB)
        assert (await downloader.fetch(manifest, alone)).fetched_bytes < 0.85 * manifest.size_bytes
        assert made.link.delivered_bytes < 0.85 * manifest.size_bytes
    assert alone.read_bytes() == plain


async def test_a_cap_of_the_origin_holds_for_all_receivers_together(tmp_path):
    async with site(tmp_path, origin_bytes_per_second=4 * MB) as made:
        manifest = made.publish(size_bytes=1 * MB)
        receivers = [Downloader() for _ in range(3)]
        begun_s = time.monotonic()
        for number, receiver in enumerate(receivers):
            async with receiver:
                await receiver.fetch(manifest, tmp_path / f"fetched-{number}")
        # What passes at once after a pause, and the last piece of each connection, do not count.
        assert time.monotonic() - begun_s >= (3 - 4 * BURST_S - 1) / 4
        assert all((tmp_path / f"fetched-{number}").read_bytes() == (tmp_path / "v1").read_bytes() for number in (0, 2))


async def test_a_relay_asks_for_the_token_and_refuses_nonsense(tmp_path):
    async with site(tmp_path, security=Security(token="secret", allows_plain=True)) as made:
        manifest = made.publish(size_bytes=1 * MB)
        receiver = await made.receiver("a")
        await receiver.fetch(manifest)
        url = receiver.relay.url("r", content_id(manifest))
        async with aiohttp.ClientSession() as session:
            assert await status(session, url) == 401
            token = {"Authorization": "Bearer secret"}
            for asked, expected in (
                ("bytes=0-9", 206),
                (f"bytes={2 * MB}-", 416),
                ("bytes=9-1", 416),
                ("lines=1-2", 416),
            ):
                assert await status(session, url, Range=asked, **token) == expected
            assert await status(session, url + "x", **token) == 404


async def test_origin_and_relays_show_certificates_and_ask_for_them(tmp_path):
    async with site(tmp_path, security=make_security(tmp_path, token="secret")) as made:
        manifest = made.publish(size_bytes=1 * MB)
        first, second = await made.receiver("a"), await made.receiver("b")
        assert (await first.fetch(manifest)).origin_bytes == manifest.size_bytes
        download = await second.fetch(manifest)
        assert (download.origin_bytes, download.fetched_bytes) == (0, manifest.size_bytes)
        for url in (manifest.urls[0], first.relay.url("r", content_id(manifest))):
            assert url.startswith("https://")
            stranger = Downloader(security=Security(ca_file=tmp_path / "cert.pem", token="secret"))
            async with stranger:
                manifest.urls[:] = [url]
                with pytest.raises(ServiceUnavailableError, match=r"certificate|Disconnected|Reset|BrokenPipe|EOF"):
                    await stranger.fetch(manifest, tmp_path / "stranger")


async def test_a_relay_keeps_two_versions_and_what_is_small_and_lets_the_oldest_go(tmp_path):
    async with site(tmp_path) as made:
        receiver = await made.receiver("a")
        manifests = []
        for version, size_bytes in enumerate([400_000, 20_000, 400_000, 20_000, 400_000]):
            manifests.append(made.publish(version, size_bytes=size_bytes))
            await receiver.downloader.offer(manifests[-1], tmp_path / f"v{version}")
        async with aiohttp.ClientSession() as session:
            statuses = [await status(session, receiver.relay.url("r", content_id(each))) for each in manifests]
    assert statuses == [404, 206, 206, 206, 206]


@pytest.mark.parametrize("is_file", [True, False])
async def test_requests_at_once_are_bounded_and_one_who_takes_nothing_is_given_up(tmp_path, monkeypatch, is_file):
    monkeypatch.setattr(serving_module, "SILENT_RECEIVER_S", 0.5)
    path = tmp_path / "c"
    path.write_bytes(b"x" * 64 * MB)
    whole = await PartialContent.whole(path, [weights_pb2.ChunkInfo(size_bytes=64 * MB)])
    async with (
        serving_module.serving_contents(
            lambda *_: path if is_file else whole,
            listen="127.0.0.1:0",
            setting="listen",
            security=NO_SECURITY,
            max_requests=1,
        ) as base,
        aiohttp.ClientSession(read_bufsize=1024) as session,
        aiohttp.ClientSession() as other,
    ):
        url = f"{base}/weights/r/c"
        async with session.get(url):
            assert await status(other, url, Range="bytes=0-9") == 503
            async with asyncio.timeout(10):
                while await status(other, url, Range="bytes=0-9") != 206:  # noqa: ASYNC110 -- no event
                    await asyncio.sleep(0.05)
    whole.close()


async def test_a_relay_on_any_address_is_named_by_the_one_that_the_store_sees_or_with_tls_by_its_name(tmp_path):
    store = "192.0.2.200:7304"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.200", 7304))
        except OSError:
            pytest.skip("no route leads out of this machine")
        seen = probe.getsockname()[0]
    plain = Security(allows_plain=True)
    for peer, security, host in (
        (store, plain, seen),
        (store, make_security(tmp_path), socket.gethostname()),
        ("127.0.0.1:7304", plain, socket.gethostname()),
        ("no-such-host.invalid:7304", plain, socket.gethostname()),
    ):
        async with Relay(listen="0.0.0.0:0", peer=peer, security=security) as relay:
            assert urlsplit(relay.url("r", "c")).hostname == host.lower()


async def test_the_relay_of_a_plan_is_the_one_that_fetches_over_the_link(tmp_path):
    async with site(tmp_path, bytes_per_second=20 * MB) as made:
        num_asked = Counter()

        async def waiting(name):
            receiver = await made.receiver(name)

            async def find(*arguments):
                num_asked[name] += 1
                return await receiver.client.find_relays(*arguments)

            receiver.downloader.relay_wait = RelayWait(find, patience_s=1.0)
            return receiver

        relay = await made.receiver("relay")
        first, second = await waiting("first"), await waiting("second")
        for version in (1, 2):
            before_bytes = made.link.delivered_bytes
            num_asked.clear()
            manifest = made.publish(version, size_bytes=2 * MB)
            # They hear of it first, and leave it to the relay.
            others = [asyncio.create_task(each.fetch(manifest)) for each in (first, second)]
            await until(lambda: min(num_asked["first"], num_asked["second"]) >= 2)
            assert made.link.delivered_bytes == before_bytes
            brought = await relay.fetch(manifest)
            downloads = await asyncio.gather(*others)
            assert brought.origin_bytes == manifest.size_bytes
            assert [each.origin_bytes for each in downloads] == [0, 0]

        # Without it they wait once, and then no more; one of them fetches for both.
        for version, least_s in ((3, 0.9), (4, 0.0)):
            manifest = made.publish(version, size_bytes=2 * MB)
            begun_s = time.monotonic()
            downloads = await asyncio.gather(first.fetch(manifest), second.fetch(manifest))
            assert sum(each.origin_bytes for each in downloads) == manifest.size_bytes
            took_s = time.monotonic() - begun_s
            assert took_s >= least_s
        assert took_s < 0.9
