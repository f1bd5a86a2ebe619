from __future__ import annotations

from collections import Counter

import pytest
from redis.crc import key_slot

from services.broker.records.shard_ids import run_and_shard, shard_id
from services.broker.storage.redis.keys import NUM_SLOTS, RunKeys, slot_of, spread_tag


@pytest.mark.parametrize("num_masters", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("num_shards", [8, 12, 16, 64])
def test_no_master_has_many_more_of_a_run_s_shards_than_its_share(num_shards: int, num_masters: int) -> None:
    for number in range(8):
        slots = [slot_of(spread_tag(shard_id(f"run-{number}", shard))) for shard in range(1, num_shards + 1)]
        most = max(Counter(slot * num_masters // NUM_SLOTS for slot in slots).values())
        assert most <= num_shards / num_masters + 2


def test_the_keys_of_a_shard_share_the_slot_that_redis_gives_them() -> None:
    keys = RunKeys(shard_id("run-1", 3))
    tag = spread_tag("run-1#3")
    assert {key_slot(key.encode()) for key in [*keys.fixed, keys.chunks(("g", 0))]} == {slot_of(tag)}


def test_a_run_s_own_keys_are_what_they_were() -> None:
    assert RunKeys("run-1").run == "penstock:{run-1}:run"


def test_a_shard_s_document_names_its_run() -> None:
    assert run_and_shard(shard_id("run-1.x", 1024)) == ("run-1.x", 1024)
