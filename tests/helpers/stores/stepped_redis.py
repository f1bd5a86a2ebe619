"""A store in Redis that believes the machine of Redis to show another time, which tests step."""

from __future__ import annotations

import hashlib

from services.broker.storage.redis.redis_connection import Script
from services.broker.storage.redis.redis_store import RedisStore

OFFSET_KEY = "penstock-test:clock-offset"
_TIME = "local now = tonumber(time[1]) * 1000000 + tonumber(time[2])"


def stepped_store(url: str) -> RedisStore:
    """A store to whose scripts Redis' time is off by what is kept under OFFSET_KEY, microseconds."""
    store = RedisStore.from_url(url)
    for script in (store._load._script, store._tick, store._roll._script):
        _shift(script)
    return store


def _shift(script: Script) -> None:
    assert script._text.count(_TIME) == 1
    script._text = script._text.replace(_TIME, f"{_TIME} + tonumber(redis.call('GET', '{OFFSET_KEY}') or '0')")
    script._digest = hashlib.sha1(script._text.encode("ascii"), usedforsecurity=False).hexdigest()
