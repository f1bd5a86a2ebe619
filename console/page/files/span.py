"""One span of a trace, as a line of OTLP JSON tells it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from console.page.files.values import mapping, text

UPDATE, PUBLISH, STEP = "rl.weights.update", "rl.weights.publish", "rl.train.step"
LEASE, CHUNK = "rl.sample.generate", "chunk"
KINDS = {
    "rl.generator.decode": "decoding",
    LEASE: "leased",
    UPDATE: "updating",
    "rl.reward.score": "scoring",
    "rl.environment.work": "environment",
    "rl.train.wait": "waiting",
    "rl.train.compute": "computing",
    PUBLISH: "publishing",
}
"""What a service does, by the name of its span."""
SAMPLE_PREFIXES = ("rl.sample", "rl.group")
_LANES = ("generator", "reward", "environment", "trainer", "broker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One span as it is written."""

    name: str
    span_id: str
    parent_id: str
    start_s: float
    """Unix seconds."""
    end_s: float
    lane: tuple[str, str]
    """Kind of the service, and its name."""
    attributes: Mapping[str, Any]
    events: Sequence[tuple[float, str, Mapping[str, Any]]] = field(default_factory=list)
    """Time, name and attributes of each."""

    @property
    def sample_key(self) -> str | None:
        """The sample that it belongs to."""
        return text(self.attributes.get("rl.sample.key"), 400) or None


def spans_of(line: bytes) -> Iterator[Span]:
    """The spans of a line; what is malformed is left out."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return
    for group in _list(document, "resourceSpans"):
        resource = _attributes(mapping(group.get("resource")))
        lane = _lane(resource)
        for scope in _list(group, "scopeSpans"):
            for span in _list(scope, "spans"):
                if (found := _span(span, lane)) is not None:
                    yield found


def _span(span: Mapping[str, Any], lane: tuple[str, str]) -> Span | None:
    start_s, end_s = _seconds(span.get("startTimeUnixNano")), _seconds(span.get("endTimeUnixNano"))
    if start_s is None or end_s is None or end_s < start_s:
        return None
    events = [
        (at_s, text(each.get("name"), 100), _attributes(each))
        for each in _list(span, "events")[:1000]
        if (at_s := _seconds(each.get("timeUnixNano"))) is not None
    ]
    return Span(
        name=text(span.get("name"), 100),
        span_id=text(span.get("spanId"), 64),
        parent_id=text(span.get("parentSpanId"), 64),
        start_s=start_s,
        end_s=end_s,
        lane=lane,
        attributes=_attributes(span),
        events=events,
    )


def _lane(resource: Mapping[str, Any]) -> tuple[str, str]:
    service = text(resource.get("service.name"), 100)
    name = text(resource.get("service.instance.id"), 200) or service or "?"
    kind = next((each for each in _LANES if each in service or each in name), "broker")
    return kind, name


def _attributes(owner: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in _list(owner, "attributes")[:100]:
        for kind, value in mapping(each.get("value")).items():
            if kind == "intValue" and isinstance(value, str):
                # OTLP writes 64-bit numbers as text.
                value = int(value) if value.lstrip("-").isdigit() and len(value) < 20 else None
            if isinstance(value, (str, int, float, bool)):
                found[text(each.get("key"), 100)] = value
    return found


def _seconds(nanoseconds: object) -> float | None:
    try:
        value = int(nanoseconds) if isinstance(nanoseconds, (str, int)) else 0
    except ValueError:
        return None
    return value / 1e9 if 0 < value < 2**63 else None


def _list(owner: object, name: str) -> list[Mapping[str, Any]]:
    value = owner.get(name) if isinstance(owner, dict) else None
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
