"""The spans of a step: parts that are near are one, there are not too many, and sampled samples are linked to."""

from __future__ import annotations

from penstock import tracing
from penstock.clock import ManualClock
from penstock.v1 import types_pb2
from services.trainer.reporting.stall_timer import Cause
from services.trainer.reporting.step_trace import MAX_PARTS, StepTrace
from tests.helpers.traces import spans_in, tracing_to


def group(group_id: str, *, is_sampled: bool) -> types_pb2.TrajectoryGroup:
    traceparent = tracing.group_context("r", group_id).traceparent if is_sampled else ""
    keys = [types_pb2.SampleKey(group_id=group_id, sample_index=index) for index in range(2)]
    return types_pb2.TrajectoryGroup(
        prompt=types_pb2.Prompt(group_id=group_id, traceparent=traceparent),
        trajectories=[types_pb2.Trajectory(key=key) for key in keys],
    )


def test_a_step_has_its_waits_its_computing_and_links_to_what_was_sampled(tmp_path):
    clock = ManualClock()
    with tracing_to(tmp_path, ratio=0.0):
        trace = StepTrace("r", clock)
        begun_s = clock.monotonic_s()
        trace.note_groups([group("a", is_sampled=True), group("b", is_sampled=False), group("c", is_sampled=True)])
        trace.note_wait(Cause.SAMPLES, begun_s, begun_s + 1)
        trace.note_computing(begun_s + 1, begun_s + 1.5)
        trace.note_computing(begun_s + 1.501, begun_s + 2)
        clock.advance(3)
        # `c` arrived early, for the next step.
        trace.finish(["a", "b"], policy_version=4, history=1)
        for n in range(2 * MAX_PARTS):
            trace.note_computing(begun_s + 3 + n, begun_s + 3.5 + n)
        clock.advance(10_000)
        trace.finish(["c"], policy_version=5, history=1)
    step, wait, compute, *later = spans_in(tmp_path)
    root = tracing.group_context("r", "a")
    assert step.links == [f"{tracing.sample_context(root, index, 0).span_id:016x}" for index in range(2)]
    assert step.span["spanId"] == f"{tracing.step_context('r', 4, 1).span_id:016x}"
    assert (wait.name, wait.attributes) == ("rl.train.wait", {"rl.waits_for": "samples"})
    lengths = [
        int(each.span["endTimeUnixNano"]) - int(each.span["startTimeUnixNano"]) for each in (step, wait, compute)
    ]
    assert [round(length / 1e9, 3) for length in lengths] == [3.0, 1.0, 1.0]
    assert {each.span["parentSpanId"] for each in (wait, compute)} == {step.span["spanId"]}
    assert len(later) == 1 + MAX_PARTS
    assert len(later[0].links) == 2


def test_nothing_is_kept_where_tracing_is_off():
    trace = StepTrace("r", ManualClock())
    trace.note_groups([group("a", is_sampled=True)])
    trace.note_wait(Cause.SAMPLES, 0.0, 1.0)
    trace.finish(["a"], policy_version=1, history=0)
    assert not trace._parts
    assert not trace._samples
