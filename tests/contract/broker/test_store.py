"""What `services.broker.records.store.Store` promises, on every store: memory, one Redis, Sentinel and Cluster."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from contextlib import closing

import pytest
import redis

from services.broker.records.roll import Broker, StoredRoll
from services.broker.records.run_clock import BROKER_LIFE_S, MOST_BEHIND_S, StoredClock
from services.broker.records.store import (
    MAX_BUSY_SPANS,
    ConflictError,
    Delta,
    LostMarkError,
    Mark,
    RetiredError,
    Snapshot,
    Store,
)
from services.broker.storage import memory_store
from services.broker.storage.redis import load_run, redis_store
from tests.helpers.stores.stepped_redis import OFFSET_KEY, stepped_store
from tests.helpers.stores.stores import RedisServers

RUN = "r"
NAMES = ("a", "b", "b:1", "\u00e9 \u4e2d", "x" * 128)


def applied(copy: Mapping[str, bytes], snapshot: Snapshot) -> dict[str, bytes]:
    """A copy of the records, brought up to date."""
    changed = dict(snapshot.groups) if snapshot.is_full else {**copy, **snapshot.groups}
    return {name: record for name, record in changed.items() if record is not None}


async def loaded(store: Store, since: Mark | None = None, run_id: str = RUN) -> Snapshot:
    snapshot = await store.load(run_id, since)
    assert snapshot is not None
    return snapshot


def random_delta(numbers: random.Random, revision: int) -> Delta:
    """Changes of some groups and of what belongs to them."""
    names = numbers.sample(NAMES, numbers.randint(0, len(NAMES)))
    value = f"{revision}\0\xff".encode("latin-1")
    return Delta(
        run=value,
        groups={name: numbers.choice([None, value]) for name in names},
        prompts={name: numbers.choice([None, value]) for name in names},
        cleared={(name, 0) for name in names if numbers.random() < 0.3},
        chunks=[((name, numbers.randint(0, 1)), value + bytes([part])) for name in names for part in range(3)],
        retired={name for name in names if numbers.random() < 0.2},
    )


class Oracle:
    """The same promises, kept in the plainest way."""

    def __init__(self) -> None:
        self.groups: dict[str, bytes] = {}
        self.prompts: dict[str, bytes] = {}
        self.chunks: dict[tuple[str, int], list[bytes]] = {}
        self.retired: set[str] = set()

    def commit(self, delta: Delta) -> None:
        for target, changes in ((self.groups, delta.groups), (self.prompts, delta.prompts)):
            target.update({name: value for name, value in changes.items() if value is not None})
            for name in [name for name, value in changes.items() if value is None]:
                target.pop(name, None)
        for sample in delta.cleared:
            self.chunks.pop(sample, None)
        for sample, chunk in delta.chunks:
            self.chunks.setdefault(sample, []).append(chunk)
        self.retired |= delta.retired


@pytest.mark.parametrize("seed", range(4))
async def test_any_sequence_of_commits_reads_back_and_every_old_copy_catches_up(store: Store, seed: int) -> None:
    numbers, oracle = random.Random(seed), Oracle()
    samples = [(name, index) for name in NAMES for index in (0, 1)]
    mark: Mark | None = None
    copies: list[tuple[Mark, dict[str, bytes]]] = []
    for revision in range(1, 25):
        delta = random_delta(numbers, revision)
        oracle.commit(delta)
        mark = await store.commit(RUN, mark, delta)
        assert mark.revision == revision
        copies.append((mark, dict(oracle.groups)))
        for since, copy in numbers.sample(copies, min(3, len(copies))):
            snapshot = await loaded(store, since)
            assert (snapshot.mark, snapshot.run if since != mark else delta.run) == (mark, delta.run)
            if since != mark:
                assert applied(copy, snapshot) == oracle.groups
        full = await loaded(store)
        assert (full.is_full, applied({}, full)) == (True, oracle.groups)
        assert await store.chunks(RUN, samples) == [oracle.chunks.get(sample, []) for sample in samples]
        assert await store.prompts(RUN, NAMES) == [oracle.prompts.get(name) for name in NAMES]
        assert await store.retired(RUN, NAMES) == oracle.retired


async def test_the_newest_retired_ids_are_known_and_the_oldest_are_forgotten(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (memory_store, redis_store):
        monkeypatch.setattr(module, "MIN_RETIRED_KEPT", 2)
    mark = None
    names = [f"g{number}" for number in range(9)]
    for number, name in enumerate(names):
        mark = await store.commit(RUN, mark, Delta(run=b"1", retired={name}))
        known = await store.retired(RUN, names)
        assert set(names[max(0, number - 1) : number + 1]) <= known <= set(names[: number + 1])
        assert len(known) <= 5
    for name in known:
        with pytest.raises(RetiredError):
            await store.commit(RUN, mark, Delta(run=b"2", fresh=["new", name]))
    await store.commit(RUN, mark, Delta(run=b"2", fresh=["new", "g0"]))


async def test_a_commit_on_an_old_mark_stores_nothing(store: Store) -> None:
    first = await store.commit(RUN, None, Delta(run=b"1", groups={"a": b"A"}))
    second = await store.commit(RUN, first, Delta(run=b"2", groups={"b": b"B"}, chunks=[(("b", 0), b"x")]))
    late = Delta(
        run=b"3",
        groups={"a": None},
        prompts={"a": b"p"},
        cleared={("b", 0)},
        chunks=[(("b", 0), b"y"), (("a", 0), b"y")],
        retired={"a"},
    )
    for expected in (first, None, Mark(second.revision, "another"), Mark(second.revision + 1, second.name)):
        with pytest.raises(ConflictError):
            await store.commit(RUN, expected, late)
    with pytest.raises(ConflictError):
        await store.commit("nobody", first, late)
    snapshot = await loaded(store)
    assert (snapshot.mark, snapshot.run, dict(snapshot.groups)) == (second, b"2", {"a": b"A", "b": b"B"})
    assert await store.chunks(RUN, [("b", 0), ("a", 0)]) == [[b"x"], []]
    assert await store.retired(RUN, ["a"]) == set()
    assert await store.prompts(RUN, ["a"]) == [None]
    assert await store.load("nobody", None) is None


async def test_loading_since_a_mark_brings_only_what_changed(store: Store) -> None:
    assert await store.load(RUN, None) is None
    first = await store.commit(RUN, None, Delta(run=b"1", groups={"a": b"A", "b": b"B", "d": b"D"}))
    second = await store.commit(RUN, first, Delta(run=b"2", groups={"a": None, "c": b"C\0\xff"}))
    snapshot = await loaded(store, first)
    assert (snapshot.is_full, dict(snapshot.groups)) == (False, {"a": None, "c": b"C\0\xff"})
    assert (await loaded(store, second)).mark == second


async def test_a_copy_of_another_history_must_load_everything(store: Store) -> None:
    """So a broker that is ahead of a Redis which came back without its last second notices, and believes Redis."""
    first = await store.commit(RUN, None, Delta(run=b"1", groups={"a": b"A"}))
    second = await store.commit(RUN, first, Delta(run=b"2", groups={"b": b"B"}))
    strangers = (Mark(1, "x"), Mark(2, "x"), Mark(9, "x"), Mark(2, first.name), Mark(1, second.name))
    for since in strangers:
        with pytest.raises(LostMarkError):
            await store.load(RUN, since)
    snapshot = await loaded(store)
    assert (snapshot.is_full, snapshot.mark, snapshot.run) == (True, second, b"2")
    assert dict(snapshot.groups) == {"a": b"A", "b": b"B"}


async def test_a_copy_too_far_behind_must_load_everything(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (redis_store, memory_store):
        monkeypatch.setattr(module, "MARKS_KEPT", 5)
    mark = first = await store.commit(RUN, None, Delta(run=b"", groups={"never changed": b"1", "gone": b"1"}))
    marks = [first]
    for number in range(8):
        groups: dict[str, bytes | None] = {"gone": None} if number == 1 else {f"g{number}": b"2"}
        mark = await store.commit(RUN, mark, Delta(run=b"", groups=groups))
        marks.append(mark)
    expected = applied({}, await loaded(store))
    assert "gone" not in expected
    assert "never changed" in expected
    for since in marks:
        if since.revision <= mark.revision - 5:
            with pytest.raises(LostMarkError):
                await store.load(RUN, since)
        else:
            assert not (await loaded(store, since)).is_full


async def test_a_change_that_is_too_large_to_read_at_once_is_left_to_loading_everything(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (load_run, memory_store):
        monkeypatch.setattr(module, "MAX_CHANGED_BYTES", 100)
    first = await store.commit(RUN, None, Delta(run=b"1"))
    second = await store.commit(RUN, first, Delta(run=b"2", groups={"a": b"a" * 100, "b": None}))
    assert dict((await loaded(store, first)).groups) == {"a": b"a" * 100, "b": None}
    third = await store.commit(RUN, second, Delta(run=b"3", groups={"c": b"c"}))
    with pytest.raises(LostMarkError):
        await store.load(RUN, first)
    assert dict((await loaded(store, second)).groups) == {"c": b"c"}
    snapshot = await loaded(store)
    assert (snapshot.mark, snapshot.run, dict(snapshot.groups)) == (third, b"3", {"a": b"a" * 100, "c": b"c"})


async def test_a_run_that_changes_while_everything_is_read_is_read_as_of_one_commit(store: Store) -> None:
    """Every commit gives all of its records its own number: a mixture of two commits would show."""
    names = [f"g{number}" for number in range(600)]

    def change(revision: int) -> Delta:
        # Some come, some go, all that stay change.
        gone = names[: revision * 5]
        value = str(revision).encode() * 100
        return Delta(
            run=value,
            groups={**dict.fromkeys(gone), **dict.fromkeys([*names[len(gone) :], f"new{revision}"], value)},
            retired=set(gone),
        )

    mark = await store.commit(RUN, None, change(0))
    is_over, num_loads = asyncio.Event(), 0

    async def commit() -> None:
        nonlocal mark
        for revision in range(1, 15):
            mark = await store.commit(RUN, mark, change(revision))
            await asyncio.sleep(0)
        is_over.set()

    async def read() -> None:
        nonlocal num_loads
        while not is_over.is_set():
            snapshot = await loaded(store)
            expected: dict[str, bytes | None] = {}
            for revision in range(snapshot.mark.revision):
                expected.update(change(revision).groups)
            assert snapshot.run == change(snapshot.mark.revision - 1).run
            assert dict(snapshot.groups) == {name: record for name, record in expected.items() if record is not None}
            num_loads += 1
            await asyncio.sleep(0)

    await asyncio.gather(commit(), read())
    assert num_loads


async def test_chunks_are_cleared_before_new_ones_are_appended(store: Store) -> None:
    first = await store.commit(RUN, None, Delta(run=b"1", chunks=[(("a", 0), b"x"), (("a", 1), b"y")]))
    change = Delta(run=b"2", cleared={("a", 0)}, chunks=[(("a", 0), b"z"), (("a", 0), b"zz")])
    second = await store.commit(RUN, first, change)
    assert await store.chunks(RUN, [("a", 0), ("a", 1)]) == [[b"z", b"zz"], [b"y"]]
    await store.commit(RUN, second, Delta(run=b"3", cleared={("a", 0), ("a", 7), ("nobody", 0)}))
    assert await store.chunks(RUN, [("a", 0), ("a", 1)]) == [[], [b"y"]]


async def test_chunks_of_samples_with_alike_names_stay_apart(store: Store) -> None:
    samples = [("a", 1), ("a:1", 0), ("a:1:0", 0), ("a", 10), ("A", 1)]
    await store.commit(RUN, None, Delta(run=b"", chunks=[(sample, repr(sample).encode()) for sample in samples]))
    assert await store.chunks(RUN, samples) == [[repr(sample).encode()] for sample in samples]


async def test_runs_are_apart_and_listed_oldest_first(store: Store) -> None:
    names = ["z", "a", "m"]
    for name in names:
        delta = Delta(
            run=name.encode(),
            groups={"g": name.encode()},
            prompts={"g": b"p"},
            chunks=[(("g", 0), b"c")],
            retired={"q"},
        )
        await store.commit(name, None, delta)
    mark = (await loaded(store, run_id="a")).mark
    await store.commit("a", mark, Delta(run=b"A", groups={"g": None}, prompts={"g": None}, cleared={("g", 0)}))
    assert await store.run_ids() == names
    assert (await loaded(store, run_id="z")).groups == {"g": b"z"}
    assert await store.chunks("z", [("g", 0)]) == [[b"c"]]
    assert await store.prompts("z", ["g"]) == [b"p"]
    assert await store.retired("a", ["q"]) == {"q"}
    assert await store.records("z", ["none", "g"]) == [None, b"z"]
    assert await store.records("a", ["g"]) == [None]


async def test_questions_about_nothing_have_empty_answers(store: Store) -> None:
    await store.ping()
    assert await store.run_ids() == []
    assert await store.prompts("nobody", []) == []
    assert await store.prompts("nobody", ["a", "b"]) == [None, None]
    assert await store.records("nobody", []) == []
    assert await store.records("nobody", ["a"]) == [None]
    assert await store.chunks("nobody", []) == []
    assert await store.chunks("nobody", [("a", 0)]) == [[]]
    assert await store.retired("nobody", []) == set()
    assert await store.retired("nobody", ["a"]) == set()
    assert await store.peers("nobody") == {}
    assert await store.busy_spans("nobody", "p") == []


async def test_peers_are_remembered_and_their_spans_are_bounded(store: Store) -> None:
    await store.commit(RUN, None, Delta(run=b"1"))
    await store.put_peers(RUN, {"g:1": b"old"}, {"g:1": [b"s1"]})
    await store.put_peers(RUN, {"g:1": b"new", "g:2": b"two"}, {"g:1": [b"s2", b"s3"], "g:2": [b"t"]})
    await store.put_peers(RUN, {"w:1": b"worker"}, {})
    assert await store.peers(RUN) == {"g:1": b"new", "g:2": b"two", "w:1": b"worker"}
    assert await store.busy_spans(RUN, "g:1") == [b"s1", b"s2", b"s3"]
    assert await store.busy_spans(RUN, "g:2") == [b"t"]
    spans = {"g:1": [b"%d" % number for number in range(MAX_BUSY_SPANS - 1)]}
    await store.put_peers(RUN, {"g:1": b"new"}, spans)
    found = await store.busy_spans(RUN, "g:1")
    assert (len(found), found[:2], found[-1]) == (MAX_BUSY_SPANS, [b"s3", b"0"], b"%d" % (MAX_BUSY_SPANS - 2))


async def test_a_forgotten_peer_leaves_nothing(store: Store) -> None:
    await store.commit(RUN, None, Delta(run=b"1"))
    await store.put_peers(RUN, {"g:1": b"one", "g:2": b"two"}, {"g:1": [b"s"], "g:2": [b"t"]})
    await store.forget_peers(RUN, ["g:1", "g:unknown"])
    await store.forget_peers(RUN, [])
    assert await store.peers(RUN) == {"g:2": b"two"}
    assert await store.busy_spans(RUN, "g:1") == []
    assert await store.busy_spans(RUN, "g:2") == [b"t"]


async def test_racing_committers_form_one_sequence(store: Store) -> None:
    """Nobody's commit is lost or seen in two orders: chunks, counter and marks tell the same story."""
    await store.commit(RUN, None, Delta(run=b"0"))
    won: list[tuple[int, bytes]] = []

    async def commit_some(name: str) -> None:
        num_left = 10
        while num_left:
            snapshot = await loaded(store)
            word = f"{name}{num_left}".encode()
            delta = Delta(
                run=b"%d" % (int(snapshot.run) + 1), groups={word.decode(): word}, chunks=[(("log", 0), word)]
            )
            try:
                mark = await store.commit(RUN, snapshot.mark, delta)
            except ConflictError:
                await asyncio.sleep(0)
                continue
            won.append((mark.revision, word))
            num_left -= 1

    await asyncio.gather(*(commit_some(name) for name in "abcd"))
    snapshot = await loaded(store)
    assert (snapshot.run, snapshot.mark.revision, len(snapshot.groups)) == (b"40", 41, 40)
    assert [revision for revision, _word in sorted(won)] == list(range(2, 42))
    assert await store.chunks(RUN, [("log", 0)]) == [[word for _revision, word in sorted(won)]]


