"""A real publisher and store, a real receiver's cache: versions come by deltas, and never other than as published."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest

from penstock.clients.weights import VersionName, check_chain
from penstock.downloads.downloader import Downloader
from penstock.downloads.file_check import is_laid_out_alike
from penstock.errors import InvalidFieldError
from penstock.model.digests import manifest_digest, safetensors_digests
from penstock.security import NO_SECURITY
from penstock.v1 import weights_pb2, weights_pb2_grpc
from services.generator.weights import file_cache
from services.generator.weights.fetch_choice import FetchChoice
from services.generator.weights.file_cache import Way
from services.trainer.publishing import publisher
from services.trainer.publishing.deltas import MAX_KEPT_DELTAS
from tests.helpers.weights.publishing_site import PublishingSite
from tests.helpers.weights.sites import Receiver


@pytest.fixture
async def site(tmp_path: Path, monkeypatch) -> AsyncIterator[PublishingSite]:
    monkeypatch.setattr("penstock.transfer.content_sources.backoff_s", lambda: iter([0.0] * 100))
    # Files this small take as long as the machine's other work lets them; test_late_deltas.py has links that tell.
    monkeypatch.setattr(FetchChoice, "takes_deltas", lambda *_args, **_sizes: True)
    made = PublishingSite(tmp_path)
    async with AsyncExitStack() as stack:
        await made.start(stack)
        await made.publish()
        yield made


async def test_a_receiver_takes_the_first_version_whole_and_the_next_ones_by_deltas(site: PublishingSite) -> None:
    fetched, whole = await site.fetch()
    assert (fetched.way, fetched.fetched_bytes) == (Way.FULL, whole.size_bytes)
    for _ in range(2):
        await site.publish()
        fetched, whole = await site.fetch()
        assert fetched.way is Way.DELTA
        assert fetched.fetched_bytes < 0.05 * whole.size_bytes
    assert (site.refused, site.fallbacks()) == ([], 0)
    assert site.metrics.weight_fetches.labels("delta")._value.get() == 2


async def test_a_receiver_that_is_behind_takes_several_deltas_and_one_far_behind_the_whole(
    site: PublishingSite,
) -> None:
    await site.fetch()
    for _ in range(3):
        await site.publish()
    fetched, _ = await site.fetch()
    assert fetched.way is Way.DELTA
    assert len(list(site.cache.glob("*.delta"))) == 3
    for _ in range(MAX_KEPT_DELTAS + 1):
        await site.publish()
    fetched, whole = await site.fetch()
    assert (fetched.way, fetched.fetched_bytes) == (Way.FULL, whole.size_bytes)
    assert site.fallbacks() == 0


async def test_one_who_joins_late_or_holds_another_history_takes_the_whole(site: PublishingSite) -> None:
    await site.publish()
    assert (await site.fetch())[0].way is Way.FULL
    # A rewind: version 1 comes again, with other content.
    site.publisher.open()
    site.version = 0
    await site.publish(history=1, share=0.3)
    assert (await site.fetch())[0].way is Way.FULL
    assert site.fallbacks() == 0


async def test_a_dense_change_is_not_sent_as_a_delta(site: PublishingSite) -> None:
    await site.fetch()
    await site.publish_noise()
    assert list(site.published.glob("*.delta")) == []
    assert (await site.fetch())[0].way is Way.FULL


async def test_the_same_weights_under_another_version_cost_nothing(site: PublishingSite) -> None:
    await site.fetch()
    await site.publish(share=0.0)
    fetched, _ = await site.fetch()
    assert (fetched.way, fetched.fetched_bytes) == (Way.CACHE, 0)


async def test_a_receiver_that_was_restarted_goes_on_from_its_cache(site: PublishingSite) -> None:
    await site.fetch()
    await site.publish()
    async with Downloader() as downloader:
        site.fetcher = site.new_fetcher(site.client, downloader)
        assert (await site.fetch())[0].way is Way.DELTA


async def test_a_flipped_byte_in_a_delta_is_refused_counted_and_the_whole_is_fetched(site: PublishingSite) -> None:
    await site.fetch()
    await site.publish()
    (delta,) = site.published.glob("*.delta")
    data = bytearray(delta.read_bytes())
    data[len(data) // 2] ^= 1
    delta.write_bytes(data)
    fetched, _ = await site.fetch()
    assert fetched.way is Way.FULL
    assert len(site.refused) > 0
    assert site.fallbacks() == 1


async def test_a_damaged_base_is_found_out_and_the_whole_is_fetched(site: PublishingSite) -> None:
    fetched, _ = await site.fetch()
    with fetched.path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    await site.publish()
    fetched, _ = await site.fetch()
    assert fetched.way is Way.FULL
    assert len(site.refused) == 1
    assert "embedding" in site.refused[0] or "norm" in site.refused[0]
    assert site.fallbacks() == 1


async def test_a_delta_that_is_gone_is_no_reason_to_stay_behind(site: PublishingSite) -> None:
    await site.fetch()
    await site.publish()
    for delta in site.published.glob("*.delta"):
        delta.unlink()
    assert (await site.fetch())[0].way is Way.FULL
    assert site.fallbacks() == 1


async def test_the_cache_stays_small(site: PublishingSite) -> None:
    for _ in range(file_cache.MAX_KEPT_DELTAS + 3):
        fetched, _ = await site.fetch()
        (site.cache / "v00000000-killed.safetensors.tmp").touch()
        site.fetcher.clean(fetched.path)
        await site.publish()
    assert len(list(site.cache.glob("*.safetensors"))) == 2
    assert len(list(site.cache.glob("*.delta"))) == file_cache.MAX_KEPT_DELTAS
    assert len(list(site.cache.iterdir())) == 2 + file_cache.MAX_KEPT_DELTAS


async def test_no_delta_without_the_digest_of_what_is_held(site: PublishingSite) -> None:
    await site.publish()
    held = (await site.client.get_manifest(0)).digest
    with_digest = weights_pb2.GetManifestRequest(run_id="r", held_version=0, held_digest=held)
    without = weights_pb2.GetManifestRequest(run_id="r", held_version=0)
    stub = weights_pb2_grpc.WeightStoreServiceStub(site.client.channel)
    assert isinstance(stub.GetManifest, grpc.aio.UnaryUnaryMultiCallable)
    assert (await stub.GetManifest(with_digest, timeout=5)).manifest.kind == weights_pb2.WEIGHTS_KIND_DELTA
    assert (await stub.GetManifest(without, timeout=5)).manifest.kind == weights_pb2.WEIGHTS_KIND_FULL


async def test_a_chain_that_does_not_lead_anywhere_is_refused_before_it_is_fetched(site: PublishingSite) -> None:
    held = VersionName(0, (await site.client.get_manifest()).digest)
    for _ in range(2):
        await site.publish()
    chain = (await site.client.get_deltas(None, held=held)).chain
    assert [delta.policy_version for delta in chain] == [1, 2]
    assert [len(delta.tensors) for delta in chain] == [0, 2]
    for wrong, base in [(chain[1:], held), (chain, VersionName(0, "0" * 64)), (chain * 40, held)]:
        with pytest.raises(InvalidFieldError):
            check_chain(wrong, run_id="r", held=base)
    chain[0].kind = weights_pb2.WEIGHTS_KIND_FULL
    chain[0].encoding = weights_pb2.WEIGHTS_ENCODING_SAFETENSORS
    with pytest.raises(InvalidFieldError):
        check_chain(chain, run_id="r", held=held)


async def test_one_that_joins_late_gets_what_others_of_its_site_made_of_deltas(
    site: PublishingSite, tmp_path: Path
) -> None:
    async with (
        Receiver("early", tmp_path / "early", site.target, NO_SECURITY) as early,
        Receiver("late", tmp_path / "late", site.target, NO_SECURITY) as late,
    ):
        site.fetcher = site.new_fetcher(early.client, early.downloader, cache=early.folder)
        assert (await site.fetch())[0].way is Way.FULL
        await site.publish()
        assert (await site.fetch())[0].way is Way.DELTA
        site.fetcher = site.new_fetcher(late.client, late.downloader, cache=late.folder)
        fetched, whole = await site.fetch()
        assert fetched.way is Way.FULL
        assert (fetched.fetched_bytes, fetched.origin_bytes) == (whole.size_bytes, 0)
        assert early.relayed_bytes == whole.size_bytes
        # The next version crosses the link once, as a delta.
        await site.publish()
        origin_bytes = 0
        for receiver in (early, late):
            site.fetcher = site.new_fetcher(receiver.client, receiver.downloader, cache=receiver.folder)
            fetched, whole = await site.fetch()
            assert fetched.way is Way.DELTA
            origin_bytes += fetched.origin_bytes
        assert origin_bytes == fetched.fetched_bytes


async def test_a_file_that_is_laid_out_otherwise_is_not_offered_as_the_content(
    site: PublishingSite, tmp_path: Path
) -> None:
    fetched, manifest = await site.fetch()
    assert is_laid_out_alike(fetched.path, manifest)
    data = fetched.path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    turned = json.dumps(dict(reversed(header.items())), separators=(",", ":")).encode().ljust(length)
    for text in (turned, turned + b" " * 8):
        path = tmp_path / "other"
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
        assert manifest_digest(safetensors_digests(path)) == manifest.digest
        assert not is_laid_out_alike(path, manifest)


async def test_a_manifest_that_fits_no_message_is_refused_before_anybody_waits_for_it(
    site: PublishingSite, monkeypatch
) -> None:
    monkeypatch.setattr(publisher, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(InvalidFieldError, match="2 tensors and 1 chunks"):
        await site.publish()
    assert site.store.newest("r").manifest.policy_version == 0
