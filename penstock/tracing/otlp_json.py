"""Writes spans as JSON in the form of OTLP: one `TracesData` object, as OpenTelemetry's collector reads and writes.

https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding: ids are hexadecimal, 64-bit integers are strings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

_INTERNAL = 1
_ERROR = 2
Json = dict[str, Any]


def traces_data(spans: Sequence[ReadableSpan]) -> str:
    """One line of a trace file, without its end."""
    by_resource: dict[int, tuple[Any, list[Json]]] = {}
    for span in spans:
        by_resource.setdefault(id(span.resource), (span.resource, []))[1].append(_span(span))
    resources = [
        {
            "resource": {"attributes": _attributes(resource.attributes)},
            "scopeSpans": [{"scope": {"name": "penstock"}, "spans": members}],
        }
        for resource, members in by_resource.values()
    ]
    return json.dumps({"resourceSpans": resources}, ensure_ascii=False, separators=(",", ":"))


def _span(span: ReadableSpan) -> Json:
    found: Json = {
        **_ids(span.context),
        "name": span.name,
        "kind": _INTERNAL,
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
    }
    if span.parent is not None:
        found["parentSpanId"] = f"{span.parent.span_id:016x}"
    if span.attributes:
        found["attributes"] = _attributes(span.attributes)
    if span.events:
        found["events"] = [
            {"timeUnixNano": str(each.timestamp), "name": each.name, "attributes": _attributes(each.attributes or {})}
            for each in span.events
        ]
    if span.links:
        found["links"] = [_ids(link.context) for link in span.links]
    if span.status.description:
        found["status"] = {"code": _ERROR, "message": span.status.description}
    return found


def _ids(context: Any) -> Json:
    return {"traceId": f"{context.trace_id:032x}", "spanId": f"{context.span_id:016x}"}


def _attributes(values: Mapping[str, Any]) -> list[Json]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Any) -> Json:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": str(value)}