async def test_a_load_never_shows_half_a_commit(store: Store) -> None:
    mark = await store.commit(RUN, None, Delta(run=b"0", groups=dict.fromkeys(NAMES, b"0")))
    is_done = False

    async def read() -> int:
        num_reads = 0
        while not is_done:
            snapshot = await loaded(store)
            assert set(snapshot.groups.values()) == {snapshot.run}
            num_reads += 1
            await asyncio.sleep(0)
        return num_reads

    readers = [asyncio.create_task(read()) for _ in range(2)]
    for number in range(1, 60):
        value = b"%d" % number
        mark = await store.commit(RUN, mark, Delta(run=value, groups=dict.fromkeys(NAMES, value)))
        await asyncio.sleep(0)
    is_done = True
    assert min(await asyncio.gather(*readers)) > 10


async def test_the_counters_of_the_books_are_kept_with_each_commit_and_folded(store: Store) -> None:
    assert await store.books(RUN) is None
    first = await store.commit(RUN, None, Delta(run=b"r", counts={"9|0|submitted": 2, "10|4|trained": 1}))
    assert await store.books(RUN) == (first, {"9|0|submitted": 2, "10|4|trained": 1})
    with pytest.raises(ConflictError):
        await store.commit(RUN, None, Delta(run=b"r", counts={"9|0|submitted": 7}))
    second = await store.commit(
        RUN,
        first,
        Delta(run=b"r", counts={"9|4|dropped:stale": 3, "9|4|trained": 5, "11|4|trained": -1}, fold_version=10),
    )
    assert await store.books(RUN) == (
        second,
        {"10|0|submitted": 2, "10|4|trained": 6, "10|4|dropped:stale": 3, "11|4|trained": -1},
    )


