"""The span of a lease: chunks with their versions, few enough however long it lasts, and one end."""

from __future__ import annotations

import types

import pytest

from penstock import tracing
from penstock.tracing.recorder import MAX_EVENTS
from penstock.v1 import broker_pb2, types_pb2
from services.generator.decoding import traces
from services.generator.decoding.traces import LeaseTrace
from tests.helpers.traces import spans_in, tracing_to


@pytest.fixture
def now(monkeypatch):
    """Seconds that a test sets."""
    times = types.SimpleNamespace(s=100.0)
    clock = types.SimpleNamespace(time=lambda: times.s, monotonic=lambda: times.s)
    monkeypatch.setattr(traces, "time", clock)
    return times


def lease(traceparent: str) -> broker_pb2.Lease:
    key = types_pb2.SampleKey(group_id="g", sample_index=1, attempt=2)
    return broker_pb2.Lease(lease_id="l", key=key, prompt=types_pb2.Prompt(group_id="g", traceparent=traceparent))


def test_a_lease_of_hours_has_few_events_and_every_version(tmp_path, now):
    group = tracing.group_context("r", "g")
    with tracing_to(tmp_path, ratio=1.0):
        trace = LeaseTrace.of(lease(group.traceparent))
        for n in range(72_000):
            now.s += 0.1
            trace.note(3, n // 30_000)
        trace.end("stored")
        trace.end("revoked")
    [span] = spans_in(tmp_path)
    assert span.span["parentSpanId"] == f"{tracing.sample_context(group, 1, 2).span_id:016x}"
    assert span.attributes["rl.lease.outcome"] == "stored"
    events = [
        {each["key"]: int(each["value"]["intValue"]) for each in event["attributes"]} for event in span.span["events"]
    ]
    assert len(events) <= MAX_EVENTS
    assert sum(event["rl.tokens"] for event in events) == 3 * 72_000
    assert sorted({event["rl.policy.version"] for event in events}) == [0, 1, 2]


def test_what_is_not_sampled_or_not_recorded_has_no_trace(tmp_path):
    given = tracing.group_context("r", "g").traceparent
    assert LeaseTrace.of(lease(given)) is None
    with tracing_to(tmp_path, ratio=1.0):
        assert LeaseTrace.of(lease("")) is None
        assert LeaseTrace.of(lease("nonsense" * 1000)) is None
        assert LeaseTrace.of(lease(given[:-1] + "0")) is None
        assert LeaseTrace.of(lease(given)) is not None
