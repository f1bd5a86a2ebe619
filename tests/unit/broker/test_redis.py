"""The broker's view of Redis without one: URLs, errors by kind, outages."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import pairwise

import pytest
from pydantic import ValidationError
from redis.exceptions import (
    BusyLoadingError,
    ClusterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from services.broker.config import BrokerConfig
from services.broker.storage.redis.address import parse_redis_url
from services.broker.storage.redis.faults import (
    FIRST_DELAY_S,
    MAX_DELAY_S,
    Outage,
    RedisFault,
    TooFewReplicasError,
    classify,
)
from services.broker.storage.redis.redis_connection import RedisConnection


def test_every_form_of_the_url_is_read() -> None:
    for url in ("redis://h:1/2", "rediss://h:1", "unix:///tmp/r.sock?db=1"):
        assert (parse_redis_url(url).kind, parse_redis_url(url).url) == ("single", url)
    sentinel = parse_redis_url("redis+sentinel://u:p%40ss@s1:26379,[::1]:26380/main/3")
    assert (sentinel.kind, sentinel.hosts) == ("sentinel", (("s1", 26379), ("::1", 26380)))
    assert (sentinel.service, sentinel.db, sentinel.username, sentinel.password) == ("main", 3, "u", "p@ss")
    cluster = parse_redis_url("rediss+cluster://:pw@n1:7000,n2:7001")
    assert (cluster.kind, cluster.hosts, cluster.is_tls) == ("cluster", (("n1", 7000), ("n2", 7001)), True)
    assert (cluster.username, cluster.password) == (None, "pw")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://h:1", "must begin with"),
        ("redis+sentinel://h:1", "/SERVICE"),
        ("redis+sentinel://h:1/main/x", "/SERVICE"),
        ("redis+sentinel://h/main", "'h' is not HOST:PORT"),
        ("redis+cluster://h:1,h:70000", "'h:70000' is not HOST:PORT"),
        ("redis+cluster://h:1/0", "one database"),
        ("redis+cluster://" + ",".join(["h:1"] * 65), "65 hosts"),
    ],
)
def test_a_malformed_url_is_refused_with_the_way_to_write_it(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_redis_url(url)
    with pytest.raises(ValidationError, match=words):
        BrokerConfig(redis_url=url)


@pytest.mark.parametrize("url", ["memory://", "redis+cluster://h:1"])
def test_replicas_that_cannot_be_waited_for_are_refused(url: str) -> None:
    with pytest.raises(ValidationError, match="set it to 0"):
        BrokerConfig(redis_url=url, redis_wait_replicas=1)
    assert BrokerConfig(redis_url="redis+sentinel://h:1/main", redis_wait_replicas=1).redis_wait_replicas == 1


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (RedisConnectionError("refused"), RedisFault.UNREACHABLE),
        (ConnectionResetError("reset"), RedisFault.UNREACHABLE),
        (RedisTimeoutError("slow"), RedisFault.TIMEOUT),
        (TimeoutError(), RedisFault.TIMEOUT),
        (BusyLoadingError("loading"), RedisFault.LOADING),
        (ReadOnlyError("replica"), RedisFault.READ_ONLY),
        (OutOfMemoryError("full"), RedisFault.OUT_OF_MEMORY),
        (ResponseError("Error running script: @user_script: -OOM command not allowed"), RedisFault.OUT_OF_MEMORY),
        (ResponseError("Error running script: -READONLY You can't write"), RedisFault.READ_ONLY),
        (ResponseError("MISCONF Redis is configured to save RDB snapshots"), RedisFault.NOT_PERSISTED),
        (ResponseError("NOREPLICAS Not enough good replicas to write."), RedisFault.TOO_FEW_REPLICAS),
        (TooFewReplicasError("0 of 1"), RedisFault.TOO_FEW_REPLICAS),
        (ClusterDownError("CLUSTERDOWN The cluster is down"), RedisFault.CLUSTER_DOWN),
        (RedisClusterException("All slots are not covered"), RedisFault.CLUSTER_DOWN),
        (RedisClusterException("Redis Cluster cannot be connected"), RedisFault.UNREACHABLE),
        (ResponseError("WRONGTYPE Operation against a key"), RedisFault.REFUSED),
    ],
)
def test_errors_have_a_kind_and_every_kind_an_advice(error: Exception, fault: RedisFault) -> None:
    assert classify(error) is fault
    assert fault.advice


def test_an_outage_is_tried_ever_more_rarely_and_by_one_call_at_a_time() -> None:
    outage = Outage.begin(RedisFault.UNREACHABLE, "refused", 100.0)
    assert not outage.may_try(100.0 + FIRST_DELAY_S / 2)
    tries: list[float] = []
    for tick in range(3_000):
        now_s = 100.0 + tick / 100
        if outage.may_try(now_s):
            tries.append(now_s)
            assert not outage.may_try(now_s)
    gaps = [after - before for before, after in pairwise(tries)]
    assert len(tries) < 40
    assert max(gaps) <= MAX_DELAY_S + 0.01
    assert min(gaps[5:]) >= MAX_DELAY_S / 2
    assert outage.describe(130.0).startswith("Redis is away (unreachable) since 30 s: refused; start it")


async def test_a_cancellation_that_the_client_forgets_still_ends_the_call() -> None:
    started = asyncio.Event()

    async def forgetful(_redis: object) -> str:
        started.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "an answer"

    connection = RedisConnection.from_url("redis://127.0.0.1:1/0")
    call = asyncio.create_task(connection.read(forgetful))
    await started.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await connection.close()
