"""The books of a run: submitted = trained + dropped + in flight. Pure.

In flight is counted sample by sample from the records and never by subtraction, so that the equation can fail.
"""

from __future__ import annotations

from collections import Counter

from penstock.v1 import broker_pb2, types_pb2
from services.broker.run_state import RunState


def state_name(state: broker_pb2.SampleState.ValueType) -> str:
    """The state's name in lower case, for example "queued"."""
    return broker_pb2.SampleState.Name(state).removeprefix("SAMPLE_STATE_").lower()


def audit(state: RunState) -> broker_pb2.Audit:
    """The books now, in samples of purpose TRAIN."""
    run = state.run
    counted = Counter(
        sample.state
        for group_id in state.live
        if (group := state.groups[group_id]).purpose == types_pb2.PURPOSE_TRAIN
        for sample in group.samples
        if sample.state != broker_pb2.SAMPLE_STATE_DROPPED
    )
    in_flight = sum(counted.values())
    by_staleness = {versions: count for versions, count in run.trained_by_staleness.items() if count}
    return broker_pb2.Audit(
        submitted=run.submitted,
        trained=run.trained,
        dropped=dict(run.dropped),
        in_flight=in_flight,
        in_flight_by_state={state_name(value): count for value, count in counted.items()},
        balanced=run.submitted == run.trained + sum(run.dropped.values()) + in_flight,
        max_staleness_seen=max(by_staleness, default=0),
        policy_version=run.policy_version,
        trained_by_staleness=by_staleness,
    )
