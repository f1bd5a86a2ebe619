"""Deltas or the full content, on a virtual clock: what ends first is taken, and no lie of the store costs much."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from penstock.clients.weights import OfferedDeltas, VersionName, WeightsClient
from penstock.downloads.downloader import Download, Downloader
from penstock.v1 import weights_pb2
from services.generator.metrics import GeneratorMetrics
from services.generator.weights import file_cache
from services.generator.weights.fetch_choice import FIRST_RETRY, FetchChoice
from services.generator.weights.file_cache import Way, WeightFetcher
from tests.helpers.virtual_time import VirtualLoop

FULL_BYTES = 1_200_000_000
BASE, RESULT = "a" * 64, "b" * 64
NEVER_S = 1e9
MANY_ASKS = 50
"""For a wait of 20 minutes."""


def full_manifest(version: int, digest: str) -> weights_pb2.WeightsManifest:
    return weights_pb2.WeightsManifest(
        run_id="r",
        policy_version=version,
        kind=weights_pb2.WEIGHTS_KIND_FULL,
        digest=digest,
        size_bytes=FULL_BYTES,
    )


@dataclass(kw_only=True)
class World:
    """A link, a disk and a weight store."""

    loop: VirtualLoop
    link_bytes_per_second: float
    apply_bytes_per_second: float = 5e8
    delta_bytes: int = 30_000_000
    delta_ready_s: float = 0.0
    """After the version is offered."""
    stated_after_s: float | None = None
    """What the store says instead of the truth."""
    offered_s: float = 0.0
    asks: list[float] = field(default_factory=list)

    async def get_deltas(self, version: int, *, held: VersionName, timeout_s: float) -> OfferedDeltas:
        assert held.digest == BASE
        age_s = self.loop.time() - self.offered_s
        self.asks.append(age_s)
        if age_s >= self.delta_ready_s:
            delta = full_manifest(version, RESULT)
            delta.kind, delta.size_bytes = weights_pb2.WEIGHTS_KIND_DELTA, self.delta_bytes
            return OfferedDeltas(chain=(delta,), num_bytes=self.delta_bytes)
        after_s = self.delta_ready_s - age_s if self.stated_after_s is None else self.stated_after_s
        return OfferedDeltas(expected_after_s=after_s, num_bytes=self.delta_bytes)

    async def agreed_content(self, content: str) -> str:
        return content

    async def fetch(self, manifest: weights_pb2.WeightsManifest, target: Path, **_rest: Any) -> Download:
        await asyncio.sleep(manifest.size_bytes / self.link_bytes_per_second)
        await asyncio.to_thread(target.touch)
        return Download(path=target, fetched_bytes=manifest.size_bytes, num_refused=0)

    async def offer(self, _manifest: weights_pb2.WeightsManifest, _path: Path) -> bool:
        return False

    def apply(self, _base: Path, _deltas: object, path: Path, **_rest: Any) -> None:
        self.loop.jump(FULL_BYTES / self.apply_bytes_per_second)
        path.touch()

    async def installed(self, fetcher: WeightFetcher) -> tuple[Way, float]:
        """The way by which the next version came, and the seconds that took."""
        self.offered_s, self.asks = self.loop.time(), []
        fetched = await fetcher.fetch(full_manifest(1, RESULT))
        return fetched.way, self.loop.time() - self.offered_s

    async def fetcher_that_measured(self, folder: Path) -> WeightFetcher:
        """A fetcher that has fetched version 0 over the link."""
        fetcher = WeightFetcher(
            client=cast("WeightsClient", self),
            downloader=cast("Downloader", self),
            cache_dir=folder,
            metrics=GeneratorMetrics(CollectorRegistry()),
            on_refused=lambda _error: None,
            clock=self.loop,
        )
        await fetcher.fetch(full_manifest(0, BASE))
        fetcher._choice.note_application(FULL_BYTES, FULL_BYTES / self.apply_bytes_per_second)
        return fetcher


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    made = VirtualLoop()
    yield made
    made.shut_down()


def installed(world: World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Way, float]:
    monkeypatch.setattr(file_cache, "_apply", world.apply)

    async def install() -> tuple[Way, float]:
        return await world.installed(await world.fetcher_that_measured(folder))

    return world.loop.run_until_complete(install())


@pytest.mark.parametrize("ready_s", [0.0, 0.5, 2.0, 5.0, 8.0, 20.0])
@pytest.mark.parametrize("link", [1e7, 5e7, 1e8, 2e8, 5e8, 1e9])
def test_the_way_that_ends_first_is_taken(
    loop: VirtualLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: float, ready_s: float
) -> None:
    world = World(loop=loop, link_bytes_per_second=link, delta_ready_s=ready_s)
    full_s = FULL_BYTES / link
    delta_s = ready_s + world.delta_bytes / link + FULL_BYTES / world.apply_bytes_per_second
    way, took_s = installed(world, tmp_path, monkeypatch)
    assert took_s == pytest.approx(min(full_s, delta_s))
    assert way is (Way.FULL if full_s < delta_s else Way.DELTA)


@pytest.mark.parametrize("stated_after_s", [0.0, 0.001, 1.0, 10.0, 100.0, NEVER_S])
@pytest.mark.parametrize("link", [1e6, 1e7, 1e8, 1e9, 1e10])
def test_a_delta_that_never_comes_costs_at_most_the_time_of_the_full_content(
    loop: VirtualLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: float, stated_after_s: float
) -> None:
    world = World(loop=loop, link_bytes_per_second=link, delta_ready_s=NEVER_S, stated_after_s=stated_after_s)
    way, took_s = installed(world, tmp_path, monkeypatch)
    assert way is Way.FULL
    assert took_s <= 2 * FULL_BYTES / link
    assert len(world.asks) <= MANY_ASKS


def test_an_estimate_that_was_too_short_is_asked_for_again(
    loop: VirtualLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(loop=loop, link_bytes_per_second=1e7, delta_ready_s=30.0, stated_after_s=1.0)
    assert installed(world, tmp_path, monkeypatch)[0] is Way.DELTA


def test_a_receiver_that_measured_nothing_waits_for_nothing_and_takes_what_is_there() -> None:
    choice = FetchChoice()
    assert choice.wait_s(0.1, 1, full_bytes=FULL_BYTES, waited_s=0.0) is None
    assert choice.takes_deltas(FULL_BYTES // 2, full_bytes=FULL_BYTES)


def test_small_deltas_do_not_spoil_what_was_measured_of_the_link() -> None:
    choice = FetchChoice()
    choice.note_download(FULL_BYTES, 1.2, is_delta=False)
    for _ in range(100):
        choice.note_download(100_000, 0.05, is_delta=True)
    assert choice.full_s(FULL_BYTES) == pytest.approx(1.2)
    # One that takes long tells of a link that became slow.
    choice.note_download(2_000_000, 2.0, is_delta=True)
    assert (choice.full_s(FULL_BYTES) or 0) > 2 * 1.2


@pytest.mark.parametrize("is_offered", [True, False])
def test_one_slow_application_does_not_rule_deltas_out_for_good(is_offered: bool) -> None:
    choice = FetchChoice()
    choice.note_download(FULL_BYTES, 12.0, is_delta=False)
    choice.note_application(FULL_BYTES, 600.0)

    def is_taken() -> bool:
        if is_offered:
            return choice.takes_deltas(30_000_000, full_bytes=FULL_BYTES)
        return choice.wait_s(0.1, 30_000_000, full_bytes=FULL_BYTES, waited_s=0.0) is not None

    assert [is_taken() for _ in range(FIRST_RETRY + 2)] == [False] * FIRST_RETRY + [True, True]


def test_deltas_that_stay_slow_are_tried_again_ever_less_often() -> None:
    choice = FetchChoice()
    choice.note_download(FULL_BYTES, 12.0, is_delta=False)
    taken = []
    for version in range(1 + 9 + 17 + 33 + 1):
        if choice.takes_deltas(30_000_000, full_bytes=FULL_BYTES):
            choice.note_application(FULL_BYTES, 600.0)
            taken.append(version)
    assert taken == [0, 9, 9 + 17, 9 + 17 + 33]
    # A disk that is fast again, and measured to be, is trusted as before.
    for _ in range(20):
        choice.note_application(FULL_BYTES, 1.0)
    assert choice.takes_deltas(30_000_000, full_bytes=FULL_BYTES)
    for _ in range(20):
        choice.note_application(FULL_BYTES, 600.0)
    again = [choice.takes_deltas(30_000_000, full_bytes=FULL_BYTES) for _ in range(FIRST_RETRY + 1)]
    assert again == [False] * FIRST_RETRY + [True]


@given(
    rates=st.lists(st.tuples(st.integers(1, 10**12), st.floats(1e-6, 1e6)), min_size=1),
    after_s=st.floats(0, 1e12),
    num_bytes=st.integers(0, 4 * 1024**4),
    waited_s=st.floats(0, 1e6),
)
def test_no_wait_ends_after_the_full_content_would_have(
    rates: list[tuple[int, float]], after_s: float, num_bytes: int, waited_s: float
) -> None:
    choice = FetchChoice()
    for size, seconds in rates:
        choice.note_download(size, seconds, is_delta=False)
    full_s = choice.full_s(FULL_BYTES)
    assert full_s is not None
    wait_s = choice.wait_s(after_s, num_bytes, full_bytes=FULL_BYTES, waited_s=waited_s)
    assert wait_s is None or 0 < wait_s < full_s - waited_s
