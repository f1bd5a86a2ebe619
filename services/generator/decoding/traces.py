"""Spans of decoding: this generator's busy periods, and each lease of a sampled sample."""

from __future__ import annotations

import time
from collections.abc import Iterable

from penstock import tracing
from penstock.process.busy_time import Span as Period
from penstock.tracing.recording import Event, new_context, own_run
from penstock.tracing.sampled import sample_span
from penstock.v1 import broker_pb2

_CHUNK_S, _CHUNK_SHARE = 0.25, 1 / 32
"""A chunk is what came within this many seconds, or within this share of the lease's age if that is more."""


def record_periods(periods: Iterable[Period]) -> None:
    """Record periods in which samples were decoded."""
    if tracing.is_on():
        for start_s, end_s in periods:
            tracing.record(tracing.Span(name="rl.generator.decode", start_s=start_s, end_s=end_s))


def lease_span(lease: broker_pb2.Lease, trace: LeaseTrace | None) -> tracing.TraceContext | None:
    """The span within which a lease is worked on: its own, or the sample's if that is not sampled."""
    if trace is not None or not tracing.is_on():
        return None if trace is None else trace.context
    return sample_span("", lease.key, run_id=own_run())


class LeaseTrace:
    """One lease of a sampled sample, from its arrival until its last token is stored or it is given up."""

    def __init__(self, lease: broker_pb2.Lease, group: tracing.TraceContext) -> None:
        key = lease.key
        self._sample = tracing.sample_context(group, key.sample_index, key.attempt)
        self.context = new_context(self._sample)
        self._lease = lease
        self._start_s, self._begun_s = time.time(), time.monotonic()
        self._chunks: list[tuple[float, int, int]] = []
        """Of each chunk: when it began, seconds after the lease; its tokens; their version."""
        self._is_over = False

    @classmethod
    def of(cls, lease: broker_pb2.Lease) -> LeaseTrace | None:
        """The trace of a lease; None if its sample is not sampled, or nothing is recorded."""
        if not lease.prompt.traceparent or not tracing.is_on():
            return None
        group = tracing.read_traceparent(lease.prompt.traceparent)
        return None if group is None or not group.is_sampled else cls(lease, group)

    def note(self, num_tokens: int, policy_version: int) -> None:
        """Tokens came."""
        age_s = time.monotonic() - self._begun_s
        if self._chunks:
            at_s, before, version = self._chunks[-1]
            if version == policy_version and age_s - at_s < max(_CHUNK_S, age_s * _CHUNK_SHARE):
                self._chunks[-1] = (at_s, before + num_tokens, version)
                return
        self._chunks.append((age_s, num_tokens, policy_version))

    def end(self, outcome: str) -> None:
        """The lease is over; only the first call counts."""
        if self._is_over:
            return
        self._is_over = True
        key = self._lease.key
        tracing.record(
            tracing.Span(
                name="rl.sample.generate",
                start_s=self._start_s,
                end_s=self._start_s + time.monotonic() - self._begun_s,
                context=self.context,
                parent=self._sample,
                attributes={
                    "rl.sample.key": f"{key.group_id}/{key.sample_index}",
                    "rl.lease.id": self._lease.lease_id,
                    "rl.lease.first_token": len(self._lease.prefix_token_ids) // 4,
                    "rl.lease.outcome": outcome,
                },
                events=[
                    Event(
                        name="chunk",
                        at_s=self._start_s + at_s,
                        attributes={"rl.tokens": num_tokens, "rl.policy.version": version},
                    )
                    for at_s, num_tokens, version in self._chunks
                ],
            )
        )
