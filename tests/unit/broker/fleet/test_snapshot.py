"""The picture of a run that a policy is reviewed with."""

from __future__ import annotations

import pytest

from services.broker.dispatch.latency import LatencyModel
from services.broker.dispatch.situation import Prompt
from services.broker.fleet import snapshot
from services.broker.fleet.snapshot import Fleet, GeneratorStatus, prompts_in_slices
from services.broker.state.run_state import RunState
from tests.unit.broker.builders import finish, lease, open_state, put, submit


def prompts_of(state: RunState) -> list[Prompt]:
    return [prompt for part in prompts_in_slices(state) for prompt in part]


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
    monkeypatch.setattr(snapshot, "MAX_GROUPS_SHOWN", 1)
    shown, held = prompts_of(state)
    assert (shown, held.num_queued) == (new[0], 0)
    assert sorted(held.running) == [("gen-1", 4), ("gen-2", 0)]


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_steps_overlap_where_a_sample_may_be_stale(max_staleness: int) -> None:
    state = open_state(max_staleness=max_staleness)
    status = GeneratorStatus(
        generator_id="gen-1", model=LatencyModel(), num_free=1, max_context_tokens=128, is_speed_known=True
    )
    fleet, statuses = Fleet(), {"gen-1": status}
    situation = fleet.situation_of(state, statuses, fleet.loads(state, statuses, 0.0), "gen-1")
    assert situation.steps_overlap == bool(max_staleness)
