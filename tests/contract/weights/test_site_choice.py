"""Receivers of one site whose speeds differ: what crosses the link between sites is one content a version."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from penstock.clients.weights import WeightsClient
from penstock.downloads.downloader import Downloader
from penstock.errors import NotOfferedError
from penstock.security import NO_SECURITY
from penstock.transfer.relay import Relay
from services.generator.weights import fetch_choice
from services.generator.weights.file_cache import Fetched, Way, WeightFetcher
from tests.helpers.weights.publishing_site import PublishingSite

pytestmark = pytest.mark.slow

HEADERS_BYTES = 16_384
"""Of all answers for one version, and more."""
SLOW, FAST = 1.0, 1e12
"""Bytes a second at which a receiver has applied deltas."""


class Fleet(PublishingSite):
    """Two receivers of one site, which relay to each other."""

    async def start(self, stack: AsyncExitStack, **shape: float) -> None:
        await super().start(stack, **shape)
        self.fetchers = [await self._receiver(stack, name) for name in "ab"]

    async def _receiver(self, stack: AsyncExitStack, name: str) -> WeightFetcher:
        client = await stack.enter_async_context(WeightsClient(self.target, run_id="r", receiver_id=name, site="s"))
        relay = await stack.enter_async_context(Relay(listen="127.0.0.1:0", security=NO_SECURITY))
        downloader = await stack.enter_async_context(Downloader(relay=relay, find_relays=client.find_relays))
        return self.new_fetcher(client, downloader, cache=self.cache / name)

    async def take(self, *speeds: float, in_turn: bool = False) -> tuple[list[Fetched], int]:
        """Every receiver takes the newest version, as one that has measured that speed; with the bytes of the link."""
        before_bytes, manifest = self.link.delivered_bytes, await self.client.get_manifest()
        for fetcher, speed in zip(self.fetchers, speeds, strict=True):
            fetcher._choice = fetch_choice.FetchChoice()
            fetcher._choice.note_download(10_000_000, 1.0, is_delta=False)
            fetcher._choice.note_application(1_000_000, 1_000_000 / speed)
        if in_turn:
            taken = [await fetcher.fetch(manifest) for fetcher in self.fetchers]
        else:
            taken = list(await asyncio.gather(*(fetcher.fetch(manifest) for fetcher in self.fetchers)))
        assert len({fetched.path.read_bytes() for fetched in taken}) == 1
        return taken, self.link.delivered_bytes - before_bytes


@pytest.fixture
async def fleet(tmp_path: Path):
    made = Fleet(tmp_path)
    async with AsyncExitStack() as stack:
        await made.start(stack, delay_s=0.01)
        for name in "ab":
            (made.cache / name).mkdir(parents=True)
        await made.publish()
        await made.take(FAST, FAST)
        yield made


@pytest.mark.parametrize("speeds", [(FAST, SLOW), (SLOW, FAST)], ids=["deltas first", "full first"])
@pytest.mark.parametrize("in_turn", [False, True], ids=["at once", "in turn"])
async def test_one_content_crosses_the_link_though_receivers_would_choose_differently(fleet, speeds, in_turn):
    for _version in range(3):
        await fleet.publish()
        newest = fleet.store.newest("r").manifest
        (first, second), link_bytes = await fleet.take(*speeds, in_turn=in_turn)
        assert first.way == second.way
        if in_turn:
            assert first.way == (Way.DELTA if speeds[0] == FAST else Way.FULL)
        most = newest.size_bytes if first.way == Way.FULL else 0.5 * newest.size_bytes
        assert link_bytes < most + HEADERS_BYTES
        assert sorted((first.origin_bytes > 0, second.origin_bytes > 0)) == [False, True]


async def test_one_that_can_use_no_delta_gets_the_full_content_and_the_others_follow_it(fleet):
    await fleet.publish()
    for path in (fleet.cache / "a").iterdir():
        path.unlink()
    (first, second), link_bytes = await fleet.take(FAST, FAST, in_turn=True)
    assert (first.way, second.way) == (Way.FULL, Way.FULL)
    assert link_bytes < fleet.store.newest("r").manifest.size_bytes + HEADERS_BYTES
    await fleet.publish()
    for path in (fleet.cache / "b").iterdir():
        path.unlink()
    (first, second), link_bytes = await fleet.take(FAST, FAST, in_turn=True)
    # The first one has made the full content of the delta, and relays it.
    assert (first.way, second.way, second.origin_bytes) == (Way.DELTA, Way.FULL, 0)


@pytest.mark.parametrize("answer", ["fails", "knows nothing of it", "names what is not offered"])
async def test_without_an_answer_that_it_can_use_a_receiver_takes_the_version_by_itself(fleet, monkeypatch, answer):
    def answered(*, site: str, content_id: str) -> str:
        if answer == "fails":
            raise NotOfferedError("not now")
        return "" if answer == "knows nothing of it" else "0" * 64

    monkeypatch.setattr(fleet.store.relays, "agreed", answered)
    await fleet.publish()
    (first, second), _link_bytes = await fleet.take(FAST, SLOW, in_turn=True)
    # A store that lies costs one full content more, at most.
    assert first.way == (Way.FULL if answer == "names what is not offered" else Way.DELTA)
    assert second.way == Way.FULL
