"""Renewals: what a heartbeat names lives on, by one small record for each holder, and nothing else does."""

from __future__ import annotations

import random

import pytest

from services.broker.operations import leasing, renewal
from services.broker.operations.renewal import Heard
from services.broker.records_pb2 import RenewalRecord
from services.broker.state.other_records import is_group, renewal_name
from services.broker.state.run_state import FORMAT, RunState
from tests.helpers.brokers.broker import duration
from tests.unit.broker.builders import facts, finish, lease, loaded, open_state, put, renew, submit, suffix

LIFE_S = 20.0


def state_of(*group_ids: str, num_samples: int = 2) -> RunState:
    """A run whose leases last LIFE_S."""
    state = open_state(generation_lease=duration(LIFE_S), group_size=num_samples, groups_per_step=8)
    assert submit(state, *group_ids) == []
    return state


def ends(state: RunState) -> dict[str, float]:
    """When each lease that is held ends."""
    return {
        lease_id: state.lease_end_s(state.groups[group_id].samples[index])
        for held in state.generation_leases.values()
        for lease_id, (group_id, index) in held.items()
    }


def reloaded(state: RunState) -> RunState:
    """The run as another process loads it; everything was stored."""
    assert not state.is_changed
    records = {name: record.SerializeToString() for name, record in state.groups.items()}
    records |= {renewal_name(name): record.SerializeToString() for name, record in state.renewals.items()}
    return loaded(state.run.SerializeToString(), records)


def test_leases_are_renewed_when_a_quarter_is_over_and_not_at_every_heartbeat() -> None:
    state = state_of("a")
    lease_ids = [grant.lease_id for grant in lease(state, 2, now_s=0.0)]
    state.settle()
    changed = []
    for now_s in range(0, 60, 2):
        renew(state, lease_ids, float(now_s))
        if state.is_changed:
            changed.append(now_s)
            assert state.only_grew, "no stream waits for it"
            assert state.delta().groups.keys() == {renewal_name("gen-1")}, "one small record, whatever it holds"
            state.settle()
        assert all(end_s - now_s >= 0.75 * LIFE_S for end_s in ends(state).values())
    assert changed == list(range(6, 60, 6))


def test_a_lease_that_was_not_named_ends_when_it_would_have_and_is_renewed_when_it_is() -> None:
    state = state_of("a", "b")
    [withheld] = lease(state, 1, now_s=0.0)
    [named] = lease(state, 1, now_s=1.0)
    renew(state, [named.lease_id], 12.0)
    assert ends(state) == {withheld.lease_id: LIFE_S, named.lease_id: 12.0 + LIFE_S}
    renew(state, [named.lease_id, withheld.lease_id], 13.0)
    assert ends(state) == {withheld.lease_id: 13.0 + LIFE_S, named.lease_id: 13.0 + LIFE_S}
    renew(state, [withheld.lease_id], 24.0)
    assert leasing.expire(state, 13.0 + LIFE_S) == 1
    assert ends(state) == {withheld.lease_id: 24.0 + LIFE_S}
    # The lease that ended is named once more, by a generator that has not heard of it yet.
    renew(state, [named.lease_id, withheld.lease_id], 28.0)
    assert ends(state) == {withheld.lease_id: 24.0 + LIFE_S}


def test_a_lease_without_a_token_for_too_long_ends_while_others_of_its_holder_live_on() -> None:
    state = state_of("a")
    hanging, going_on = lease(state, 2, now_s=0.0)
    both = [hanging.lease_id, going_on.lease_id]
    for now_s in range(11, 400, 11):
        assert renew(state, both, float(now_s)) == []
    put(state, going_on, [5], now_s=400.0)
    assert renew(state, both, 410.0) == [hanging.lease_id]
    assert ends(state) == {hanging.lease_id: 396.0 + LIFE_S, going_on.lease_id: 410.0 + LIFE_S}
    assert renew(state, both, 412.0) == [hanging.lease_id]
    # A token comes after all.
    put(state, hanging, [5], now_s=413.0)
    assert renew(state, both, 414.0) == []
    assert ends(state) == dict.fromkeys(both, 414.0 + LIFE_S)


