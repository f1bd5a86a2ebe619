"""A publication in the background when its run ends for another reason: it ends too, and its failure is one line."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest
import structlog
import torch

from penstock.clock import ManualClock
from services.trainer.publishing.publisher import WeightPublisher
from services.trainer.publishing.version_store import WeightStore
from tests.helpers.full_disk import largest_file
from tests.helpers.weights.written import written


@pytest.fixture
def publisher(tmp_path: Path) -> WeightPublisher:
    made = WeightPublisher(
        store=WeightStore(), run_id="r", directory=tmp_path / "weights", base_url="http://a:1", clock=ManualClock()
    )
    made.open()
    return made


def begin(publisher: WeightPublisher) -> None:
    path = publisher.path(policy_version=1, history=0)
    publisher.begin(written({"w": torch.zeros(4096)}, path), policy_version=1, history=0, adapter=None)


async def test_a_failure_is_logged_where_the_run_ends_and_raised_where_it_goes_on(publisher: WeightPublisher) -> None:
    never_retrieved: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: never_retrieved.append(context["message"]))
    with largest_file(1024), structlog.testing.capture_logs() as lines:
        begin(publisher)
        await publisher.close()
        begin(publisher)
        with pytest.raises(OSError, match="File too large"):
            await publisher.finish()
        await publisher.close()
    gc.collect()
    assert [line["event"] for line in lines] == ["the last version was not published"]
    assert never_retrieved == []


async def test_nothing_is_written_after_the_end(publisher: WeightPublisher, tmp_path: Path) -> None:
    begin(publisher)
    await publisher.close()
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["v1-h0.safetensors"]
    publisher.open()
    assert list((tmp_path / "weights").iterdir()) == []


async def test_one_who_is_cancelled_while_waiting_leaves_nothing_half_published(publisher: WeightPublisher) -> None:
    begin(publisher)
    waiting = asyncio.ensure_future(publisher.finish())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await publisher.close()
    assert publisher.last_offer is not None
