"""What a broker remembers of generators and reward workers."""

from __future__ import annotations

import pytest

from penstock.clock import ManualClock
from penstock.v1 import broker_pb2
from services.broker.fleet import worker_registry
from services.broker.fleet.worker_registry import KEPT_S, PEER_TIMEOUT_S, Peers
from services.broker.records.run_clock import RunClock
from services.broker.records.store import Delta
from services.broker.storage.memory_store import MemoryStore

RUN = "r"


async def test_peers_with_ever_new_names_do_not_pile_up() -> None:
    store, clock = MemoryStore(), ManualClock()
    await store.commit(RUN, None, Delta(run=b""))
    peers = Peers(RUN, store=store, clock=RunClock(clock))
    other = Peers(RUN, store=store, clock=RunClock(clock))
    for number in range(20):
        hello = broker_pb2.GeneratorHello(run_id=RUN, generator_id=f"gen-{number}")
        await peers.see_generator(hello, broker_pb2.GeneratorBeat(num_running=1, tokens_per_second=5.0))
        await peers.see_worker(f"worker-{number}")
        await peers.refresh()
        await other.refresh()
        clock.advance(KEPT_S / 4)
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
    peers = Peers(RUN, store=store, clock=RunClock(clock))
    for number in range(4):
        hello = broker_pb2.GeneratorHello(run_id=RUN, generator_id=f"gen-{number}")
        await peers.see_generator(hello, broker_pb2.GeneratorBeat())
    clock.advance(2 * PEER_TIMEOUT_S)
    await peers.refresh()
    assert len(await store.peers(RUN)) == 4
    await peers.see_worker("worker")
    clock.advance(2.0)
    await peers.refresh()
    assert list(await store.peers(RUN)) == ["w:worker"]