async def test_the_clock_of_a_run_goes_on_and_knows_of_gaps(store: Store) -> None:
    before = await store.tick(RUN, 5.0)
    assert abs(before.now_s - time.time()) < 60.0
    await store.commit(RUN, None, Delta(run=b"run"))
    first = await store.tick(RUN, 5.0)
    second = await store.tick(RUN, 5.0)
    assert before.now_s <= first.now_s < second.now_s
    assert first.unbroken_since_s == second.unbroken_since_s == first.now_s
    read = (await loaded(store)).clock
    assert read is not None
    assert read.now_s > second.now_s
    assert read.unbroken_since_s == first.now_s
    # Any time at all is too long a gap now.
    third = await store.tick(RUN, 0.0)
    assert third.unbroken_since_s == third.now_s > read.now_s


async def test_the_clock_of_a_run_knows_what_its_brokers_have_heard(store: Store) -> None:
    await store.commit(RUN, None, Delta(run=b"run"))
    alone = await store.tick(RUN, 5.0)
    assert alone.heard_s == alone.now_s
    firsts = [await store.tick(RUN, 5.0, broker=broker) for broker in ("a/host:1", 'b"')]
    assert [first.heard_s for first in firsts] == [firsts[0].now_s, firsts[0].now_s]
    second = await store.tick(RUN, 5.0, broker="a/host:1")
    assert second.heard_s == firsts[0].now_s
    third = await store.tick(RUN, 5.0, broker="a/host:1")
    assert third.heard_s == firsts[1].now_s
    read = (await loaded(store)).clock
    assert read.heard_s == firsts[1].now_s < read.now_s
    left = await store.tick(RUN, 5.0, broker='b"', is_leaving=True)
    assert left.heard_s == second.now_s
    assert left.unbroken_since_s == alone.now_s
    # Any time at all is too long a gap now, for a broker as well.
    late = await store.tick(RUN, 0.0, broker="b")
    assert late.unbroken_since_s == late.now_s