@pytest.mark.parametrize("lease_s", [12.0, 11.5], ids=["at the same instant", "by a clock that is behind"])
def test_a_lease_granted_after_a_renewal_is_not_of_it(lease_s: float) -> None:
    state = state_of("a")
    [old] = lease(state, 1, now_s=0.0)
    renew(state, [old.lease_id], 12.0)
    [new] = lease(state, 1, now_s=lease_s)
    assert new.expire_s == pytest.approx(12.0 + LIFE_S)
    renew(state, [old.lease_id], 22.5)
    assert ends(state) == {old.lease_id: 22.5 + LIFE_S, new.lease_id: new.expire_s}
    renew(state, [old.lease_id, new.lease_id], 24.0)
    assert ends(state) == dict.fromkeys((old.lease_id, new.lease_id), 24.0 + LIFE_S)


def test_a_lease_granted_just_before_a_renewal_that_does_not_know_it_is_not_of_it() -> None:
    state = state_of("a")
    [old] = lease(state, 1, now_s=0.0)
    [new] = lease(state, 1, now_s=12.0)
    # It was read at that very moment, or before, and is stored after the lease was granted.
    renew(state, [old.lease_id], 12.0)
    assert ends(state) == {old.lease_id: 12.0 + LIFE_S, new.lease_id: 12.0 + LIFE_S}
    renew(state, [old.lease_id], 24.0)
    assert ends(state) == {old.lease_id: 24.0 + LIFE_S, new.lease_id: 12.0 + LIFE_S}


def test_a_sample_that_its_holder_gets_again_begins_a_lease_of_its_own() -> None:
    state = state_of("a", num_samples=1)
    [first] = lease(state, 1, now_s=0.0)
    renew(state, [first.lease_id], 12.0)
    renew(state, ["unknown"], 24.0)
    assert leasing.expire(state, 12.0 + LIFE_S) == 1
    [again] = lease(state, 1, now_s=33.0)
    assert again.sample == first.sample
    renew(state, [first.lease_id], 44.0)
    assert ends(state) == {again.lease_id: 33.0 + LIFE_S}
    # From another generator too.
    group = state.groups["a"]
    with state.edit("a"):
        moved = leasing.lease_sample(state, facts(generator_id="gen-2"), group, 0, 45.0, suffix)
    with state.edit("a"):
        back = leasing.lease_sample(state, facts(), group, 0, 46.0, suffix)
    assert ends(state) == {back.lease_id: 46.0 + LIFE_S}
    renew(state, [moved.lease_id, first.lease_id], 60.0)
    assert ends(state) == {back.lease_id: 46.0 + LIFE_S}


def test_a_heartbeat_that_is_stored_after_a_later_one_ends_nothing_earlier() -> None:
    state = state_of("a", num_samples=3)
    one, two, three = lease(state, 2, now_s=0.0) + lease(state, 1, now_s=0.0, generator_id="gen-2")
    renew(state, [one.lease_id], 14.0)
    assert ends(state)[two.lease_id] == LIFE_S
    heard = Heard(holder_id="gen-1", lease_ids=frozenset((two.lease_id, three.lease_id)), heard_s=12.0)
    renewal.renew(state, heard, 15.0)
    assert ends(state) == {one.lease_id: 14.0 + LIFE_S, two.lease_id: 12.0 + LIFE_S, three.lease_id: LIFE_S}


def test_a_renewal_that_is_not_stored_is_made_again() -> None:
    state = state_of("a")
    [grant] = lease(state, 1, now_s=0.0)
    state.settle()
    for now_s, before_s in ((11.0, 0.0), (23.0, 12.0)):
        renew(state, [grant.lease_id], now_s)
        assert ends(state)[grant.lease_id] == now_s + LIFE_S
        state.rollback()
        assert ends(state)[grant.lease_id] == before_s + LIFE_S
        assert not state.is_changed
        renew(state, [grant.lease_id], now_s + 1.0)
        state.settle()
        assert ends(state)[grant.lease_id] == now_s + 1.0 + LIFE_S


def test_renewals_are_loaded_with_the_run() -> None:
    state = state_of("a", "b")
    named, _unnamed = lease(state, 2, now_s=0.0)
    lease(state, 1, now_s=1.0, generator_id="gen-2")
    renew(state, [named.lease_id], 12.0)
    state.settle()
    assert ends(reloaded(state)) == ends(state)
    assert len(set(ends(state).values())) == 3


