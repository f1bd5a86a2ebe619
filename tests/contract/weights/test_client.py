"""Manifests over real gRPC, contents over real HTTP: only what is proved is ever kept."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from penstock.clients.weights import VersionName, WeightsClient, check_chain, check_manifest
from penstock.downloads.downloader import Downloader
from penstock.errors import (
    DigestMismatchError,
    InvalidFieldError,
    NotOfferedError,
    ServiceUnavailableError,
    UnknownVersionError,
)
from penstock.model.digests import safetensors_digests
from penstock.network.http_server import listen_http
from penstock.security import Security
from penstock.transfer.content_sources import MAX_FAILURES
from penstock.v1 import weights_pb2
from tests.helpers.serving import serving
from tests.helpers.waiting import until
from tests.helpers.weights.scripted_weight_store import ScriptedWeightStore, make_manifest, write_weights


@pytest.fixture
async def store(tmp_path):
    directory = tmp_path / "published"
    directory.mkdir()
    made = ScriptedWeightStore(directory)
    async with made.serving_content():
        yield made


@pytest.fixture
async def downloader(monkeypatch):
    monkeypatch.setattr("penstock.transfer.content_sources.backoff_s", lambda: iter([0.0] * 100))
    async with Downloader() as made:
        yield made


@asynccontextmanager
async def listening(handler):
    """An HTTP server that answers everything so; its base address."""
    app = web.Application()
    app.router.add_get("/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        yield await listen_http(runner, "127.0.0.1:0", setting="listen", ssl_context=None)
    finally:
        await runner.cleanup()


async def test_a_download_is_whole_and_leaves_no_partial_file(store, downloader, tmp_path):
    manifest = await store.publish(1)
    target = tmp_path / "cache" / "v1"
    download = await downloader.fetch(manifest, target)
    assert safetensors_digests(target) == safetensors_digests(store.directory / "v1h0.safetensors")
    assert download.fetched_bytes == manifest.size_bytes
    assert [path.name for path in target.parent.iterdir()] == ["v1"]


async def test_a_broken_download_goes_on_where_it_broke_and_nothing_comes_twice(store, downloader, tmp_path):
    manifest = await store.publish(1)
    store.break_after_bytes = [9000, 100]
    download = await downloader.fetch(manifest, tmp_path / "v1")
    begins = [int(asked.removeprefix("bytes=").partition("-")[0]) for asked in store.ranges]
    # Where exactly depends on how much of the last answer had been read when the connection closed.
    assert begins[0] == 0 < begins[1] <= 9000
    assert begins[1] <= begins[2] <= begins[1] + 100
    assert len(begins) == 3
    assert download.fetched_bytes == download.origin_bytes == manifest.size_bytes


async def test_a_partial_file_of_an_earlier_process_is_continued_where_chunks_are_missing(store, downloader, tmp_path):
    manifest = await store.publish(1)
    content = bytearray((store.directory / "v1h0.safetensors").read_bytes()[:12_288])
    content[5000] ^= 1
    (tmp_path / "v1.partial").write_bytes(content)
    await downloader.fetch(manifest, tmp_path / "v1")
    # Each by a connection of its own: either may be the first.
    assert sorted(store.ranges) == [f"bytes=12288-{manifest.size_bytes - 1}", "bytes=4096-8191"]


async def test_a_source_that_ignores_ranges_serves_whole_contents_only(store, downloader, tmp_path):
    manifest = await store.publish(1)
    store.ignores_ranges = True
    await downloader.fetch(manifest, tmp_path / "v1")
    store.break_after_bytes = [9000]
    with pytest.raises(ServiceUnavailableError, match="answered HTTP 200 to a ranged GET"):
        await downloader.fetch(manifest, tmp_path / "v1b")


async def test_a_corrupt_chunk_is_refused_counted_and_fetched_again(store, downloader, tmp_path):
    manifest = await store.publish(1)
    store.corrupt_requests = 1
    refused = []
    download = await downloader.fetch(manifest, tmp_path / "v1", on_refused=refused.append)
    assert (download.num_refused, len(refused)) == (1, 1)
    assert store.ranges[1] == f"bytes=8192-{manifest.size_bytes - 1}"


async def test_a_source_that_only_lies_is_given_up(store, downloader, tmp_path):
    manifest = await store.publish(1)
    store.corrupt_requests = 10**6
    with pytest.raises(DigestMismatchError):
        await downloader.fetch(manifest, tmp_path / "v1")
    assert MAX_FAILURES <= len(store.ranges) <= MAX_FAILURES + len(manifest.chunks)
    assert not (tmp_path / "v1").exists()


async def test_a_complete_file_is_not_fetched_twice_and_a_damaged_one_is(store, downloader, tmp_path):
    manifest = await store.publish(1)
    await downloader.fetch(manifest, tmp_path / "v1")
    assert (await downloader.fetch(manifest, tmp_path / "v1")).fetched_bytes == 0
    with (tmp_path / "v1").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    assert (await downloader.fetch(manifest, tmp_path / "v1")).fetched_bytes == manifest.size_bytes


async def test_a_version_that_is_gone_and_a_dead_server_are_distinguished(store, downloader, tmp_path):
    manifest = await store.publish(1)
    store.is_gone = True
    with pytest.raises(UnknownVersionError):
        await downloader.fetch(manifest, tmp_path / "v1")
    manifest.urls[0] = "http://127.0.0.1:9/nothing"
    with pytest.raises(ServiceUnavailableError):
        await downloader.fetch(manifest, tmp_path / "v1")


async def test_the_next_source_is_tried_when_one_is_dead(store, downloader, tmp_path):
    manifest = await store.publish(1)
    manifest.urls.insert(0, "http://127.0.0.1:9/nothing")
    assert (await downloader.fetch(manifest, tmp_path / "v1")).fetched_bytes == manifest.size_bytes


async def test_a_watch_yields_what_is_published_and_survives_a_restart_of_the_store(store):
    seen, refused = [], []
    async with (
        serving(store.service()) as (server, target),
        WeightsClient(target, run_id="r", receiver_id="x") as client,
    ):
        task = asyncio.create_task(client.watch(lambda manifest: seen.append(manifest.policy_version), refused.append))
        await store.publish(0)
        await until(lambda: seen == [0])
        await store.publish(1)
        await until(lambda: seen == [0, 1])
        port = server.port
        await server.stop(grace_s=0)
        async with _serving_again(store, port):
            await until(lambda: seen == [0, 1, 1])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert refused == []


def _serving_again(store, port):
    from contextlib import asynccontextmanager

    from penstock.network.rpc import Server

    @asynccontextmanager
    async def again():
        server = Server(listen=f"127.0.0.1:{port}", services=[store.service()])
        await server.start()
        try:
            yield
        finally:
            await server.stop(grace_s=0)

    return again()


async def test_get_manifest_names_versions_and_reports_are_answered(store):
    async with serving(store.service()) as (_, target), WeightsClient(target, run_id="r", receiver_id="x") as client:
        with pytest.raises(UnknownVersionError):
            await client.get_manifest()
        await store.publish(3)
        await store.publish(4)
        assert (await client.get_manifest()).policy_version == 4
        assert (await client.get_manifest(3)).policy_version == 3
        newest = await client.report_holding(policy_version=3, digest="d", swap_pause_s=0.1, fetched_bytes=7)
        assert newest == 4
        assert (store.reports[0].receiver_id, store.reports[0].fetched_bytes) == ("x", 7)
        store.refuses_reports = True
        with pytest.raises(DigestMismatchError):
            await client.report_holding(policy_version=3, digest="d", swap_pause_s=0.1, fetched_bytes=7)


def _gap(manifest):
    manifest.chunks[1].offset += 1


def _unsorted(manifest):
    tensors = list(reversed(manifest.tensors))
    del manifest.tensors[:]
    manifest.tensors.extend(tensors)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda m: setattr(m, "run_id", "other"), InvalidFieldError),
        (lambda m: setattr(m, "policy_version", -1), InvalidFieldError),
        (lambda m: setattr(m, "kind", weights_pb2.WEIGHTS_KIND_DELTA), NotOfferedError),
        (lambda m: setattr(m, "encoding", weights_pb2.WEIGHTS_ENCODING_SAFETENSORS_ZSTD), NotOfferedError),
        (lambda m: m.urls.append("file:///etc/passwd"), InvalidFieldError),
        (lambda m: m.ClearField("urls"), InvalidFieldError),
        (lambda m: m.ClearField("tensors"), InvalidFieldError),
        (lambda m: setattr(m, "size_bytes", m.size_bytes + 1), InvalidFieldError),
        (lambda m: setattr(m, "digest", "0" * 64), DigestMismatchError),
        (lambda m: setattr(m.tensors[0], "blake3", "0" * 64), DigestMismatchError),
        (lambda m: setattr(m.tensors[0], "sha256", "0" * 64), InvalidFieldError),
        (lambda m: setattr(m.tensors[0], "blake3", ""), InvalidFieldError),
        (lambda m: setattr(m.chunks[0], "blake3", ""), InvalidFieldError),
        (lambda m: setattr(m.chunks[0], "sha256", "0" * 64), InvalidFieldError),
        (_gap, InvalidFieldError),
        (_unsorted, InvalidFieldError),
    ],
)
def test_a_manifest_that_cannot_be_proved_is_refused(tmp_path, spoil, error):
    manifest = make_manifest(write_weights(tmp_path / "w", seed=1), policy_version=1, url="http://h/w")
    check_manifest(manifest, run_id="r")
    spoil(manifest)
    with pytest.raises(error):
        check_manifest(manifest, run_id="r")


@pytest.mark.parametrize("digest", ["../../../evil", "/etc/evil", "a" * 63, "A" * 64, "", "a" * 63 + "\0"])
def test_a_delta_on_the_way_names_no_file_outside_the_cache(tmp_path, digest):
    """Of deltas that lead to others only the last is proved: its digest, and theirs, become names of files."""
    path = write_weights(tmp_path / "w", seed=1)
    last = make_manifest(path, policy_version=3, url="http://127.0.0.1:1/w")
    first = make_manifest(path, policy_version=2, url="http://127.0.0.1:1/w")
    for delta, base, base_digest in ((first, 1, "b" * 64), (last, 2, digest)):
        delta.kind = weights_pb2.WEIGHTS_KIND_DELTA
        delta.encoding = weights_pb2.WEIGHTS_ENCODING_CHANGED_BLOCKS
        delta.base_version, delta.base_digest = base, base_digest
    first.digest = digest
    with pytest.raises(InvalidFieldError, match=r"manifest\.digest"):
        check_chain([first, last], run_id="r", held=VersionName(1, "b" * 64))
    first.digest = last.base_digest = "c" * 64
    check_chain([first, last], run_id="r", held=VersionName(1, "b" * 64))


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://h/w", "http://user:secret@h/w", "http://h\n/w", "http://h:0/w", "http:///w"]
)
def test_a_manifest_names_plain_http_addresses_alone(tmp_path, url):
    manifest = make_manifest(write_weights(tmp_path / "w", seed=1), policy_version=1, url=url)
    with pytest.raises(InvalidFieldError, match=r"manifest\.urls"):
        check_manifest(manifest, run_id="r")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_not_followed_and_does_not_get_the_token(store, tmp_path, monkeypatch, status):
    monkeypatch.setattr("penstock.transfer.content_sources.backoff_s", lambda: iter([0.0] * 100))
    asked = []

    async def elsewhere(request):
        asked.append(request.headers.get("Authorization"))
        return web.Response()

    async def sent_on(_request):
        return web.Response(status=status, headers={"Location": f"{others}/inside"})

    async with listening(elsewhere) as others, listening(sent_on) as origin:
        manifest = await store.publish(1)
        manifest.urls[:] = [f"{origin}/w"]
        async with Downloader(security=Security(token="secret", allows_plain=True)) as downloader:
            with pytest.raises(ServiceUnavailableError, match=f"HTTP {status}"):
                await downloader.fetch(manifest, tmp_path / "v1")
    assert asked == []