async def test_a_broker_that_is_silent_for_long_is_not_waited_for(servers: RedisServers) -> None:
    url = servers.emptied("redis")
    store = stepped_store(url)
    try:
        await store.commit(RUN, None, Delta(run=b"run"))
        dead = await store.tick(RUN, 5.0, broker="a")
        for passed_s, is_waited_for in ((BROKER_LIFE_S - 1, True), (BROKER_LIFE_S + 1, False)):
            with closing(redis.Redis.from_url(url)) as client:
                client.set(OFFSET_KEY, round(passed_s * 1e6))
            reading = await store.tick(RUN, 5.0)
            assert reading.unbroken_since_s == reading.now_s
            assert reading.heard_s == (dead.now_s if is_waited_for else reading.now_s)
    finally:
        await store.close()


async def test_a_broker_that_is_behind_is_waited_for_and_not_without_end(store: Store) -> None:
    await store.commit(RUN, None, Delta(run=b"run"))
    await store.tick(RUN, 5.0, broker="a")
    first = await store.tick(RUN, 5.0, broker="a")
    behind = [await store.tick(RUN, 5.0, broker="a", is_behind=True) for _ in range(3)]
    assert {reading.heard_s for reading in behind} == {first.heard_s}
    # Others wait too, and a newcomer begins with the present.
    other = await store.tick(RUN, 5.0, broker="b", is_behind=True)
    assert other.heard_s == first.heard_s
    after = await store.tick(RUN, 5.0, broker="a")
    assert after.heard_s == behind[-1].now_s
    assert after.unbroken_since_s == first.unbroken_since_s


