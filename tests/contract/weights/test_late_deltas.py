"""Deltas that are made after their version is offered: what they must not hold up, and what receivers do meanwhile."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock.clients.weights import VersionName
from penstock.v1 import weights_pb2, weights_pb2_grpc
from services.generator.weights.file_cache import Way
from services.trainer.publishing import delta_maker
from services.trainer.publishing.delta_maker import DELTAS, Outcome
from services.trainer.publishing.version_store import MAX_KEPT_VERSIONS
from tests.helpers.waiting import until
from tests.helpers.weights.publishing_site import PublishingSite

LINK_BYTES_PER_SECOND = 1e6
NUM_VALUES = 1_000_000
"""Of 2 bytes: the full content takes 2 s over the link."""


class Gate:
    """Holds up the making of deltas until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.num_made = 0
        self._original = delta_maker.write_delta
        monkeypatch.setattr(delta_maker, "write_delta", self._write)

    def _write(self, *paths: Path, is_wanted: Callable[[], bool], **details: Any) -> int | None:
        while is_wanted() and not self.opened.wait(0.005):
            pass
        self.num_made += 1
        return self._original(*paths, is_wanted=is_wanted, **details)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[PublishingSite]:
    made = PublishingSite(tmp_path)
    async with AsyncExitStack() as stack:
        await made.start(stack)
        await made.publish()
        yield made
        await made.publisher.close()


@pytest.fixture
async def far_site(tmp_path: Path) -> AsyncIterator[PublishingSite]:
    """Behind a slow link, which it has measured."""
    made = PublishingSite(tmp_path, num_values=NUM_VALUES)
    async with AsyncExitStack() as stack:
        await made.start(stack, bytes_per_second=LINK_BYTES_PER_SECOND, delay_s=0.01)
        await made.publish()
        assert (await made.fetch())[0].way is Way.FULL
        yield made
        await made.publisher.close()


def counted(outcome: Outcome) -> float:
    return DELTAS.labels(outcome)._value.get()


async def name_of(site: PublishingSite, version: int) -> VersionName:
    return VersionName(version, (await site.client.get_manifest(version)).digest)


async def test_a_version_is_offered_before_its_delta_and_says_when_that_is_expected(
    site: PublishingSite, gate: Gate
) -> None:
    held = await name_of(site, 0)
    await site.publish(with_delta=False)
    assert (await site.client.get_manifest()).policy_version == 1
    offered = await site.client.get_deltas(1, held=held)
    assert offered.chain == ()
    assert offered.expected_after_s is not None
    # Nothing is expected by one that holds something else.
    assert await site.client.get_deltas(1, held=VersionName(0, "0" * 64)) == ((), None, 0)
    gate.opened.set()
    await site.publisher.finish_deltas()
    offered = await site.client.get_deltas(1, held=held)
    assert [delta.policy_version for delta in offered.chain] == [1]
    assert offered.num_bytes == offered.chain[0].size_bytes


async def test_a_receiver_that_knows_nothing_of_late_deltas_gets_the_full_content(
    site: PublishingSite, gate: Gate
) -> None:
    held = await name_of(site, 0)
    await site.publish(with_delta=False)
    stub: Any = weights_pb2_grpc.WeightStoreServiceStub(site.client.channel)
    request = weights_pb2.GetManifestRequest(run_id="r", held_version=0, held_digest=held.digest)
    manifest = (await stub.GetManifest(request, timeout=5)).manifest
    assert (manifest.kind, manifest.policy_version) == (weights_pb2.WEIGHTS_KIND_FULL, 1)


