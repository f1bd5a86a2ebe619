"""Records spans into a folder, and reads them back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock import tracing
from penstock.tracing.settings import TraceSettings
from penstock.tracing.trace_file import trace_files


@dataclass(frozen=True, slots=True)
class Read:
    """A span as a trace file has it."""

    service: str
    span: dict[str, Any]

    @property
    def name(self) -> str:
        return self.span["name"]

    @property
    def attributes(self) -> dict[str, Any]:
        return {each["key"]: next(iter(each["value"].values())) for each in self.span.get("attributes", ())}

    @property
    def links(self) -> list[str]:
        return [each["spanId"] for each in self.span.get("links", ())]


@contextmanager
def tracing_to(folder: Path, *, ratio: float) -> Iterator[None]:
    """Inside, this process records; afterwards all of it is in the folder."""
    tracing.configure("test", instance="test-0", settings=TraceSettings(folder=folder, ratio=ratio))
    try:
        yield
    finally:
        tracing.close()


def spans_in(folder: Path) -> list[Read]:
    """All spans of a folder, as they were written."""
    found = []
    for path in trace_files(folder):
        for line in path.read_text().splitlines():
            for resource in json.loads(line)["resourceSpans"]:
                names = {each["key"]: each["value"].get("stringValue") for each in resource["resource"]["attributes"]}
                spans = [span for scope in resource["scopeSpans"] for span in scope["spans"]]
                found += [Read(names["service.name"], span) for span in spans]
    return found


def written_spans(folder: Path) -> dict[str, dict[str, Any]]:
    """The spans of a folder by their ids, as `tests.helpers.otlp.described` has them."""
    found = {}
    for path in trace_files(folder):
        # Not by `splitlines`, which knows more ends of a line than JSON escapes.
        for line in filter(None, path.read_text().split("\n")):
            for resource in json.loads(line)["resourceSpans"]:
                for span in (span for scope in resource["scopeSpans"] for span in scope["spans"]):
                    status = span.get("status", {})
                    found[span["spanId"]] = {
                        "resource": _values(resource["resource"]["attributes"]),
                        "trace": span["traceId"],
                        "parent": span.get("parentSpanId", ""),
                        "name": span["name"],
                        "times": (int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])),
                        "attributes": _values(span.get("attributes", ())),
                        "events": [
                            (each["name"], int(each["timeUnixNano"]), _values(each["attributes"]))
                            for each in span.get("events", ())
                        ],
                        "links": [(each["traceId"], each["spanId"]) for each in span.get("links", ())],
                        "error": status["message"] if status.get("code") == 2 else None,
                    }
    return found


def _values(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """Attributes of OTLP's JSON, which has integers as text."""
    found = {}
    for pair in pairs:
        [(kind, value)] = pair["value"].items()
        found[pair["key"]] = int(value) if kind == "intValue" else value
    return found
