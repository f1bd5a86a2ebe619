"""The parts of a fetch: rate, file under way, sources."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from penstock.errors import DigestMismatchError, ServiceUnavailableError, UnknownVersionError
from penstock.transfer import partial
from penstock.transfer.content_sources import MAX_FAILURES, SourceKind, Sources
from penstock.transfer.partial import PartialContent
from penstock.transfer.rate import BURST_S, ByteRate
from penstock.v1 import weights_pb2
from tests.helpers.virtual_time import VirtualLoop

CHUNK = 4096
BROKEN = ServiceUnavailableError("broke off")


def pieces(num_chunks: int) -> list[bytes]:
    return [bytes([index + 1]) * CHUNK for index in range(num_chunks)]


def chunks_of(data: list[bytes]) -> list[weights_pb2.ChunkInfo]:
    return [
        weights_pb2.ChunkInfo(offset=index * CHUNK, size_bytes=len(piece), sha256=hashlib.sha256(piece).hexdigest())
        for index, piece in enumerate(data)
    ]


@pytest.fixture
async def content(tmp_path):
    made = await PartialContent.open(tmp_path / "c", chunks_of(pieces(4)))
    yield made
    made.close()


def test_a_rate_holds_over_any_stretch_of_time_but_for_a_short_burst():
    now_s = 100.0
    rate = ByteRate(1000, now_s=lambda: now_s)
    passed = []
    for _ in range(200):
        delay_s = rate.delay_s(50)
        now_s += delay_s
        passed.append(now_s)
    took_s = passed[-1] - passed[0]
    assert 200 * 50 / 1000 - BURST_S - 0.1 <= took_s <= 200 * 50 / 1000
    now_s += 60
    assert [rate.delay_s(50) for _ in range(3)] == [0.0] * 3
    assert rate.delay_s(10_000) == 0.0
    assert rate.delay_s(1) == pytest.approx(10 - BURST_S + 0.15)


def test_those_who_take_at_once_share_the_rate():
    loop = VirtualLoop()
    rate = ByteRate(1000, now_s=loop.time)
    passed: list[tuple[float, int]] = []

    async def take(num_bytes: int) -> None:
        for _ in range(20):
            await rate.take(num_bytes)
            passed.append((loop.time(), num_bytes))

    async def take_all() -> None:
        await asyncio.gather(*(take(num_bytes) for num_bytes in (10, 50, 100)))

    loop.run_until_complete(take_all())
    num_bytes, total_bytes = 0, 20 * (10 + 50 + 100)
    for time_s, piece_bytes in passed:
        num_bytes += piece_bytes
        assert num_bytes <= 1000 * (time_s + BURST_S) + 100
    assert num_bytes == total_bytes
    assert passed[-1][0] <= total_bytes / 1000
    loop.shut_down()


def test_without_a_cap_nothing_waits_and_a_cap_of_nothing_is_refused():
    assert ByteRate(None).delay_s(10**12) == 0.0
    with pytest.raises(ValueError, match="bytes_per_second"):
        ByteRate(0)


async def test_chunks_may_come_in_any_order_and_are_readable_as_far_as_there_is_no_gap(content):
    data = pieces(4)
    await content.store(0, data[0])
    await content.store(2, memoryview(data[2]))
    assert list(content.missing()) == [1, 3]
    assert await content.available_until(0) == CHUNK
    assert await content.available_until(2 * CHUNK + 5) == 3 * CHUNK
    await content.store(1, data[1])
    assert await content.available_until(10) == 3 * CHUNK
    await content.store(3, data[3])
    assert await content.available_until(0) == content.size_bytes
    assert content.is_complete
    assert content.read(CHUNK - 1, 2) == data[0][-1:] + data[1][:1]


async def test_a_wrong_chunk_is_not_there(content):
    with pytest.raises(DigestMismatchError):
        await content.store(1, pieces(4)[0])
    assert not content.has(1)


async def test_a_reader_waits_for_what_comes_and_no_longer_than_something_comes(content, monkeypatch):
    monkeypatch.setattr(partial, "STALL_S", 0.05)
    reader = asyncio.create_task(content.available_until(0))
    for _ in range(4):
        # Longer than STALL_S in all: bytes of a chunk that is not whole are a sign of life.
        await asyncio.sleep(0.02)
        content.note_received(1)
    assert not reader.done()
    await content.store(0, pieces(4)[0])
    assert await reader == CHUNK
    with pytest.raises(ServiceUnavailableError, match="nothing arrived"):
        await content.available_until(CHUNK)
    content.fail(BROKEN)
    with pytest.raises(ServiceUnavailableError, match="broke off"):
        await content.available_until(CHUNK)


async def test_what_is_there_is_found_again_and_what_is_damaged_is_not(tmp_path):
    data = pieces(4)
    first = await PartialContent.open(tmp_path / "c", chunks_of(data))
    for index in (1, 3):
        await first.store(index, data[index])
    first.close()
    with (tmp_path / "c").open("r+b") as file:
        file.seek(3 * CHUNK)
        file.write(b"\0")
    again = await PartialContent.open(tmp_path / "c", chunks_of(data))
    assert list(again.missing()) == [0, 2, 3]
    assert again.missing_bytes == 3 * CHUNK
    again.close()


async def test_a_content_stays_readable_until_the_last_user_closes_it(tmp_path):
    data = pieces(1)
    (tmp_path / "c").write_bytes(data[0])
    made = await PartialContent.whole(tmp_path / "c", chunks_of(data))
    held = made.hold()
    made.close()
    (tmp_path / "c").unlink()
    assert held.read(0, CHUNK) == data[0]
    held.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        held.read(0, 1)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr("penstock.transfer.content_sources.backoff_s", lambda: iter([0.0] * 100))


async def test_relays_come_first_and_the_store_is_asked_again_when_one_fails():
    asked, answers = [], [["http://a"], ["http://b"], []]

    async def find(failed_url):
        asked.append(failed_url)
        return answers.pop(0)

    sources = Sources(["http://origin"], find)
    tried = []
    for _ in range(4):
        source = await sources.current()
        tried.append((source.url, source.kind))
        await sources.note_failed(source, BROKEN)
    assert tried == [
        ("http://a", SourceKind.RELAY),
        ("http://b", SourceKind.RELAY),
        ("http://origin", SourceKind.ORIGIN),
        ("http://origin", SourceKind.ORIGIN),
    ]
    assert asked == ["", "http://a", "http://b"]


async def test_failures_of_connections_to_one_source_are_one_failure():
    sources = Sources(["http://a", "http://b"], None)
    source = await sources.current()
    for _ in range(MAX_FAILURES):
        await sources.note_failed(source, BROKEN)
    assert (await sources.current()).url == "http://b"


async def test_sources_are_given_up_after_failures_without_a_chunk_in_between():
    sources = Sources(["http://a"], None)
    for number in range(3 * MAX_FAILURES):
        await sources.note_failed(await sources.current(), BROKEN)
        if number < 2 * MAX_FAILURES:
            sources.note_good()
        elif number == 3 * MAX_FAILURES - 2:
            break
    with pytest.raises(ServiceUnavailableError, match="broke off"):
        await sources.note_failed(await sources.current(), BROKEN)


async def test_a_version_that_no_origin_has_is_given_up_at_once():
    sources = Sources(["http://a", "http://b"], None)
    await sources.note_failed(await sources.current(), UnknownVersionError("gone"))
    with pytest.raises(UnknownVersionError):
        await sources.note_failed(await sources.current(), UnknownVersionError("gone"))