async def test_the_expected_bytes_are_those_of_the_whole_chain(site: PublishingSite, gate: Gate) -> None:
    held = await name_of(site, 0)
    gate.opened.set()
    await site.publish()
    first = (await site.client.get_deltas(1, held=held)).num_bytes
    gate.opened.clear()
    await site.publish(with_delta=False)
    # The second is expected to be as large as the first.
    assert (await site.client.get_deltas(2, held=held)).num_bytes == pytest.approx(2 * first, rel=0.01)
    gate.opened.set()
    await site.publisher.finish_deltas()
    assert len((await site.client.get_deltas(2, held=held)).chain) == 2


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), ValueError("broken")])
async def test_a_delta_that_cannot_be_made_costs_no_version(
    site: PublishingSite, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    await site.fetch()
    failures = counted(Outcome.FAILED)

    def refuse(*_args: object, **_details: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(delta_maker, "write_delta", refuse)
        await site.publish()
    assert counted(Outcome.FAILED) == failures + 1
    assert await site.client.get_deltas(1, held=await name_of(site, 0)) == ((), None, 0)
    fetched, manifest = await site.fetch()
    assert (fetched.way, manifest.policy_version) == (Way.FULL, 1)
    await site.publish()
    assert (await site.fetch())[0].way is Way.DELTA


async def test_a_delta_whose_version_is_no_longer_kept_is_deleted(site: PublishingSite, gate: Gate) -> None:
    late, skipped = counted(Outcome.LATE), counted(Outcome.SKIPPED)
    for _ in range(MAX_KEPT_VERSIONS + 2):
        await site.publish(with_delta=False)
    gate.opened.set()
    await site.publisher.finish_deltas()
    assert gate.num_made == delta_maker.MAX_UNDER_WAY
    assert counted(Outcome.LATE) == late + delta_maker.MAX_UNDER_WAY
    assert counted(Outcome.SKIPPED) == skipped + MAX_KEPT_VERSIONS
    assert list(site.published.glob("*.delta*")) == []
    # The next one has its delta again.
    held = await name_of(site, site.version)
    await site.publish()
    assert len((await site.client.get_deltas(None, held=held)).chain) == 1


async def test_a_delta_of_the_run_before_is_not_offered_in_the_next(site: PublishingSite, gate: Gate) -> None:
    await site.publish(with_delta=False)
    site.store.reset("r")
    gate.opened.set()
    await site.publisher.finish_deltas()
    assert list(site.published.glob("*.delta*")) == []


async def test_deltas_come_in_the_order_of_their_versions(site: PublishingSite, gate: Gate) -> None:
    held = await name_of(site, 0)
    for _ in range(delta_maker.MAX_UNDER_WAY):
        await site.publish(with_delta=False)
    gate.opened.set()
    await site.publisher.finish_deltas()
    chain = (await site.client.get_deltas(None, held=held)).chain
    assert [delta.policy_version for delta in chain] == [1, 2]


async def test_closing_gives_up_a_delta_that_is_being_made(site: PublishingSite, gate: Gate) -> None:
    await site.publish(with_delta=False)
    async with asyncio.timeout(5):
        await site.publisher.close()
    assert list(site.published.glob("*.delta*")) == []
    assert (await site.client.get_manifest()).policy_version == 1


async def test_behind_a_slow_link_a_delta_that_comes_soon_is_waited_for(far_site: PublishingSite, gate: Gate) -> None:
    await far_site.publish(with_delta=False)
    begun_s = time.monotonic()
    fetching = asyncio.create_task(far_site.fetch())
    await until(lambda: far_site.metrics.delta_wait_s._value.get() > 0)
    gate.opened.set()
    fetched, manifest = await fetching
    assert fetched.way is Way.DELTA
    assert time.monotonic() - begun_s < manifest.size_bytes / LINK_BYTES_PER_SECOND
    assert far_site.fallbacks() == 0


async def test_a_delta_that_never_comes_is_not_waited_for_longer_than_the_full_content_takes(
    far_site: PublishingSite, gate: Gate
) -> None:
    await far_site.publish(with_delta=False)
    fetched, manifest = await far_site.fetch()
    assert fetched.way is Way.FULL
    waited_s = far_site.metrics.delta_wait_s._value.get()
    # Measured, not the link's own rate: headers and a start are in it.
    assert 0 < waited_s < 1.5 * manifest.size_bytes / LINK_BYTES_PER_SECOND


async def test_over_a_fast_link_the_full_content_is_not_held_up_by_a_delta_to_come(
    site: PublishingSite, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_maker, "FIRST_BYTES_PER_SECOND", 1e3)
    slow = delta_maker.DeltaMaker(store=site.store, describe=lambda _delta: None)
    monkeypatch.setattr(site.publisher, "_deltas", slow)
    await site.fetch()
    await site.publish(with_delta=False)
    fetched, _ = await site.fetch()
    assert fetched.way is Way.FULL
    assert site.metrics.delta_wait_s._value.get() == 0
    await slow.close()
