"""The alerts of brokers and their store, provoked on a real Prometheus over a real broker and a real Redis."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest

from penstock.network.rpc import open_channel
from penstock.v1 import broker_pb2
from services.broker.records_pb2 import RunRecord
from tests.helpers.brokers.broker import Generator, chunk, duration, prompt
from tests.helpers.full_disk import fill, small_disk
from tests.helpers.observability.alertmanager import alertmanager, needs_alertmanager
from tests.helpers.observability.faulty_clients import LivingRun, called, lease_and_vanish, meanwhile
from tests.helpers.observability.prometheus import needs_prometheus, prometheus
from tests.helpers.observability.served import Served, started
from tests.helpers.observability.stored_books import change_record, lose_shards
from tests.helpers.stores.redis_server import RedisProcess

pytestmark = [needs_prometheus, pytest.mark.grid, pytest.mark.slow, pytest.mark.timeout(1200)]


async def test_a_store_that_is_away_or_lost_acknowledged_writes_is_alerted(tmp_path: Path) -> None:
    redis = RedisProcess(tmp_path, is_persistent=True)
    async with AsyncExitStack() as stack:
        stack.callback(redis.kill)
        redis.start()
        disk = stack.enter_context(small_disk(2**20))
        broker = Served("broker", disk, f"redis_url={redis.url}")
        stack.enter_context(started(broker))
        seen = await stack.enter_async_context(prometheus(tmp_path / "prometheus"))
        await broker.until_serving()
        instance = seen.watch("broker", broker.metrics)
        channel = await stack.enter_async_context(open_channel(broker.address))
        calls = called(channel)
        await calls.open(run_id="books")
        await LivingRun(channel, "books", scores=True).step()
        await seen.until_read(instance)

        filler = _fill_to_the_page(disk, disk / "broker.log")
        redis.kill()
        await asyncio.gather(
            seen.until_fires("PenstockRedisFaults", instance=instance, kind="unreachable"),
            seen.until_fires("PenstockLogLost", instance=instance),
        )
        filler.unlink()
        redis.start()
        await asyncio.gather(seen.until_resolved("PenstockRedisFaults"), seen.until_resolved("PenstockLogLost"))
        assert await seen.ever_fired() == {"PenstockRedisFaults", "PenstockLogLost"}

        lease = await _continued_lease(channel)
        broker.kill()
        change_record(redis.url, "books", _unbalance)
        lose_shards(redis.url, "sharded")
        broker.start()
        await broker.until_serving()
        await calls.call("GetRun", broker_pb2.GetRunRequest(run_id="books"))
        errors = await Generator.connect(channel, "second", run_id="sharded").put(chunk(lease, [9], offset=2))
        assert [error.reason for error in errors] == ["LEASE_LOST"]
        await asyncio.gather(
            seen.until_fires("PenstockConservationBroken", run="books", severity="critical"),
            seen.until_fires("PenstockStalenessViolated", run="books", severity="critical"),
            seen.until_fires("PenstockStoreLostTokens", run="sharded", severity="critical"),
        )
        broker.kill()
        change_record(redis.url, "books", _balance)
        broker.start()
        await broker.until_serving()
        await calls.call("GetRun", broker_pb2.GetRunRequest(run_id="books"))
        mended = ("PenstockConservationBroken", "PenstockStalenessViolated", "PenstockStoreLostTokens")
        await asyncio.gather(*(seen.until_resolved(name) for name in mended))
        books = await calls.call("AuditRun", broker_pb2.AuditRunRequest(run_id="books"))
        assert books.audit.balanced


def _fill_to_the_page(disk: Path, log: Path) -> Path:
    """As `fill`, and the last page of the log is full as well: its next line is lost."""
    with log.open("ab") as file:
        file.write(b"\n" * (-log.stat().st_size % os.sysconf("SC_PAGE_SIZE")))
    return fill(disk)


async def _continued_lease(channel: grpc.aio.Channel) -> broker_pb2.Lease:
    """The lease of a sample with two tokens of an earlier one, in a run with token shards."""
    calls, policy = called(channel), broker_pb2.RunPolicy(token_shards=2)
    await calls.open(run_id="sharded", policy=policy, generation_lease=duration(4.0), group_size=1, groups_per_step=1)
    await calls.submit(prompt("g", group_size=1), run_id="sharded")
    first = Generator.connect(channel, "first", run_id="sharded")
    first.beat(credits=1)
    [lease] = await first.leases(1)
    assert await first.put(chunk(lease, [7, 8])) == []
    first.stream.call.cancel()
    second = Generator.connect(channel, "second", run_id="sharded")
    second.beat(credits=1)
    [lease] = await second.leases(1)
    assert len(lease.prefix_token_ids) == 2 * 4
    return lease


def _unbalance(record: RunRecord) -> None:
    """Three samples are missing, and two were trained five versions late."""
    record.submitted += 3
    record.trained_by_staleness[5] += 2


def _balance(record: RunRecord) -> None:
    record.submitted -= 3
    del record.trained_by_staleness[5]


async def test_runs_without_progress_and_expiring_leases_are_alerted(tmp_path: Path) -> None:
    broker = Served("broker", tmp_path, "redis_url=memory://")
    async with AsyncExitStack() as stack:
        stack.enter_context(started(broker))
        seen = await stack.enter_async_context(prometheus(tmp_path / "prometheus"))
        await broker.until_serving()
        instance = seen.watch("broker", broker.metrics)
        channel = await stack.enter_async_context(open_channel(broker.address))
        calls = called(channel)
        await calls.open(run_id="stalled", max_staleness=4)
        await calls.open(run_id="expiring", generation_lease=duration(1.0), max_leases_per_sample=1000, max_staleness=9)
        for number in range(8):
            await calls.submit(prompt(f"p{number}"), run_id="expiring")
        living = LivingRun(channel, "stalled", scores=True)
        await living.step()
        await calls.submit(prompt("waits"), run_id="stalled")
        await seen.until_read(instance)

        async with meanwhile(lease_and_vanish(channel, "expiring")):
            await asyncio.gather(
                seen.until_fires("PenstockWaitIsLong", run="stalled"),
                seen.until_fires("PenstockLeasesExpire", kind="generation"),
                seen.until_fires("PenstockNoProgress", run="stalled"),
            )
        async with meanwhile(living.go_on(every_s=1.0)):
            await asyncio.gather(
                seen.until_resolved("PenstockWaitIsLong", run="stalled"),
                seen.until_resolved("PenstockNoProgress", run="stalled"),
                seen.until_resolved("PenstockLeasesExpire"),
            )


@needs_alertmanager
async def test_of_a_store_that_dies_under_a_run_only_the_cause_is_alerted(tmp_path: Path) -> None:
    redis = RedisProcess(tmp_path, is_persistent=True)
    async with AsyncExitStack() as stack:
        stack.callback(redis.kill)
        redis.start()
        broker = Served("broker", tmp_path, f"redis_url={redis.url}")
        stack.enter_context(started(broker))
        told = await stack.enter_async_context(alertmanager(tmp_path / "alertmanager"))
        seen = await stack.enter_async_context(prometheus(tmp_path / "prometheus", alertmanager=told.address))
        await broker.until_serving()
        seen.watch("broker", broker.metrics)
        channel = await stack.enter_async_context(open_channel(broker.address))
        await called(channel).open(run_id="stalled", max_staleness=4)
        await LivingRun(channel, "stalled", scores=True).step()
        await called(channel).submit(prompt("waits"), run_id="stalled")
        await seen.until_read(broker.metrics)
        # Without its store a broker knows of no wait: this one is as long before.
        await seen.until_fires("PenstockWaitIsLong")
        redis.kill()
        consequences = {"PenstockNoProgress", "PenstockWaitIsLong"}
        await asyncio.gather(*(seen.until_fires(name) for name in (*consequences, "PenstockRedisFaults")))
        await told.until(told={"PenstockRedisFaults"}, inhibited=consequences)