async def test_redis_keeps_the_clock_of_brokers_that_are_behind_as_the_reference_does(servers: RedisServers) -> None:
    url, numbers, reference = servers.emptied("redis"), random.Random(7), StoredClock()
    store = stepped_store(url)
    start_s, passed_s, longest_s = time.time(), 0.0, 0.0
    try:
        await store.commit(RUN, None, Delta(run=b"run"))
        with closing(redis.Redis.from_url(url)) as client:
            for _ in range(300):
                passed_s += numbers.choice([0.0, 0.3, 1.1, 1.1, 4.3])
                client.set(OFFSET_KEY, round(passed_s * 1e6))
                broker, is_behind = numbers.choice(["a", "a", "b"]), numbers.random() < 0.95
                found = await store.tick(RUN, 5.05, broker=broker, is_behind=is_behind)
                expected = reference.advance(start_s + passed_s, 5.05, broker=broker, is_behind=is_behind)
                # Redis' own clock goes on meanwhile.
                spent_s = time.time() - start_s
                assert found.heard_s == pytest.approx(expected.heard_s, abs=spent_s + 0.1)
                assert found.unbroken_since_s == pytest.approx(expected.unbroken_since_s, abs=spent_s + 0.1)
                longest_s = max(longest_s, found.now_s - found.heard_s)
        for broker in ("a", "b"):
            await store.tick(RUN, 5.0, broker=broker, is_behind=True)
        with closing(redis.Redis.from_url(url)) as client:
            for _ in range(100):
                passed_s += 4.0
                client.set(OFFSET_KEY, round(passed_s * 1e6))
                readings = [await store.tick(RUN, 5.0, broker=broker, is_behind=True) for broker in ("a", "b")]
        assert readings[-1].now_s - readings[-1].heard_s == pytest.approx(MOST_BEHIND_S, abs=1.0)
    finally:
        await store.close()


