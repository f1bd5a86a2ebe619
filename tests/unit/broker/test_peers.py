"""What a broker remembers of generators and reward workers."""

from __future__ import annotations

import pytest

from penstock.clock import ManualClock
from penstock.v1 import broker_pb2
from services.broker.memory_store import MemoryStore
from services.broker.peers import CONTEXT_GRACE_S, KEPT_S, LONGEST_EVERY_S, PEER_TIMEOUT_S, Peers
from services.broker.run_clock import RunClock
from services.broker.store import Delta

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


def _hello(name: str, max_context_tokens: int) -> broker_pb2.GeneratorHello:
    return broker_pb2.GeneratorHello(run_id=RUN, generator_id=name, max_context_tokens=max_context_tokens)


async def test_the_longest_context_is_looked_up_once_for_all_that_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    store, clock = MemoryStore(), ManualClock()
    await store.commit(RUN, None, Delta(run=b""))
    peers = Peers(RUN, store=store, clock=RunClock(clock))
    for number in range(50):
        await peers.see_generator(_hello(f"gen-{number}", 100 + number), None)
    clock.advance(CONTEXT_GRACE_S)
    looked_at: list[str] = []
    is_live = peers._is_live
    monkeypatch.setattr(peers, "_is_live", lambda view: looked_at.append(view.hello.generator_id) or is_live(view))
    assert {peers.longest_context_tokens() for _ in range(50)} == {149}
    assert len(looked_at) <= 50
    # One that holds more counts at once, one that is gone a little later no more.
    await peers.see_generator(_hello("gen-long", 4000), None)
    assert peers.longest_context_tokens() == 4000
    clock.advance(PEER_TIMEOUT_S)
    await peers.see_generator(_hello("gen-0", 100), None)
    clock.advance(LONGEST_EVERY_S)
    assert peers.longest_context_tokens() == 100
