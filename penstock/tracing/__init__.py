"""Spans of a run, in OpenTelemetry's form: what a process records, and where it goes.

A process calls `configure` once and `record` for each span that has ended; both do nothing where tracing is off, and
then OpenTelemetry is not even imported. Ids of groups, samples and steps follow from their names (`ids`), so that any
process can name another one's span without asking for it. No knowledge of services.
"""

from penstock.tracing.context import TraceContext, current, headers, metadata, read_traceparent, within
from penstock.tracing.ids import group_context, sample_context, step_context, traceparent_of
from penstock.tracing.recording import Span, close, configure, is_on, record

__all__ = [
    "Span",
    "TraceContext",
    "close",
    "configure",
    "current",
    "group_context",
    "headers",
    "is_on",
    "metadata",
    "read_traceparent",
    "record",
    "sample_context",
    "step_context",
    "traceparent_of",
    "within",
]
