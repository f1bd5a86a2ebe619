"""Links from a batch to the spans of the sampled samples in it."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.tracing import TraceContext, is_on, read_traceparent, sample_context
from penstock.v1 import broker_pb2


def sampled(leases: Iterable[broker_pb2.ScoringLease]) -> list[TraceContext]:
    """The spans of those leases' samples that are sampled."""
    if not is_on():
        return []
    keys = [(read_traceparent(lease.traceparent), lease.item.key) for lease in leases if lease.traceparent]
    return [sample_context(group, key.sample_index, key.attempt) for group, key in keys if group is not None]
