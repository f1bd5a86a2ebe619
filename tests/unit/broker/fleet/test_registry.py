"""What a broker remembers of generators and reward workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from penstock.clock import ManualClock
from penstock.errors import ServiceUnavailableError
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.timestamps import timestamp
from services.broker.fleet import worker_registry
from services.broker.fleet.worker_registry import KEPT_S, PEER_TIMEOUT_S, WRITTEN_AT_ONCE, Peers
from services.broker.records.run_clock import Reading, RunClock
from services.broker.records.store import Delta
from services.broker.storage.memory_store import MemoryStore

RUN = "r"


async def test_peers_with_ever_new_names_do_not_pile_up() -> None:
    store, clock = MemoryStore(), ManualClock()
    await store.commit(RUN, None, Delta(run=b""))
    of_run = RunClock(clock)
    peers = Peers(RUN, store=store, clock=of_run)
    other = Peers(RUN, store=store, clock=of_run)
    of_run.take(Reading(now_s=clock.now_s(), unbroken_since_s=0.0))
    for number in range(20):
        hello = broker_pb2.GeneratorHello(run_id=RUN, generator_id=f"gen-{number}")
        peers.see_generator(hello, broker_pb2.GeneratorBeat(num_running=1, tokens_per_second=5.0))
        await peers.see_worker(f"worker-{number}")
        await peers.refresh()
        await other.refresh()
        clock.advance(KEPT_S / 4)
        of_run.take(Reading(now_s=clock.now_s(), unbroken_since_s=0.0))
    stored = await store.peers(RUN)
    # Those heard of in the last hour, by any broker, and the one seen at its edge.
    assert sorted(stored) == sorted(f"{kind}-{number}" for kind in ("g:gen", "w:worker") for number in range(15, 20))
    views, _workers = await other.views(None)
    assert views == []
    assert {view.hello.generator_id for view in other.generators(max_age_s=2 * KEPT_S)} == {
        f"gen-{number}" for number in range(15, 20)
    }


async def test_of_very_many_peers_those_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_registry, "MAX_KEPT", 4)
    store, clock = MemoryStore(), ManualClock()
    await store.commit(RUN, None, Delta(run=b""))
    of_run = RunClock(clock)
    peers = Peers(RUN, store=store, clock=of_run)
    for number in range(4):
        hello = broker_pb2.GeneratorHello(run_id=RUN, generator_id=f"gen-{number}")
        peers.see_generator(hello, broker_pb2.GeneratorBeat())
    clock.advance(2 * PEER_TIMEOUT_S)
    of_run.take(Reading(now_s=clock.now_s(), unbroken_since_s=0.0))
    await peers.refresh()
    assert len(await store.peers(RUN)) == 4
    await peers.see_worker("worker")
    clock.advance(2.0)
    await peers.refresh()
    assert list(await store.peers(RUN)) == ["w:worker"]


@pytest.mark.parametrize("breaks_off", [False, True])
async def test_a_generator_that_drained_is_gone_as_soon_as_its_stream_has_ended(breaks_off: bool) -> None:
    store, clock = MemoryStore(), ManualClock()
    await store.commit(RUN, None, Delta(run=b""))
    peers = Peers(RUN, store=store, clock=RunClock(clock))
    other = Peers(RUN, store=store, clock=RunClock(clock))
    for name in ("drains", "stays"):
        hello = broker_pb2.GeneratorHello(run_id=RUN, generator_id=name)
        peers.see_generator(hello, broker_pb2.GeneratorBeat(is_draining=name == "drains"))
    await peers.refresh()
    await other.refresh()

    async def shown(by: Peers) -> list[str]:
        views, _workers = await by.views(None)
        assert [view.hello.generator_id for view in by.present().generators] == [v.hello.generator_id for v in views]
        return [view.hello.generator_id for view in views]

    assert await shown(peers) == await shown(other) == ["drains", "stays"]
    for name in ("drains", "stays"):
        if breaks_off:
            peers.lose(name)
        else:
            await peers.leave(name)
    clock.advance(worker_registry.REFRESH_EVERY_S)
    await peers.refresh()
    await other.refresh()
    # One that did not drain may be back in a moment.
    assert await shown(peers) == await shown(other) == ["stays"]
    hello = broker_pb2.GeneratorHello(run_id=RUN, generator_id="drains")
    await peers.meet_generator(hello)
    clock.advance(worker_registry.REFRESH_EVERY_S)
    await other.refresh()
    assert await shown(peers) == await shown(other) == ["drains", "stays"]


async def test_what_is_known_of_a_lost_generator_replaces_nothing_that_others_heard_since() -> None:
    store, clock = MemoryStore(), ManualClock()
    await store.commit(RUN, None, Delta(run=b""))
    lost = Peers(RUN, store=store, clock=RunClock(clock))
    other = Peers(RUN, store=store, clock=RunClock(clock))
    hello = broker_pb2.GeneratorHello(run_id=RUN, generator_id="gen")
    await lost.meet_generator(hello)
    await lost.refresh()
    clock.advance(0.5)
    # This heartbeat waits to be written while the generator goes elsewhere.
    lost.see_generator(hello, broker_pb2.GeneratorBeat(num_running=1))
    lost.lose("gen")
    clock.advance(0.2)
    await other.meet_generator(hello)
    clock.advance(worker_registry.RETURN_S)
    await lost.refresh(at_once=True)
    assert lost.living(max_age_s=8.0) == {"gen"}


async def test_a_broker_that_has_not_read_the_time_yet_forgets_nobody() -> None:
    """Its own clock may be anything."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    await store.commit(RUN, None, Delta(run=b""))
    peers = Peers(RUN, store=store, clock=RunClock(clock))
    await peers.meet_generator(broker_pb2.GeneratorHello(run_id=RUN, generator_id="gen"))
    ahead = RunClock(ManualClock(clock.now_s() + 2 * KEPT_S))
    other = Peers(RUN, store=store, clock=ahead)
    await other.refresh()
    assert list(await store.peers(RUN)) == ["g:gen"]
    ahead.take(await store.tick(RUN, 5.0))
    assert other.living(max_age_s=8.0) == {"gen"}