def test_the_renewal_of_a_holder_that_is_gone_is_removed_and_not_of_one_that_holds_leases() -> None:
    state = state_of("a", "b")
    [done] = lease(state, 1, now_s=0.0)
    [kept] = lease(state, 1, now_s=0.0, generator_id="gen-2")
    renew(state, [done.lease_id], 12.0)
    renew(state, [kept.lease_id], 12.0, holder="gen-2")
    finish(state, [done])
    state.settle()
    # It may hold one again at any moment.
    leasing.expire(state, 30.0)
    assert not state.is_changed
    renew(state, [kept.lease_id], 31.0, holder="gen-2")
    leasing.expire(state, 40.0)
    assert state.only_grew
    assert state.delta().groups[renewal_name("gen-1")] is None
    state.rollback()
    assert state.renewals.keys() == {"gen-1", "gen-2"}
    renew(state, [kept.lease_id], 31.0, holder="gen-2")
    leasing.expire(state, 40.0)
    state.settle()
    assert state.renewals.keys() == {"gen-2"}
    assert ends(state) == {kept.lease_id: 31.0 + LIFE_S}


def test_a_bounded_number_of_renewals_is_removed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewal, "MAX_FORGOTTEN", 2)
    state, left = state_of("a"), []
    for number in range(5):
        state.set_renewal(f"gen-{number}", RenewalRecord(renewed_s=1.0))
    for _ in range(3):
        leasing.expire(state, 100.0)
        left.append(len(state.renewals))
    assert left == [3, 1, 0]


def test_a_run_of_format_3_opens_and_becomes_one_of_today_with_its_first_renewal() -> None:
    old = state_of("a")
    [grant] = lease(old, 1, now_s=0.0)
    with old.edit("a") as group:
        # So it was renewed then.
        group.samples[0].lease_expire_s = 12.0 + LIFE_S
    old.run.format = 3
    old.settle()
    state = reloaded(old)
    assert ends(state) == {grant.lease_id: 12.0 + LIFE_S}
    renew(state, [grant.lease_id], 16.0)
    assert (state.is_changed, state.run.format) == (False, 3)
    renew(state, [grant.lease_id], 24.0)
    assert (ends(state)[grant.lease_id], state.run.format) == (24.0 + LIFE_S, FORMAT)


def test_whatever_heartbeats_come_named_leases_live_on_and_others_end() -> None:
    """By the promise itself: what was named has three quarters of its time left, and none lasts a life longer."""
    for seed in range(20):
        _play(random.Random(seed))


def _play(rng: random.Random) -> None:
    """Some generators share groups, come and go, and name what they like; some commits fail, some brokers restart."""
    names = ("gen-1", "gen-2", "gen-3")
    state = state_of(*"abcdef", num_samples=4)
    named_s: dict[str, float] = {}
    now_s = 0.0
    for _ in range(120):
        now_s += rng.choice((0.0, 0.1, 1.0, 3.0))
        holder = rng.choice(names)
        for grant in lease(state, rng.randrange(3), now_s=now_s - rng.choice((0.0, 0.2)), generator_id=holder):
            named_s[grant.lease_id] = now_s
        state.settle()
        before, heard_s = ends(state), now_s - rng.choice((0.0, 0.0, 2.0))
        held = state.generation_leases.get(holder, {})
        lease_ids = frozenset(name for name in held if rng.random() < 0.9)
        renewal.renew(state, Heard(holder_id=holder, lease_ids=lease_ids, heard_s=heard_s), now_s)
        after = ends(state)
        assert {name for name, end_s in after.items() if end_s != before[name]} <= lease_ids
        assert all(before[name] <= end_s for name, end_s in after.items())
        if rng.random() < 0.2:
            state.rollback()
            assert ends(state) == before
            continue
        state.settle()
        named_s.update({name: max(heard_s, named_s[name]) for name in lease_ids})
        assert all(after[lease_id] >= heard_s + 0.75 * LIFE_S for lease_id in lease_ids)
        if rng.random() < 0.2:
            state = reloaded(state)
            assert ends(state) == after
        leasing.expire(state, now_s)
        state.settle()
        assert all(now_s < end_s <= named_s[name] + LIFE_S + 1e-6 for name, end_s in ends(state).items())
        assert all(is_group(name) for name in state.groups)
