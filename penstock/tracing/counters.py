"""Metrics of tracing."""

from __future__ import annotations

from prometheus_client import Counter

RECORDED = Counter("penstock_trace_spans_recorded", "Spans recorded by this process.")
LOST = Counter(
    "penstock_trace_spans_lost",
    "Spans that were not written, by what did not take them: file (the disk), collector, queue (full, in spans or in "
    "bytes), or budget (the samples that failed or were slow were too many).",
    ["at"],
)
for at in ("file", "collector", "queue", "budget"):
    # At 0 from the start: an alert sees the first loss, too.
    LOST.labels(at)