class FailingStore(MemoryStore):
    """Counts writes of peers, and fails while it is away."""

    is_away = False
    num_writes = 0

    async def put_peers(
        self, run_id: str, views: Mapping[str, bytes], busy_spans: Mapping[str, Sequence[bytes]]
    ) -> None:
        if self.is_away:
            raise ServiceUnavailableError("the store is away")
        self.num_writes += 1
        await super().put_peers(run_id, views, busy_spans)


async def test_heartbeats_of_many_generators_are_written_together_and_survive_an_outage() -> None:
    store, clock = FailingStore(), ManualClock()
    await store.commit(RUN, None, Delta(run=b""))
    peers = Peers(RUN, store=store, clock=RunClock(clock))

    def beat(version: int) -> None:
        span = types_pb2.TimeSpan(start_time=timestamp(clock.now_s() - 1), end_time=timestamp(clock.now_s()))
        for number in range(2 * WRITTEN_AT_ONCE):
            hello = broker_pb2.GeneratorHello(run_id=RUN, generator_id=f"gen-{number}")
            peers.see_generator(hello, broker_pb2.GeneratorBeat(policy_version=version, busy_spans=[span]))

    beat(1)
    await peers.refresh()
    assert store.num_writes == 2
    clock.advance(2.0)
    beat(2)
    store.is_away = True
    with pytest.raises(ServiceUnavailableError):
        await peers.refresh()
    clock.advance(2.0)
    beat(3)
    store.is_away = False
    await peers.refresh()
    assert store.num_writes == 4
    views, _workers = await Peers(RUN, store=store, clock=RunClock(clock)).views(0.0)
    assert len(views) == 2 * WRITTEN_AT_ONCE
    assert all(view.beat.policy_version == 3 and len(view.busy_spans) == 3 for view in views)
    clock.advance(2.0)
    await peers.refresh()
    assert store.num_writes == 4, "nothing changed"
