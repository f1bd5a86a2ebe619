"""Renewals: what a heartbeat names lives on, in few changes of records."""

from __future__ import annotations

import random

from services.broker.operations import leasing, renewal
from services.broker.operations.renewal import Heard
from services.broker.records_pb2 import SampleRecord
from services.broker.state.lease_dues import FEW, LeaseDues
from services.broker.state.run_state import RunState
from tests.helpers.brokers.broker import duration
from tests.unit.broker.builders import lease, open_state, put, renew, submit

LIFE_S = 20.0


def state_of(*group_ids: str, num_samples: int = 2) -> RunState:
    """A run whose leases last LIFE_S."""
    state = open_state(generation_lease=duration(LIFE_S), group_size=num_samples, groups_per_step=8)
    assert submit(state, *group_ids) == []
    return state


def sample_of(state: RunState, lease_id: str) -> SampleRecord:
    """The sample that is under a lease."""
    return next(sample for group in state.groups.values() for sample in group.samples if sample.lease_id == lease_id)


def test_a_lease_is_renewed_before_half_of_it_is_over_and_not_at_every_heartbeat() -> None:
    state = state_of("a")
    [grant] = lease(state, 1, now_s=0.0)
    state.settle()
    changed = []
    for now_s in range(0, 60, 2):
        renew(state, [grant.lease_id], float(now_s))
        if state.is_changed:
            changed.append(now_s)
            assert state.only_grew, "no stream waits for it"
            state.settle()
        assert sample_of(state, grant.lease_id).lease_expire_s - now_s >= LIFE_S / 2
    assert changed == [12, 24, 36, 48]


def test_a_lease_that_was_not_named_for_a_while_is_renewed_when_it_is() -> None:
    state = state_of("a", "b")
    [withheld] = lease(state, 1, now_s=0.0)
    [named] = lease(state, 1, now_s=9.0)
    renew(state, [named.lease_id], 9.0)
    renew(state, [named.lease_id, withheld.lease_id], 12.0)
    assert sample_of(state, withheld.lease_id).lease_expire_s == 12.0 + LIFE_S


def test_a_renewal_that_is_not_stored_is_made_again() -> None:
    state = state_of("a")
    [grant] = lease(state, 1, now_s=0.0)
    state.settle()
    renew(state, [grant.lease_id], 11.0)
    state.rollback()
    assert sample_of(state, grant.lease_id).lease_expire_s == LIFE_S
    renew(state, [grant.lease_id], 12.0)
    assert sample_of(state, grant.lease_id).lease_expire_s == 12.0 + LIFE_S


def test_the_leases_of_a_group_are_renewed_together_each_as_of_its_own_holders_heartbeat() -> None:
    state = state_of("a", num_samples=5)
    mine, named, unnamed, silent, unheard = (
        lease(state, 1, now_s=0.0, generator_id=name)[0] for name in ("me", "named", "unnamed", "silent", "unheard")
    )
    others = {
        "named": Heard(holder_id="named", lease_ids=frozenset((named.lease_id,)), heard_s=10.0),
        "unnamed": Heard(holder_id="unnamed", lease_ids=frozenset((mine.lease_id,)), heard_s=10.0),
        "silent": Heard(holder_id="silent", lease_ids=frozenset((silent.lease_id,)), heard_s=401.0),
    }
    heard = Heard(holder_id="me", lease_ids=frozenset((mine.lease_id,)), heard_s=11.0)
    assert renewal.renew(state, heard, 11.0, others=others) == []
    ends = [sample_of(state, grant.lease_id).lease_expire_s for grant in (mine, named, unnamed, unheard)]
    assert ends == [11.0 + LIFE_S, 10.0 + LIFE_S, LIFE_S, LIFE_S]
    put(state, mine, [5], holder="me", now_s=400.0)
    assert renewal.renew(state, heard, 401.0, others=others) == []
    assert sample_of(state, mine.lease_id).lease_expire_s == 401.0 + LIFE_S
    assert sample_of(state, silent.lease_id).lease_expire_s < 401.0


def test_whatever_heartbeats_come_named_leases_live_on_and_others_end() -> None:
    """By the promise itself: what was named has half of its time left, and none lasts longer than a life from then."""
    for seed in range(20):
        _play(random.Random(seed))


def _play(rng: random.Random) -> None:
    """Some generators share groups, come and go, and name what they like; some commits fail."""
    names = ("gen-1", "gen-2", "gen-3")
    state = state_of(*"abcdef", num_samples=4)
    named_s: dict[str, float] = {}
    others: dict[str, Heard] = {}
    now_s = 0.0
    for _ in range(120):
        now_s += rng.choice((0.1, 1.0, 3.0))
        holder = rng.choice(names)
        for grant in lease(state, rng.randrange(3), now_s=now_s, generator_id=holder):
            named_s[grant.lease_id] = now_s
        state.settle()
        held = state.generation_leases.get(holder, {})
        lease_ids = frozenset(name for name in held if rng.random() < 0.9)
        heard = others[holder] = Heard(holder_id=holder, lease_ids=lease_ids, heard_s=now_s)
        named_s.update(dict.fromkeys(lease_ids, now_s))
        renewal.renew(state, heard, now_s, others=others)
        if rng.random() < 0.2:
            state.rollback()
            continue
        state.settle()
        for lease_id in lease_ids:
            assert sample_of(state, lease_id).lease_expire_s >= now_s + LIFE_S / 2
        leasing.expire(state, now_s)
        state.settle()
        for held in state.generation_leases.values():
            for lease_id in held:
                assert now_s < sample_of(state, lease_id).lease_expire_s <= named_s[lease_id] + LIFE_S


def test_leases_and_holders_that_are_gone_are_forgotten() -> None:
    dues = LeaseDues()
    for number in range(10 * FEW):
        dues.note(f"gen-{number}", {"a": 1.0})
        dues.forget_others(["gen-0"])
    named = frozenset("a")
    known = [name for name in range(10 * FEW) if not dues.take_due(f"gen-{name}", named, 0.0)]
    assert len(known) <= FEW + 2
    assert 0 in known
    assert dues.take_due("gen-0", frozenset(), 1.0) == frozenset()
    assert dues.take_due("gen-0", named, 1.0) == named, "it was not named when it was due"
