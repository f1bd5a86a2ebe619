"""The picture of a run that a policy is reviewed with."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest

from services.broker import drops, fleet
from services.broker.dispatch.latency import LatencyModel
from services.broker.dispatch.types import Prompt
from services.broker.fleet import Fleet, GeneratorStatus, prompts_in_slices, prompts_of
from services.broker.run_state import RunState
from tests.unit.broker.builders import finish, lease, open_state, put, submit


def test_a_review_sees_the_queue_in_order_of_arrival_and_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    state = open_state(group_size=3, groups_per_step=2, max_staleness=2)
    submit(state, "a", "b", "c")
    with state.edit("a") as group:
        for sample in group.samples:
            sample.predicted_tokens = 70.0
    first, second = lease(state, 2)
    finish(state, [first])
    assert put(state, second, [1, 2, 3, 4]) == []
    begun = Prompt(predicted_tokens=70.0, num_queued=1, step=0, is_begun=True, ended=[2], running=[("gen-1", 4)])
    new = [Prompt(predicted_tokens=0.0, num_queued=3, step=step) for step in (0, 1)]
    assert prompts_of(state) == [begun, *new]
    # What has nothing queued is shown too, however little of the queue is.
    lease(state, 1, generator_id="gen-2")
    monkeypatch.setattr(fleet, "MAX_GROUPS_SHOWN", 1)
    shown, held = prompts_of(state)
    assert (shown, held.num_queued) == (new[0], 0)
    assert sorted(held.running) == [("gen-1", 4), ("gen-2", 0)]


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_steps_overlap_where_a_sample_may_be_stale(max_staleness: int) -> None:
    state = open_state(max_staleness=max_staleness)
    status = GeneratorStatus(
        generator_id="gen-1", model=LatencyModel(), num_free=1, max_context_tokens=128, is_speed_known=True
    )
    situation = Fleet().situation(state, {"gen-1": status}, "gen-1", 0.0)
    assert situation.steps_overlap == bool(max_staleness)


def test_a_picture_is_made_in_slices_and_what_goes_meanwhile_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "SLICE", 8)
    state = open_state(group_size=4, groups_per_step=10, max_staleness=1, max_queued_groups=20)
    names = [f"g{number}" for number in range(12)]
    submit(state, *names)
    lease(state, 24)
    whole = prompts_of(state)
    parts = list(prompts_in_slices(state))
    assert [prompt for part in parts for prompt in part] == whole
    assert len(whole) == 12
    # Three pauses over 24 leases, one after each group.
    assert [len(part) for part in parts] == [0, 0, 0, *[1] * 12]
    slices = prompts_in_slices(state)
    next(slices)
    drops.drop_group(state, "g11", drops.CONTEXT_TOO_LONG)
    assert sum(len(part) for part in slices) == 11


def test_of_a_large_fleet_a_bounded_number_of_leases_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    state = open_state(group_size=4, groups_per_step=40, max_staleness=0, max_queued_groups=40)
    submit(state, *(f"g{number}" for number in range(40)))
    statuses = {}
    for number in range(16):
        name = f"gen-{number}"
        lease(state, 10, generator_id=name)
        statuses[name] = GeneratorStatus(
            generator_id=name, model=LatencyModel(), num_free=1, max_context_tokens=128, is_speed_known=True
        )
    monkeypatch.setattr(fleet, "MAX_LEASES_READ", 40)
    read: list[int] = []
    held_lengths = fleet._held_lengths

    def counted(state: RunState, held: Collection[tuple[str, int]], mean: float) -> Iterable[tuple[float, float]]:
        read.append(len(held))
        return held_lengths(state, held, mean)

    monkeypatch.setattr(fleet, "_held_lengths", counted)
    picture = Fleet()
    for look in range(1, 6):
        situation = picture.situation(state, statuses, "gen-0", float(look))
        assert sum(read) <= 40 * look
        # The numbers are of now whatever was read.
        assert {load.num_samples for load in situation.loads.values()} == {10}
    assert sum(read) >= 160
