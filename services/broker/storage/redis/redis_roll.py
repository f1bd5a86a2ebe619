"""Keeps the roll of the brokers in Redis; see `roll`."""

from __future__ import annotations

import json
from typing import Any

from penstock.targets import checked_address
from services.broker.records.roll import SILENT_S, Broker, Roll
from services.broker.storage.redis.keys import ROLL, SHARDS
from services.broker.storage.redis.redis_connection import RedisConnection, Script

KEPT_S = 600
"""How long the roll is kept once no broker answers it."""


class RedisRoll:
    """See `Store.answer_roll` and `Store.note_shards`."""

    def __init__(self, connection: RedisConnection) -> None:
        self._redis = connection
        self._script = Script("roll")

    async def answer(self, broker: Broker, process: str, *, is_leaving: bool) -> Roll:
        """See `Store.answer_roll`."""
        said = json.dumps([broker.address, sorted(broker.serves), sorted(broker.leases)])
        args: list[str | int] = [broker.name, said, process, round(SILENT_S * 1e6), int(is_leaving), KEPT_S]
        reply: Any = await self._redis.write(lambda redis: self._script.run(redis, keys=[ROLL, SHARDS], args=args))
        brokers = (_broker(name.decode(), text) for name, text in zip(reply[3::2], reply[4::2], strict=True))
        last = reply[1].decode()
        return Roll(
            epoch=int(reply[0]),
            brokers={found.name: found for found in brokers if found is not None},
            sharded={run_id.decode(): int(num) for run_id, num in zip(reply[2][::2], reply[2][1::2], strict=True)},
            rival="" if last == process else last,
        )

    async def note_shards(self, run_id: str, num_shards: int) -> None:
        """See `Store.note_shards`."""
        if num_shards:
            await self._redis.write(lambda redis: redis.hset(SHARDS, run_id, str(num_shards)))
        else:
            await self._redis.write(lambda redis: redis.hdel(SHARDS, run_id))


def _broker(name: str, text: bytes) -> Broker | None:
    """What a broker said of itself; None if that is malformed."""
    try:
        address, serves, leases = json.loads(text)
        return Broker(name=name, address=checked_address(address), serves=frozenset(serves), leases=frozenset(leases))
    except (ValueError, TypeError, AttributeError):
        return None