@pytest.mark.parametrize("seconds", [3600.0, -3600.0])
async def test_a_machine_of_another_time_takes_a_run_nowhere_back(servers: RedisServers, seconds: float) -> None:
    url = servers.emptied("redis")
    store = stepped_store(url)
    try:
        await store.commit(RUN, None, Delta(run=b"run"))
        first = await store.tick(RUN, 5.0)
        with closing(redis.Redis.from_url(url)) as client:
            client.set(OFFSET_KEY, round(seconds * 1e6))
        snapshot, second, third = await loaded(store), await store.tick(RUN, 5.0), await store.tick(RUN, 5.0)
        assert snapshot.clock is not None
        assert first.now_s <= snapshot.clock.now_s <= second.now_s < third.now_s < first.now_s + max(0, seconds) + 60
        if seconds > 0:
            assert third.unbroken_since_s == second.unbroken_since_s == second.now_s > first.now_s + seconds
        else:
            assert third.unbroken_since_s == first.unbroken_since_s
    finally:
        await store.close()


async def test_redis_keeps_the_roll_of_brokers_as_the_reference_does(servers: RedisServers) -> None:
    url, numbers, reference = servers.emptied("redis"), random.Random(7), StoredRoll()
    store = stepped_store(url)
    passed_s, epochs = 1.0e9 - time.time(), (0, 0)
    try:
        with closing(redis.Redis.from_url(url)) as client:
            for _ in range(200):
                passed_s += numbers.choice([0.0, 0.0, 1.4, 4.0])
                client.set(OFFSET_KEY, round(passed_s * 1e6))
                name, process = numbers.choice(["a:1", "b:1", "c:1"]), numbers.choice(["p", "p", "p", "q"])
                serves = frozenset(numbers.choice([[], [], ["r", "s"]]))
                leases = frozenset(numbers.choice([[], [], ["t"]]))
                broker = Broker(name=name, address="h:1", serves=serves, leases=leases)
                is_leaving = numbers.random() < 0.1
                found = await store.answer_roll(broker, process, is_leaving=is_leaving)
                wanted = reference.answer(broker, process, now_s=time.time() + passed_s, is_leaving=is_leaving)
                assert (found.brokers, found.rival) == (wanted.brokers, wanted.rival)
                assert (found.epoch > epochs[0]) == (wanted.epoch > epochs[1])
                assert found.epoch >= epochs[0]
                epochs = found.epoch, wanted.epoch
    finally:
        await store.close()


async def test_the_roll_names_the_runs_with_shards(store: Store) -> None:
    await store.note_shards("r", 3)
    await store.note_shards("s", 8)
    await store.note_shards("r", 0)
    assert (await store.answer_roll(Broker(name="a:1", address="a:1"), "p")).sharded == {"s": 8}
