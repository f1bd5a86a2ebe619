"""The spans of the samples that a worker has leased."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from penstock.tracing.context import TraceContext, read_traceparent
from penstock.tracing.ids import group_context, sample_context
from penstock.tracing.recording import is_on
from penstock.v1 import broker_pb2, types_pb2

_MAX_GROUPS = 256
"""Whose names are remembered: a worker has several samples of each at once."""


def sample_span(traceparent: str, key: types_pb2.SampleKey, *, run_id: str) -> TraceContext:
    """The span of a sample, whether it is sampled or not.

    Args:
        traceparent: What its group was given when it was submitted; empty if that is not sampled.
        key: Of the sample.
        run_id: Its run.
    """
    group = read_traceparent(traceparent) if traceparent else None
    return sample_context(group or _unsampled(run_id, key.group_id), key.sample_index, key.attempt)


@lru_cache(_MAX_GROUPS)
def _unsampled(run_id: str, group_id: str) -> TraceContext:
    """What a group that is not sampled has where it is recorded after all, since it failed or was slow."""
    return replace(group_context(run_id, group_id), is_sampled=False)


class BatchLinks:
    """What the span of a batch of leases links to: the samples in it that are sampled, and those that fail in it."""

    def __init__(self, leases: Iterable[broker_pb2.ScoringLease], links: list[TraceContext]) -> None:
        """Adds to `links`, and gives each item the trace context of its sample; neither where nothing is recorded."""
        self._links = links
        self._spans: dict[str, TraceContext] = {}
        for lease in leases if is_on() else ():
            span = sample_span(lease.traceparent, lease.item.key, run_id=lease.item.run_id)
            lease.item.traceparent = span.traceparent
            self._spans[lease.lease_id] = span
            if span.is_sampled:
                links.append(span)

    def note_failed(self, results: Iterable[broker_pb2.ScoreResult]) -> None:
        """These samples got no score."""
        spans = (self._spans.get(result.lease_id) for result in results)
        self._links += [span for span in spans if span is not None and not span.is_sampled]
